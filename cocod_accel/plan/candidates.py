"""Ways to train on a cluster, what is expected of each, and which one to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cocod_accel.config.strict import ConfigError
from cocod_accel.theory.hiding import Choice

#: What others must gain over S-SGD, and over CoCoD-SGD, to be recommended instead.
_WORTH_IT, AS_GOOD = 0.05, 0.02


@dataclass(frozen=True)
class Candidate:
    """A way to train, and what to expect of it; times are simulated, steps as others were measured to need them."""

    algorithm: str
    period: int
    delay: int | None
    payload: str
    #: In a steady state, and what a worker sends for it.
    step_seconds: float
    step_bytes: float
    #: Throughput over that of one worker of speed 1 alone.
    throughput: float
    #: Steps to what S-SGD reaches, over S-SGD's.
    steps_needed: float

    @property
    def speedup(self) -> float:
        """In time to the accuracy that S-SGD reaches, over S-SGD on one worker of speed 1."""
        return self.throughput / self.steps_needed


def soonest(candidates: Sequence[Candidate], hiding: Choice, least: int) -> Candidate | None:
    """What hides its average, if it does so in rounds of ``least`` steps; else the fastest to S-SGD's accuracy."""
    if not candidates:
        return None
    fastest = max(candidates, key=lambda candidate: candidate.speedup)
    hides = next((c for c in candidates if Choice(c.payload, c.period, c.delay) == hiding), None)
    if hides is not None and (hiding.period <= least or hides.speedup >= (1 - AS_GOOD) * fastest.speedup):
        return hides
    return fastest


def best_algorithm(speedups: dict[str, float | None], num_workers: int) -> tuple[str, str]:
    """The one that is fastest to S-SGD's accuracy, and why; S-SGD where others hardly gain; then CoCoD-SGD."""
    known = {name: speedup for name, speedup in speedups.items() if speedup is not None}
    if not known:
        raise ConfigError("no algorithm can be simulated with this configuration; run cocod simulate to see why")
    if num_workers == 1 and "ssgd" in known:
        return "ssgd", "one worker: there is nobody to communicate with, and all algorithms are plain SGD"
    fastest = max(known, key=lambda name: known[name])
    ssgd = known.get("ssgd", 0.0)
    if fastest == "ssgd":
        return "ssgd", f"fastest to its accuracy: {ssgd:.2f}x one worker (expected); others need more steps than they save"
    if ssgd >= (1 - _WORTH_IT) * known[fastest]:
        return "ssgd", (
            f"S-SGD is as good ({ssgd:.2f}x one worker, {fastest} {known[fastest]:.2f}x; expected), and its gradients are "
            "exact"
        )
    chosen = "cocod" if known.get("cocod", 0.0) >= (1 - AS_GOOD) * known[fastest] else fastest
    gain = f", {known[chosen] / ssgd:.2f} times S-SGD" if ssgd else ""
    tied = [name for name in known if name not in (chosen, "ssgd") and known[name] >= (1 - AS_GOOD) * known[chosen]]
    ties = "".join(f"; {name} is as good ({known[name]:.2f}x)" for name in tied)
    return chosen, f"fastest to S-SGD's accuracy: {known[chosen]:.2f}x one worker{gain} (expected){ties}"
