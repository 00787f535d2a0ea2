"""How long every worker computes in every step: its mean, jitter, and stragglers now and then; the same for a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cocod_accel.simulator.cluster import Cluster
from cocod_accel.simulator.fleet import Array

#: Random numbers are drawn for about so many steps of all workers together at once.
_DRAWN_AT_ONCE = 1 << 18


def mean_seconds(cluster: Cluster, batches: Sequence[int]) -> Array:
    """Every worker's step with its batch."""
    by_kind: dict[tuple[float, int], float] = {}
    speeds = cluster.speeds()
    for rank, kind in enumerate(zip(speeds, batches, strict=True)):
        if kind not in by_kind:
            by_kind[kind] = cluster.step_seconds_of(rank, kind[1])
    return np.array([by_kind[kind] for kind in zip(speeds, batches, strict=True)])


def step_times(cluster: Cluster, batches: Sequence[int], seed: int) -> Iterator[Array]:
    """All workers' seconds of computing, step by step, without end.

    Algorithms that are simulated with the same seed meet the same slow steps.
    """
    mean, jitter = mean_seconds(cluster, batches), np.array(cluster.jitters())
    probability, factor = cluster.stragglers.probability, cluster.stragglers.factor
    # Lognormal with the mean and the coefficient of variation that are wanted.
    sigma = np.sqrt(np.log1p(jitter**2))
    shapes, lots = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    block = max(1, _DRAWN_AT_ONCE // len(mean))
    while True:
        rows = np.broadcast_to(mean, (block, len(mean)))
        if jitter.any():
            rows = rows * np.exp(shapes.standard_normal(rows.shape) * sigma - sigma**2 / 2)
        if probability > 0 and factor > 1:
            rows = np.where(lots.random(rows.shape) < probability, factor * rows, rows)
        yield from rows
