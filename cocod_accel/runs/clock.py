"""Training time, and the time at which an accuracy was first reached."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from cocod_accel.comm.device import wait_for_stream


class TrainingClock:
    """Seconds spent training on this worker, waits included.

    A device has done what it was told before the clock starts or stops.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: Time zero of spans.
        self.origin = time.perf_counter()
        self._total = 0.0
        self._since: float | None = None

    def state(self) -> list[float]:
        return [self.seconds, time.perf_counter() - self.origin]

    def load_state(self, state: list[float]) -> None:
        """Continue counting where an earlier process stopped."""
        self._total, elapsed = state
        self.origin = time.perf_counter() - elapsed

    def start(self) -> None:
        wait_for_stream(self._device)
        self._since = time.perf_counter()

    @property
    def is_running(self) -> bool:
        return self._since is not None

    def stop(self) -> None:
        if self._since is not None:
            wait_for_stream(self._device)
            self._total += time.perf_counter() - self._since
            self._since = None

    @property
    def seconds(self) -> float:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._total + running


@dataclass
class TimeToAccuracy:
    """The training time of the first evaluation at or above each target, not interpolated; ``better="lower"``: or below."""

    targets: list[float]
    better: str = "higher"
    seconds: dict[float, float | None] = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = dict.fromkeys(self.targets)

    def note(self, accuracy: float, train_seconds: float) -> None:
        for target in self.targets:
            if self.seconds[target] is None and (accuracy >= target if self.better == "higher" else accuracy <= target):
                self.seconds[target] = train_seconds
