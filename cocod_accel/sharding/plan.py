"""Pure arithmetic: speeds -> batch sizes, shards, steps, learning-rate factor.

The paper's proportional sampling (section 3.2): M_i = round(base * C_i / min C), S = floor(|D| / sum M) steps per
epoch on every worker, disjoint shards of S * M_i samples, and the learning rate of Remark 4. Without it every worker
takes the base batch, and AsynLocal-SGD takes k_i = max(1, round(k * C_i / min C)) steps per round instead.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cocod_accel.sharding.sampler import ShardSampler

#: Fastest over slowest worker; a larger ratio is a mistake, and could overflow.
_LARGEST_RATIO = 1_000_000
#: Speeds are relative, so larger ones mean nothing; and sums of them must stay finite.
_LARGEST_SPEED = 1e100


def check_speeds(speeds: Sequence[float]) -> None:
    for index, speed in enumerate(speeds):
        if not 1 / _LARGEST_SPEED <= speed <= _LARGEST_SPEED:  # not with nan either
            raise ValueError(f"speeds[{index}]={speed} is not positive and finite; give relative speeds such as [1, 1, 2]")
    if speeds and max(speeds) > _LARGEST_RATIO * min(speeds):
        raise ValueError(
            f"speeds: the fastest, {max(speeds):g}, is over {_LARGEST_RATIO:,} times the slowest, {min(speeds):g}; leave "
            "the slowest out"
        )


def proportional_batches(base: int, speeds: Sequence[float]) -> list[int]:
    """M_i = round(base * C_i / min C): the slowest worker takes the base batch."""
    check_speeds(speeds)
    slowest = min(speeds)
    return [round(base * speed / slowest) for speed in speeds]


def split_batch(total: int, speeds: Sequence[float]) -> list[int]:
    """Integers M_i >= 1 that add up to ``total`` and minimise the largest M_i / C_i, i.e. finish earliest.

    Each worker starts with floor(total * C_i / sum C), but at least 1. Then samples are given, one at a time, to the
    worker that would finish first with one more, or taken from the worker that would finish last.
    """
    check_speeds(speeds)
    if total < len(speeds):
        raise ValueError(
            f"global_batch={total} is less than one sample for each of {len(speeds)} workers; use {len(speeds)}"
        )
    all_speeds = math.fsum(speeds)
    batches = [max(1, math.floor(total * (speed / all_speeds))) for speed in speeds]
    missing = total - sum(batches)
    step = 1 if missing > 0 else -1
    # Next to change: the earliest finish with one more sample, or the latest finish; ties go to the lower rank.
    heap = [(_end(m, c, step), rank) for rank, (m, c) in enumerate(zip(batches, speeds, strict=True)) if m + step >= 1]
    heapq.heapify(heap)
    for _ in range(abs(missing)):
        _, rank = heapq.heappop(heap)
        batches[rank] += step
        if batches[rank] + step >= 1:
            heapq.heappush(heap, (_end(batches[rank], speeds[rank], step), rank))
    return batches


def _end(batch: int, speed: float, step: int) -> float:
    return (batch + 1) / speed if step > 0 else -batch / speed


def local_periods(period: int, speeds: Sequence[float]) -> list[int]:
    """k_i = max(1, round(k * C_i / min C)): faster workers take more steps per round."""
    check_speeds(speeds)
    slowest = min(speeds)
    return [max(1, round(period * speed / slowest)) for speed in speeds]


@dataclass(frozen=True)
class WorkPlan:
    """What each worker trains on; one entry per worker."""

    batches: tuple[int, ...]
    #: Samples each worker owns: those it uses in an epoch, plus its part of the remainder.
    shards: tuple[int, ...]
    #: Optimizer steps each worker takes in an epoch.
    steps: tuple[int, ...]
    #: The weight each worker passes to ``attach``; its share of a mean is its weight over the sum.
    weights: tuple[int, ...]
    #: Learning rate of all workers together over the base learning rate (Remark 4).
    learning_rate_factor: float

    @property
    def num_samples(self) -> int:
        return sum(self.shards)

    def sampler(self, rank: int, *, seed: int | str = 0, across: bool = False, order: Tensor | None = None) -> ShardSampler:
        """The batches of worker ``rank``, for ``DataLoader(data, batch_sampler=...)``."""
        return ShardSampler(self, rank, seed=seed, across=across, order=order)


def plan_workers(
    speeds: Sequence[float],
    num_samples: int,
    *,
    base_batch: int,
    global_batch: int | None = None,
    proportional: bool = True,
    period: int | None = None,
) -> WorkPlan:
    """Batches, shards, steps, weights and learning-rate factor of workers with these relative speeds.

    Args:
        speeds: C_i, one per worker; only their ratios count.
        num_samples: size of the training set.
        base_batch: the batch size for the base learning rate; the slowest worker's, unless a global batch is given.
        global_batch: the sum of all batches, whatever the speeds.
        proportional: False gives every worker the same batch.
        period: for AsynLocal-SGD, whose workers take equal batches and steps per round in proportion to speed: the
            slowest worker's.
    """
    num_workers = len(speeds)
    if num_workers == 0:
        raise ValueError("speeds=[] is empty; give one relative speed per worker")
    check_speeds(speeds)
    for name, value in (("num_samples", num_samples), ("base_batch", base_batch), ("period", period)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name}={value!r} is not an int")
    if base_batch < 1:
        raise ValueError(f"base_batch={base_batch} leaves a worker without samples; use at least 1")
    if period is not None and period < 1:
        raise ValueError(f"period={period} must be at least 1")
    by_steps = period is not None
    alike = [1.0] * num_workers
    counted = speeds if proportional and not by_steps else alike
    if global_batch is not None:
        batches = split_batch(global_batch, counted)
        if by_steps and len(set(batches)) > 1:
            raise ValueError(
                f"global_batch={global_batch} does not split evenly over {num_workers} workers; "
                f"use a multiple of {num_workers}"
            )
    else:
        batches = proportional_batches(base_batch, counted)
    steps_a_round = local_periods(period, speeds) if period is not None else [1] * num_workers
    samples_a_round = [batch * k for batch, k in zip(batches, steps_a_round, strict=True)]
    num_rounds = num_samples // sum(samples_a_round)
    if num_rounds < 1:
        raise ValueError(
            f"{num_samples} training samples are fewer than the {sum(samples_a_round)} that {num_workers} worker(s) "
            "take in a round; use a smaller batch or fewer workers"
        )
    used = [num_rounds * samples for samples in samples_a_round]
    return WorkPlan(
        batches=tuple(batches),
        shards=tuple(_share_remainder(used, num_samples)),
        steps=tuple(num_rounds * k for k in steps_a_round),
        weights=(1,) * num_workers if by_steps else tuple(batches),
        learning_rate_factor=sum(batches) / base_batch,
    )


def with_batches(plan: WorkPlan, batches: Sequence[int]) -> WorkPlan:
    """The same plan with different batches of the same sum: steps and learning rate stay."""
    assert sum(batches) == sum(plan.batches), "a different sum would change steps and learning rate"
    used = [steps * batch for steps, batch in zip(plan.steps, batches, strict=True)]
    shards = tuple(_share_remainder(used, plan.num_samples))
    return replace(plan, batches=tuple(batches), shards=shards, weights=tuple(batches))


def balanced_batches(
    batches: Sequence[int], seconds: Sequence[float], fixed: Sequence[float], smallest: int
) -> tuple[list[int], float]:
    """Batches of the same sum with which all workers finish together, and the resulting step time.

    A step of worker i takes ``seconds[i]`` with ``batches[i]``, of which the share ``fixed[i]`` does not depend on the
    batch. Every batch is at least ``smallest``.
    """
    total = sum(batches)
    fixed_seconds = [share * s for share, s in zip(fixed, seconds, strict=True)]
    a_sample = [(1 - share) * s / m for share, s, m in zip(fixed, seconds, batches, strict=True)]
    open_to_change = list(range(len(batches)))
    wanted = [float(smallest)] * len(batches)
    while open_to_change:
        # These end together with (end - fixed_i) / a_sample_i samples each, which add up to the rest.
        rest = total - smallest * (len(batches) - len(open_to_change))
        slopes = math.fsum(1 / a_sample[i] for i in open_to_change)
        end = (rest + math.fsum(fixed_seconds[i] / a_sample[i] for i in open_to_change)) / slopes
        for i in open_to_change:
            wanted[i] = (end - fixed_seconds[i]) / a_sample[i]
        too_small = [i for i in open_to_change if wanted[i] < smallest]
        if not too_small:
            break
        for i in too_small:
            wanted[i] = float(smallest)
            open_to_change.remove(i)
    found = split_batch(total - (smallest - 1) * len(batches), [max(w - smallest + 1, 1e-3) for w in wanted])
    found = [m + smallest - 1 for m in found]
    ends = [f + per * m for f, per, m in zip(fixed_seconds, a_sample, found, strict=True)]
    return found, max(ends)


def fixed_shares(
    batches: Sequence[int], seconds: Sequence[float], before: Sequence[tuple[int, float]], known: Sequence[float]
) -> list[float]:
    """The share of each worker's step that does not depend on its batch, from two steps with different batches.

    ``before``: (batch, seconds) of the last time. With the same batch, what is ``known`` stays; if the worker's speed
    has changed (less work, more time), the share is 0.
    """
    shares = []
    for batch, now, (old_batch, old), share in zip(batches, seconds, before, known, strict=True):
        if batch != old_batch:
            slope = (now - old) / (batch - old_batch)
            share = min(1 - slope * batch / now, _LARGEST_SHARE) if 0 < slope * batch <= now else 0.0
        shares.append(share)
    return shares


#: So that a step time that hardly depends on the batch does not move everything.
_LARGEST_SHARE = 0.9


def steps_in_shards(plan: WorkPlan, steps_a_round: Sequence[int]) -> tuple[int, ...]:
    """Steps of each worker in an epoch of whole rounds of ``steps_a_round``, within the shards of ``plan``."""
    rounds = [shard // (batch * k) for shard, batch, k in zip(plan.shards, plan.batches, steps_a_round, strict=True)]
    fewest = min(rounds)
    if fewest == 0:
        raise ValueError(f"a round of {list(steps_a_round)[:8]} steps does not fit in an epoch; use a shorter period")
    return tuple(fewest * k for k in steps_a_round)


def _share_remainder(used: list[int], num_samples: int) -> list[int]:
    """Distribute the remainder over the shards in proportion, so that every sample belongs to a worker."""
    total = sum(used)
    remainder = num_samples - total
    shares = [remainder * size // total for size in used]
    for index in range(remainder - sum(shares)):
        shares[index % len(shares)] += 1
    return [size + share for size, share in zip(used, shares, strict=True)]
