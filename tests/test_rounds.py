"""Where rounds end, against the definition read literally."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocod_accel.algorithms.rounds import Period, RoundClock

PERIODS = st.one_of(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), max_size=4).map(
        lambda pairs: [(0, 3), *sorted({first: (first, k) for first, k in pairs}.values())]
    ),
)


def round_ends(period: Any, num_steps: int) -> list[int]:
    """A round that starts at step s uses the period in force at s."""
    pairs = [(0, period)] if isinstance(period, int) else period
    ends: list[int] = []
    start = 0
    while True:
        in_force = [k for first, k in pairs if first <= start][-1]
        start += in_force
        if start > num_steps:
            return ends
        ends.append(start)


@given(PERIODS, st.integers(0, 80))
def test_rounds_end_where_the_definition_says(period: Any, num_steps: int) -> None:
    clock = RoundClock(Period.parse(period))
    ends = [attempt for attempt in range(1, num_steps + 1) if clock.tick()]
    assert ends == round_ends(period, num_steps)
    assert clock.rounds == len(ends)
    assert clock.attempts == num_steps


@given(st.integers(1, 9), st.integers(1, 30))
def test_a_constant_period_ends_rounds_at_its_multiples(period: int, num_steps: int) -> None:
    clock = RoundClock(Period.parse(period))
    assert [t for t in range(1, num_steps + 1) if clock.tick()] == list(range(period, num_steps + 1, period))


def test_a_restart_begins_a_whole_round() -> None:
    clock = RoundClock(Period.parse(4))
    assert [clock.tick() for _ in range(6)] == [False, False, False, True, False, False]
    clock.restart()
    assert [clock.tick() for _ in range(4)] == [False, False, False, True]


def test_a_shorter_period_ends_the_round_under_way_at_once() -> None:
    clock = RoundClock(Period.parse(2))
    clock.attempts = 3  # resumed from a run with a longer period, three steps into its first round
    assert clock.tick()


@pytest.mark.parametrize("value", ["5", 5.0, None, True, [5], [(0, 1.5)], [(0, True)], [(0, 1, 2)], {0: 5}])
def test_a_period_of_the_wrong_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"period=.*; use an int >= 1"):
        Period.parse(value)


@pytest.mark.parametrize("value", [0, -1, [], [(1, 5)], [(0, 0)], [(0, 5), (0, 2)], [(0, 5), (9, 2), (3, 1)]])
def test_an_impossible_period_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"period=.*; use an int >= 1"):
        Period.parse(value)
