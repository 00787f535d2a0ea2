"""Span rows of some steps of some workers: what a timeline shows, however large the cluster and long the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocod_accel.simulator.cluster import Cluster
from cocod_accel.simulator.fleet import Array

#: A timeline with more workers cannot be read.
MAX_WORKERS = 16


def chosen_ranks(cluster: Cluster, most: int = MAX_WORKERS) -> list[int]:
    """Worker 0, one of every group, and others evenly spread, in rank order."""
    num_workers = cluster.num_workers
    firsts = np.cumsum([0, *(group.count for group in cluster.workers)])[:-1].tolist()
    chosen = set(firsts[:most])
    for rank in np.linspace(0, num_workers - 1, min(most, num_workers)).round().astype(int).tolist():
        if len(chosen) < most:
            chosen.add(rank)
    return sorted(chosen)


def middle_window(num_steps: int, wanted: int) -> range:
    """``wanted`` steps in the middle of a run, where its periods are those of most of it."""
    length = min(num_steps, wanted)
    first = (num_steps - length) // 2
    return range(first, first + length)


class SpanSample:
    """Rows as the trainer's: {rank, step, name, start, end}, in simulated seconds."""

    def __init__(self, ranks: Sequence[int], window: range) -> None:
        self.ranks, self._window = list(ranks), window
        self.rows: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
        self.is_open = False

    def at(self, steps_taken: int) -> None:
        """Worker 0 has taken this many steps."""
        self.is_open = steps_taken in self._window

    def waited(self, joined: Array, end: float, blocked_from: Array, blocked_until: Array, steps: Sequence[int]) -> None:
        """Everybody has waited for a transfer."""
        for rank in self.ranks:
            self._add(rank, steps[rank], "communicate", joined[rank], end)
            if blocked_until[rank] > blocked_from[rank]:
                self._add(rank, steps[rank], "wait", blocked_from[rank], blocked_until[rank])

    def stepped(self, done: NDArray[np.bool_], steps: Sequence[int], begun: Array, ended: Array) -> None:
        """These workers' steps have ended; waits lie inside steps."""
        for rank in self.ranks:
            if done[rank]:
                self._add(rank, steps[rank], "compute", begun[rank], ended[rank])

    def _add(self, rank: int, step: int, name: str, start: float, end: float) -> None:
        row = {"rank": rank, "step": step, "name": name, "start": float(start), "end": float(end), "simulated": True}
        self.rows[rank].append(row)
