"""A configuration from files and overrides: strict loading, merging, validation of the whole.

YAML files are merged in order, then ``key.sub=value`` overrides. Unknown keys, wrong types and impossible combinations
are a :class:`ConfigError` of one line, found before any process waits for another.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cocod_accel.config.rules import validate
from cocod_accel.config.settings import ACCURACY, DEFAULT_EPOCHS, DEFAULT_TARGETS
from cocod_accel.config.settings import MEASURE as MEASURE
from cocod_accel.config.settings import Config as Config
from cocod_accel.config.settings import TaskConfig as TaskConfig
from cocod_accel.config.strict import ConfigError as ConfigError
from cocod_accel.config.strict import (
    first_line,
    merge_strictly,
    parse_yaml,
    read_text,
    require,
    resolved,
    save_text,
    save_yaml,
    to_yaml,
)

logger = logging.getLogger(__name__)

#: OmegaConf takes the better part of a minute for a hundred thousand numbers.
_MOST_IN_TREE = 1000


def load_config(arguments: list[str]) -> Config:
    """Merge the YAML files and the ``key=value`` overrides among ``arguments``, in that order, and validate."""
    config = merged_config(arguments)
    validate(config)
    return config


def merged_config(arguments: list[str]) -> Config:
    """The same without validating the whole: keys are known and values have their types, nothing more."""
    files = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    from_files = _merged_files(tuple((file, read_text(file)) for file in files))
    try:
        # All at once: a tree for each of them takes longer than all the rest.
        together = [_override(*overrides)] if overrides else []
        config = resolved(merge_strictly(Config, from_files, together))
    except ConfigError:
        if len(overrides) <= 1:
            raise
        one_by_one = [_override(override) for override in overrides]  # to name the one that is wrong
        config = resolved(merge_strictly(Config, from_files, one_by_one))
    assert isinstance(config, Config)
    if config.schedule.epochs is None and config.schedule.steps is None:
        config.schedule.epochs = DEFAULT_EPOCHS
    if config.metrics[0] != ACCURACY and config.evaluation.targets == list(DEFAULT_TARGETS):
        config.evaluation.targets = []
    config.cluster.speeds = _read_speeds(config.cluster.speeds)
    return config


def _override(*overrides: str) -> tuple[DictConfig, str]:
    """What they give, and their name in messages."""
    source = f"override {overrides[0].partition('=')[0]}"
    try:
        given = OmegaConf.from_dotlist(list(overrides))
    except Exception as error:
        raise ConfigError(f"{overrides[0]}: not a key=value override ({first_line(error)}); write e.g. seed=1") from error
    return _modernised(given, source), source


# A grid loads the same few files with other overrides, hundreds of times.
@functools.lru_cache(maxsize=64)
def _merged_files(files: tuple[tuple[str, str], ...]) -> Any:
    """The defaults with what files hold, each given by its name and its text. Merging on top of it copies it."""
    given_by = [(_modernised(parse_yaml(text, file), file), file) for file, text in files]
    return merge_strictly(Config, OmegaConf.structured(Config), given_by)


def load_training_config(arguments: list[str]) -> Config:
    """The same, for a run that will be trained."""
    config = load_config(arguments)
    cluster = config.emulate.cluster
    require(cluster is None, "emulate.cluster", cluster, "marks a simulated run; set emulate.cluster=null to train it")
    return config


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration; loading it gives an equal one."""
    speeds = config.cluster.speeds
    if not isinstance(speeds, list) or len(speeds) <= _MOST_IN_TREE:
        save_yaml(config, path)
        return
    without = replace(config, cluster=replace(config.cluster, speeds=None))
    before, null, after = to_yaml(without).partition("\n  speeds: null\n")
    assert null
    save_text(f"{before}\n  speeds: [{', '.join(map(repr, speeds))}]\n{after}", path)


# ---- files written before a key was replaced


def _pull_back(value: Any) -> dict[str, Any]:
    if value:
        raise ConfigError(
            f"algorithm.pull_back={value}: was removed because it discarded progress; "
            "use algorithm.own_share (1: the paper, 0: restart from the mean)"
        )
    return {}


def _outer_momentum(value: Any) -> dict[str, Any]:
    return {"outer": {"rate": 1.0, "momentum": value, "nesterov": False} if value else None}


#: Replaced keys of ``algorithm``: what the old value means now.
_REPLACED: dict[str, Callable[[Any], dict[str, Any]]] = {"pull_back": _pull_back, "outer_momentum": _outer_momentum}


def modernised(tree: dict[str, Any]) -> dict[str, Any]:
    """The contents of a file, with replaced keys translated."""
    options = tree.get("algorithm")
    if not isinstance(options, dict):
        return tree
    for key, translate in _REPLACED.items():
        if key in options:
            rest = {name: value for name, value in options.items() if name != key}
            # If the same file also has the current key, that one counts.
            options = {**translate(_as_number(options[key], key)), **rest}
    return {**tree, "algorithm": options}


def _modernised(given: DictConfig, source: str) -> DictConfig:
    tree: Any = OmegaConf.to_container(given, resolve=False)
    try:
        return DictConfig(modernised(tree))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _as_number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"algorithm.{key}={value}: was removed; use algorithm.own_share or algorithm.outer")
    return float(value)


# ---- helpers


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    rows: dict[str, Any] = {}
    for key, value in tree.items():
        rows.update(flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return rows


def _read_speeds(given: Any) -> Any:
    """The speeds in the speeds.json of an earlier run, if that is what was given."""
    if not isinstance(given, str) or given == MEASURE:
        return given
    try:
        saved = json.loads(Path(given).read_text())
        if saved.get("emulated"):
            logger.warning("cluster.speeds=%s: measured on emulated workers (%s)", given, saved["emulated"])
        return saved["speeds"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cluster.speeds={given}: must be a list, {MEASURE}, or the speeds.json of a run ({first_line(error)})"
        ) from error
