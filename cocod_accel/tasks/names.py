"""What a configuration names: an entry of a table, or a user's ``module:callable``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from cocod_accel.config.strict import ConfigError, first_line


def entry(table: Mapping[str, Any], name: str, key: str) -> Any:
    """The entry that ``key`` names."""
    if name not in table:
        near = difflib.get_close_matches(name, list(table), n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(table)}, or give module:callable"
        what = key.removesuffix(".name") if key.endswith(".name") else "name"
        raise ConfigError(f"{key}={name}: unknown {what}; {hint}")
    return table[name]


def imported(name: str, key: str) -> Any:
    """The user's ``module:callable`` that ``key`` names."""
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(f"{key}={name}: cannot be imported ({first_line(error)}); is its folder on PYTHONPATH?") from error
