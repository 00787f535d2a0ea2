"""Checks of the arguments of the formulas."""

from __future__ import annotations

#: A value outside this range is a mistake, and its powers would overflow or vanish.
_SMALLEST, _LARGEST = 1e-12, 1e12
_LARGEST_COUNT = 10**15


def check_real(name: str, value: float, *, zero: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} is not a number")
    smallest = 0 if zero else _SMALLEST
    if not smallest <= value <= _LARGEST:
        raise ValueError(f"{name}={value} must be from {smallest:g} to {_LARGEST:g}; check its sign and unit")


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not an int")
    if not 1 <= value <= _LARGEST_COUNT:
        raise ValueError(f"{name}={value} must be from 1 to {_LARGEST_COUNT:g}; use {1 if value < 1 else _LARGEST_COUNT}")
