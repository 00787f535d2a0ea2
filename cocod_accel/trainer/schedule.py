"""The learning rate and the period over the epochs of a run: pure functions of the config."""

from __future__ import annotations

import math
from collections.abc import Sequence


def learning_rate(
    epoch: float,
    base: float,
    scaled: float,
    warmup_epochs: float,
    decay_epochs: Sequence[float],
    decay_factor: float,
    cosine_until: float | None = None,
    stable_until: tuple[float, float] | None = None,
) -> float:
    """Gradual warm-up from the base to the scaled rate (Goyal et al. 2017), then division at the decay epochs.

    ``epoch`` counts from 0 and has a fraction: 80.0 is the beginning of the 81st epoch. ``cosine_until``: after the warm-up
    the rate follows half a cosine to 0 at this epoch. ``stable_until``: from the first of these epochs it falls linearly to
    0 at the second. With a schedule of steps, all of these count steps.
    """
    if epoch < warmup_epochs:
        rate = base + (scaled - base) * epoch / warmup_epochs
    elif cosine_until is None:
        rate = scaled
    else:
        rate = scaled * (1 + math.cos(math.pi * (epoch - warmup_epochs) / (cosine_until - warmup_epochs))) / 2
    if stable_until is not None and epoch > stable_until[0]:
        rate *= (stable_until[1] - epoch) / (stable_until[1] - stable_until[0])
    for decay_epoch in decay_epochs:
        if epoch >= decay_epoch:
            rate *= decay_factor
    return rate


def period_in_epoch(period: Sequence[tuple[int, int]], epoch: int) -> int:
    """The period in force in an epoch (counted from 0) of a schedule of (first epoch, period) pairs."""
    return [k for first, k in period if first <= epoch][-1]


def period_in_steps(period: Sequence[tuple[int, int]], steps_an_epoch: Sequence[int]) -> list[tuple[int, int]]:
    """A schedule of (first epoch, period) pairs as (first step, period) pairs; ``steps_an_epoch`` of every epoch."""
    pairs = []
    for first_epoch, k in period:
        if first_epoch < len(steps_an_epoch):
            pairs.append((sum(steps_an_epoch[:first_epoch]), k))
    return pairs
