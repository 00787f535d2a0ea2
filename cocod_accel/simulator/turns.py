"""Whose turn it is: the random numbers and threads of N workers that share one process.

Each process of a real run draws from generators of its own (python's, numpy's, torch's). Here a worker's are put away while
another one computes, and the caller's own come back whenever it has the process again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cocod_accel.checkpoint.rng import kept_randomness, random_state, set_random_state


class Turns:
    """The states of all workers' random numbers, and who is drawing now."""

    def __init__(self, states: Sequence[dict[str, Any]], threads: int) -> None:
        self._states = list(states)
        self._threads = threads
        self._acting: int | None = None

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Inside, workers compute; afterwards random numbers and threads are the caller's again."""
        threads = torch.get_num_threads()
        with kept_randomness():
            torch.set_num_threads(self._threads)
            try:
                yield
            finally:
                self._rest()
                torch.set_num_threads(threads)

    def become(self, rank: int) -> None:
        """From now on random numbers are those of worker ``rank``."""
        if self._acting != rank:
            self._rest()
            set_random_state(self._states[rank])
            self._acting = rank

    def _rest(self) -> None:
        if self._acting is not None:
            self._states[self._acting] = random_state()
            self._acting = None
