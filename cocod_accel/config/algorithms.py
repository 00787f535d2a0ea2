"""The algorithm that a configuration names, and its options.

The only place where a name becomes a class. An option of ``algorithm`` reaches every constructor that has a parameter of its
name; one that is set for an algorithm without such a parameter is refused. So a new option is a field of
:class:`~cocod_accel.config.settings.AlgorithmConfig` and a parameter of the algorithms that use it, and nothing else.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from cocod_accel.algorithms import NAMED, Algorithm
from cocod_accel.algorithms.rounds import PeriodLike
from cocod_accel.config.settings import AlgorithmConfig, Config
from cocod_accel.config.strict import ConfigError, first_line, require
from cocod_accel.theory.hiding import AUTO

#: Fields that are not options of a constructor. The period is, but may be set for an algorithm that has none: one file of
#: settings serves all algorithms of a comparison.
_NOT_OPTIONS = ("name", "args", "period")


def algorithm_class(name: str) -> type[Algorithm]:
    """The class that ``algorithm.name`` names: one of the registry, or ``module:Class``."""
    if ":" not in name:
        if name in NAMED:
            return NAMED[name]
        near = difflib.get_close_matches(name, list(NAMED), n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(NAMED)}, or give module:Class"
        raise ConfigError(f"algorithm.name={name}: unknown algorithm; {hint}")
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(
            f"algorithm.name={name}: cannot be imported ({first_line(error)}); is its folder on PYTHONPATH?"
        ) from error
    kind = getattr(module, attribute, None)
    own = [key for key, value in vars(module).items() if _is_algorithm(value) and value.__module__ == module.__name__]
    if kind is None:
        near = difflib.get_close_matches(attribute, own, n=1) or own[:1]
        hint = f"did you mean {module_name}:{near[0]}?" if near else "define a subclass of cocod_accel.Algorithm there"
        raise ConfigError(f"algorithm.name={name}: {module_name} has no {attribute}; {hint}")
    require(_is_algorithm(kind), "algorithm.name", name, "must be a subclass of cocod_accel.Algorithm")
    require(isinstance(getattr(kind, "name", None), str), "algorithm.name", name, 'needs a class attribute name = "..."')
    return kind  # type: ignore[no-any-return]


def build_algorithm(options: AlgorithmConfig, period: PeriodLike, seed: int = 0) -> Algorithm:
    """The algorithm with its options; whatever its constructor refuses is one line.

    ``seed``: for what rounds at random.
    """
    kind: Any = algorithm_class(options.name)
    arguments = constructor_arguments(options)
    if takes(kind, "period"):
        arguments["period"] = period
    if options.name in NAMED and takes(kind, "seed"):
        arguments["seed"] = seed
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"algorithm.args={options.args}: {options.name} does not accept them: {error}") from error
    try:
        return kind(**arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        line = first_line(error)
        is_about_option = line.split("=")[0].split(" ")[0] in {entry.name for entry in fields(options)}
        raise ConfigError(f"algorithm.{line}" if is_about_option else f"algorithm.name={options.name}: {line}") from error


def constructor_arguments(options: AlgorithmConfig) -> dict[str, Any]:
    """Keyword arguments for the constructor, without the period: options that differ from their default, and the user's."""
    kind = algorithm_class(options.name)
    is_own = ":" in options.name
    require(is_own or not options.args, "algorithm.args", options.args, "requires algorithm.name=module:Class")
    arguments: dict[str, Any] = {}
    for entry in fields(options):
        value = getattr(options, entry.name)
        if entry.name in _NOT_OPTIONS or value in (_default(entry), AUTO):  # what is to be chosen is not known yet
            continue
        _check_taken(kind, options.name, entry.name, value, _default(entry))
        arguments[entry.name] = value.build() if hasattr(value, "build") else value
    for key, value in options.args.items():
        known = key in {entry.name for entry in fields(options)}
        require(not known, f"algorithm.args.{key}", value, f"has its own setting; use algorithm.{key}")
        arguments[key] = value
    return arguments


def num_processes(config: Config) -> int:
    """Workers, and the server that some algorithms have, whose rank follows theirs."""
    return config.cluster.num_workers + algorithm_class(config.algorithm.name).is_served


def takes(kind: type[Algorithm], option: str) -> bool:
    """Whether the constructor of an algorithm has such a parameter."""
    parameters = inspect.signature(kind).parameters
    return option in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _check_taken(kind: type[Algorithm], name: str, option: str, value: Any, default: Any) -> None:
    others = [other for other, candidate in NAMED.items() if takes(candidate, option)]
    shown = "null" if default is None else default
    fix = f"set it to {shown}" + (f", or use {', '.join(others)}" if others else "")
    given = vars(value) if is_dataclass(value) else value
    require(takes(kind, option), f"algorithm.{option}", given, f"is not an option of {name}; {fix}")


def _default(entry: Any) -> Any:
    return entry.default if entry.default is not MISSING else entry.default_factory()


def _is_algorithm(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Algorithm)
