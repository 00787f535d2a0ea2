"""YAML into typed trees, strictly: an unknown key, a wrong type or a missing file is one line that names the nearest fix."""

from __future__ import annotations

import difflib
import functools
import inspect
import io
import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf


class ConfigError(ValueError):
    """Something is wrong with the configuration; the message is one line with the key, the value and the fix."""


def profiles() -> Path:
    """The configurations that come with the package: inside it where it is installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def found(file: str | Path) -> Path:
    """The path of a file; ``configs/...`` is the package's own if there is none here."""
    path = Path(file)
    if path.is_file() or path.parts[:1] != ("configs",):
        return path
    return profiles().joinpath(*path.parts[1:])


def read_text(file: str | Path) -> str:
    """What a YAML file holds."""
    path = found(file)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"did you mean {Path(file).parent / near[0]}?" if near else "give a YAML file, or key=value"
        raise ConfigError(f"{file}: no such file; {hint}")
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {first_line(error)}") from error


#: A list of a hundred thousand speeds is nothing dangerous. OmegaConf 2.3 has no limit, and 2.4 one of 10,000 nodes.
_LIMIT: dict[str, Any] = {"max_yaml_expanded_nodes": 300_000}


def tree_of(text: str) -> Any:
    """YAML as an OmegaConf tree."""
    has_limit = _LIMIT.keys() <= inspect.signature(OmegaConf.load).parameters.keys()
    return OmegaConf.load(io.StringIO(text), **(_LIMIT if has_limit else {}))


def parse_yaml(text: str, file: str | Path) -> DictConfig:
    """The mapping that ``text`` is; ``file`` names it in messages."""
    try:
        tree = tree_of(text)
    except Exception as error:
        raise ConfigError(f"{file}: not valid YAML: {first_line(error)}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{file}: must be a mapping, not a list")
    return tree


def merge_strictly(node: type, tree: Any, given_by: Sequence[tuple[DictConfig, str]]) -> Any:
    """``tree``, an OmegaConf tree of the dataclass ``node``, with the keys of what each source gives, in order."""
    for given, source in given_by:
        _check_keys(node, node, OmegaConf.to_container(given, resolve=False), "", source)
    try:
        return OmegaConf.merge(tree, *(given for given, _ in given_by))
    except Exception:  # not only OmegaConf's own: a mapping for a list is a TypeError
        # Merging copies the whole tree: only go one by one to find the source of the bad value.
        for given, source in given_by:
            try:
                tree = OmegaConf.merge(tree, given)
            except Exception as error:
                key = getattr(error, "full_key", None) or ""
                raise ConfigError(f"{_where(source, key)}: {first_line(error)}") from error
        raise


def resolved(tree: Any) -> Any:
    """The dataclass that an OmegaConf tree represents."""
    try:
        OmegaConf.resolve(tree)
        return OmegaConf.to_object(tree)
    except Exception as error:
        raise ConfigError(f"{getattr(error, 'full_key', None) or 'config'}: {first_line(error)}") from error


def to_yaml(config: Any) -> str:
    """A dataclass, or a tree of one, as YAML."""
    return OmegaConf.to_yaml(config if OmegaConf.is_config(config) else OmegaConf.structured(config))


def save_yaml(config: Any, path: Path) -> None:
    """Write a dataclass, or a tree of one; loading it gives an equal one."""
    save_text(to_yaml(config), path)


def save_text(text: str, path: Path) -> None:
    """Write a file, all of it or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:  # a full disk
        temporary.unlink(missing_ok=True)
        raise


#: Longer values are cut in messages.
_LONGEST = 300


def require(good: bool, key: str, value: object, rule: str) -> None:
    if not good:
        shown = str(value)
        raise ConfigError(f"{key}={shown if len(shown) <= _LONGEST else shown[:_LONGEST] + '...'}: {rule}")


def require_choice(text: str, key: str, choices: list[str]) -> None:
    near = difflib.get_close_matches(text, choices, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"
    require(text in choices, key, text, f"unknown value; {hint}")


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def printable(text: object) -> str:
    """One line as a terminal may show it: names and values may come from anybody, and steer a terminal by escapes."""
    said = str(text)
    return said if said.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said)


def printable_lines(text: object) -> str:
    """The same for several lines."""
    return "\n".join(map(printable, str(text).split("\n")))


def _where(source: str, key: str) -> str:
    """The source of a value and its key, named once: the source of an override ends with its key."""
    return source if not key or source == f"override {key}" else f"{source}: {key}"


def _check_keys(root: type, node: type, given: Any, prefix: str, source: str) -> None:
    if not isinstance(given, dict):
        raise ConfigError(f"{_where(source, prefix.rstrip('.'))}: must be a mapping, not {given!r}")
    known = _sections(node)
    for key, value in given.items():
        if key not in known:
            elsewhere = sorted(_elsewhere(str(key), root), key=lambda name: name.count("."))  # the outermost first
            near = difflib.get_close_matches(str(key), list(known), n=1) or elsewhere
            hint = f"did you mean {prefix if near[0] in known else ''}{near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown key {prefix}{key}; {hint}")
        child, shape = known[key]
        if child is None or (value is None and shape == "optional"):
            continue
        if shape != "list":
            _check_keys(root, child, value, f"{prefix}{key}.", source)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                _check_keys(root, child, entry, f"{prefix}{key}[{index}].", source)
        else:
            raise ConfigError(f"{_where(source, f'{prefix}{key}')}: must be a list, not {value!r}")


@functools.cache
def _sections(node: type) -> dict[str, tuple[type | None, str]]:
    """Every key of a dataclass: the dataclass it holds (None: a plain value), and whether it is one, optional or a list."""
    hints = typing.get_type_hints(node)
    found: dict[str, tuple[type | None, str]] = {}
    for entry in fields(node):
        hint = hints[entry.name]
        kinds = [hint, *typing.get_args(hint)]
        child = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
        shape = "list" if typing.get_origin(hint) is list else "optional" if type(None) in kinds else "one"
        found[entry.name] = child, shape
    return found


def _elsewhere(key: str, node: type, prefix: str = "") -> list[str]:
    """Full names of the keys called ``key`` in any section."""
    found: list[str] = []
    for name, (child, shape) in _sections(node).items():
        if name == key:
            found.append(prefix + key)
        if child is not None and shape != "list":
            found += _elsewhere(key, child, f"{prefix}{name}.")
    return found
