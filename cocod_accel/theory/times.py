"""Section 4.2: step times when computation and communication alternate or overlap, and the speedup."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cocod_accel.theory.checks import check_count, check_real
from cocod_accel.theory.convergence import iteration_speedup


@dataclass(frozen=True)
class StepTimes:
    """The components of a step."""

    #: T_comp: one worker's step without communication; in a mixed cluster, the slowest worker's, with the base batch.
    compute_seconds: float
    #: T_comm^N: one average over all N workers, with nothing else running. Depends on N: measure or model it.
    comm_seconds: float
    #: a: the share of a worker's computing that a transfer takes while in flight (the paper's a%), from 0 to 1.
    interference: float
    #: What the main thread computes for one average beside the steps: encoding and decoding a short code.
    coding_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_real("compute_seconds", self.compute_seconds)
        check_real("comm_seconds", self.comm_seconds, zero=True)
        check_real("interference", self.interference, zero=True)
        check_real("coding_seconds", self.coding_seconds, zero=True)
        if self.interference > 1:
            share = f"{self.interference / 100:g} for {self.interference:g}%"
            raise ValueError(f"interference={self.interference} must be a share from 0 to 1; use {share}")


def ssgd_step_seconds(times: StepTimes) -> float:
    """T_comp + T_comm: one after the other. The denominator of eq. (13)."""
    return times.compute_seconds + times.comm_seconds


def pipe_step_seconds(times: StepTimes) -> float:
    """T_comp + a T_comm, the denominator of eq. (14): valid if T_comm fits within one step."""
    return cocod_step_seconds(times, 1)


def local_step_seconds(times: StepTimes, period: int) -> float:
    """T_comp + T_comm / k, the denominator of eq. (15)."""
    check_count("period", period)
    return times.compute_seconds + times.comm_seconds / period


def cocod_step_seconds(times: StepTimes, period: int) -> float:
    """T_comp + a T_comm / k, the denominator of eq. (16): valid if T_comm fits within k steps."""
    check_count("period", period)
    return times.compute_seconds + times.interference * times.comm_seconds / period


def pipe_bounded_step_seconds(times: StepTimes) -> float:
    """max(T_comm, T_comp + a T_comm): a step cannot end before the transfer it overlaps."""
    return cocod_bounded_step_seconds(times, 1)


def cocod_bounded_step_seconds(times: StepTimes, period: int) -> float:
    """max(T_comm, k T_comp + a T_comm) / k: a round cannot end before its transfer, which the paper's formula ignores.

    While the transfer is in flight, (1 - a) T_comm of the k T_comp seconds are done; the rest follows at full speed.
    """
    return max(cocod_step_seconds(times, period), times.comm_seconds / period)


def hiding_period(times: StepTimes) -> int:
    """The smallest k that hides a transfer: T_comm <= k T_comp + a T_comm. From there both CoCoD-SGD formulas agree."""
    needed = (1 - times.interference) * times.comm_seconds / times.compute_seconds
    return max(1, math.ceil(needed * (1 - 1e-12)))  # 3.0000000000000004 is 3


def step_seconds(times: StepTimes, period: int, *, bounded: bool = True) -> dict[str, float]:
    """The average seconds per step of each algorithm; ``bounded=False``: the paper's formulas unchanged."""
    pipe, cocod = pipe_step_seconds(times), cocod_step_seconds(times, period)
    if bounded:
        pipe, cocod = pipe_bounded_step_seconds(times), cocod_bounded_step_seconds(times, period)
    local = local_step_seconds(times, period)
    return {"ssgd": ssgd_step_seconds(times), "pipe": pipe, "local": local, "cocod": cocod, "asynlocal": local}


def _speedup(num_workers: int, times: StepTimes, seconds: float) -> float:
    """TS = T_1 / T_N, eq. (3), def_ts; with linear iteration speedup N T_comp / (average seconds per step)."""
    check_count("num_workers", num_workers)
    return num_workers * times.compute_seconds / seconds


def ssgd_speedup(times: StepTimes, num_workers: int) -> float:
    """Eq. (13), TS_S-SGD: N T_comp / (T_comp + T_comm)."""
    return _speedup(num_workers, times, ssgd_step_seconds(times))


def pipe_speedup(times: StepTimes, num_workers: int) -> float:
    """Eq. (14), TS_Pipe-SGD: N T_comp / (T_comp + a T_comm)."""
    return _speedup(num_workers, times, pipe_step_seconds(times))


def local_speedup(times: StepTimes, num_workers: int, period: int) -> float:
    """Eq. (15), TS_Local-SGD: N T_comp / (T_comp + T_comm / k)."""
    return _speedup(num_workers, times, local_step_seconds(times, period))


def cocod_speedup(times: StepTimes, num_workers: int, period: int) -> float:
    """Eq. (16), TS_CoCoD-SGD: N T_comp / (T_comp + a T_comm / k)."""
    return _speedup(num_workers, times, cocod_step_seconds(times, period))


def speedups(
    times: StepTimes, speeds: Sequence[float], period: int, *, proportional: bool = True, bounded: bool = True
) -> dict[str, float]:
    """The time speedup of each algorithm over the slowest worker alone, by name.

    With proportional sampling a step of all workers is worth sum C_i / C_1 of its steps; with equal batches N, as all
    others wait for it. ``asynlocal`` has equal batches, but faster workers take more steps: sum C_i / C_1 again, up to
    the rounding of periods to whole steps (as batches are rounded to whole samples).
    """
    all_busy = iteration_speedup(speeds)
    worth = dict.fromkeys(("ssgd", "pipe", "local", "cocod"), all_busy if proportional else float(len(speeds)))
    worth["asynlocal"] = all_busy
    return {
        name: worth[name] * times.compute_seconds / seconds
        for name, seconds in step_seconds(times, period, bounded=bounded).items()
    }
