"""What is declared beside a setting: the values it takes, and what a change of it affects.

Both are metadata of a dataclass field, joined with ``|``::

    keep: int = field(default=2, metadata=at_least(1) | affects(Affects.NOTHING))

A rule about one setting belongs here. Rules between several settings are in :mod:`cocod_accel.config.rules`.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import Flag, auto
from typing import Any

from cocod_accel.config.strict import require, require_choice

_RULE, _AFFECTS = "rule", "affects"

Metadata = dict[str, Any]


class Affects(Flag):
    """What a change of a setting affects. A setting that declares nothing affects everything."""

    NOTHING = 0
    #: Which run it is: an unfinished run is not resumed with another value.
    RUN = auto()
    #: What a run measures: runs that differ in it are not repetitions of one experiment.
    FIGURES = auto()
    #: A cell of the reproduction: it is computed again.
    CELL = auto()
    EVERYTHING = RUN | FIGURES | CELL


def affects(what: Affects) -> Metadata:
    """Of a field; of a section, for all fields in it that do not declare it themselves."""
    return {_AFFECTS: what}


def affected_by(key: str, node: type) -> Affects:
    """What a change of a key, such as ``cluster.num_workers``, affects in the settings of ``node``."""
    found = Affects.EVERYTHING
    kind: type | None = node
    for name in key.split("."):
        if kind is None:  # inside a dict, such as task.args
            break
        entry = next((entry for entry in fields(kind) if entry.name == name), None)
        if entry is None:
            break
        found = entry.metadata.get(_AFFECTS, found)
        kind = section_of(kind, name)
    return found


# ---- the values that one setting takes


@dataclass(frozen=True)
class Rule:
    """A condition on one value, and the words that state it."""

    is_met: Callable[[Any], bool]
    text: str

    def check(self, key: str, value: Any) -> None:
        require(self.is_met(value), key, value, self.text)


@dataclass(frozen=True)
class Choice:
    """One of several names; a near miss is named."""

    names: tuple[str, ...]

    def check(self, key: str, value: Any) -> None:
        require_choice(value, key, list(self.names))


def must(text: str, is_met: Callable[[Any], bool]) -> Metadata:
    """A rule in words, and as a function of the value. ``null`` and its meaning are the field's own affair."""
    return {_RULE: Rule(is_met, text)}


def at_least(least: int, most: int = 1_000_000_000) -> Metadata:
    """A count. Beyond ``most`` it would only run out of memory, or of floating-point numbers."""
    return must(f"must be at least {least}, and at most {most:,}", lambda value: least <= value <= most)


def positive(null: str = "") -> Metadata:
    """``null``: what leaving it out means, where that may help."""
    return must("must be positive" + (f"; null: {null}" if null else ""), lambda v: math.isfinite(v) and v > 0)


def not_negative(null: str = "") -> Metadata:
    text = "must not be negative" + (f"; null: {null}" if null else "")
    return must(text, lambda v: math.isfinite(v) and v >= 0)


def within(interval: str) -> Metadata:
    """``[0, 1)`` and the like: a bracket includes its end."""
    low, high = (float(end) for end in interval[1:-1].split(","))

    def is_inside(value: float) -> bool:
        above = value >= low if interval[0] == "[" else value > low
        return above and (value <= high if interval[-1] == "]" else value < high)

    return must(f"must be in {interval}", is_inside)


def one_of(*names: str) -> Metadata:
    return {_RULE: Choice(names)}


def check_fields(tree: Any, prefix: str = "") -> None:
    """Apply the rule of every field in a tree of dataclasses, to each entry where the field is a list."""
    for key, value, entry, node in _values(tree, prefix):
        kind = _item_kind(node, entry.name)
        if kind is not None:  # OmegaConf lets a list of lists pass for a list of numbers, and a mapping for a list
            require(isinstance(value, list), key, value, "must be a list")
            for index, item in enumerate(value):
                require(type(item) is kind, f"{key}[{index}]", item, f"must be {_KINDS[kind]}")
        rule = entry.metadata.get(_RULE)
        if rule is None or value is None:
            continue
        if isinstance(value, list):
            for index, item in enumerate(value):
                rule.check(f"{key}[{index}]", item)
        else:
            rule.check(key, value)


#: What lists hold.
_KINDS = {int: "a whole number", float: "a number", str: "a word"}


@functools.cache
def _item_kind(node: type, name: str) -> type | None:
    """What the list in a field of ``node`` holds; None: no list, or one of sections."""
    hint = typing.get_type_hints(node)[name]
    kind = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
    return kind if kind in _KINDS else None


def _values(tree: Any, prefix: str) -> Iterator[tuple[str, Any, Field[Any], type]]:
    for entry in fields(tree):
        value = getattr(tree, entry.name)
        if is_dataclass(value):
            yield from _values(value, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", value, entry, type(tree)


# ---- sections


@functools.cache
def section_of(node: type, name: str) -> type | None:
    """The dataclass that a field of ``node`` holds, alone, optionally or in a list; None: a plain value."""
    hint = typing.get_type_hints(node)[name]
    return next((kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)
