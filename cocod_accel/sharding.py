"""Pure arithmetic: speeds -> batch sizes, shards, steps, learning-rate factor; and the order of samples in an epoch.

The paper's proportional sampling (section 3.2): M_i = round(base * C_i / min C), S = floor(|D| / sum M) steps an epoch
for everybody, disjoint shards of S * M_i samples, and the learning rate of Remark 4. Without it every worker takes the base
batch, and AsynLocal-SGD takes k_i = max(1, round(k * C_i / min C)) steps a round instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def check_speeds(speeds: Sequence[float]) -> None:
    for index, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed > 0):
            raise ValueError(f"speeds[{index}]={speed} is not positive and finite; give relative speeds such as [1, 1, 2]")


def proportional_batches(base: int, speeds: Sequence[float]) -> list[int]:
    """M_i = round(base * C_i / min C): the slowest worker takes the base batch."""
    check_speeds(speeds)
    slowest = min(speeds)
    return [round(base * speed / slowest) for speed in speeds]


def local_periods(period: int, speeds: Sequence[float]) -> list[int]:
    """k_i = max(1, round(k * C_i / min C)): faster workers take more steps a round."""
    check_speeds(speeds)
    slowest = min(speeds)
    return [max(1, round(period * speed / slowest)) for speed in speeds]


@dataclass(frozen=True)
class WorkPlan:
    """Who trains on what; one entry per worker."""

    batches: tuple[int, ...]
    #: Samples each worker owns: what it uses in an epoch, and its part of the remainder.
    shards: tuple[int, ...]
    #: Optimizer steps each worker takes in an epoch.
    steps: tuple[int, ...]
    #: From the base learning rate to the one of all workers together (Remark 4).
    learning_rate_factor: float


def plan_workers(
    num_samples: int,
    base_batch: int,
    speeds: Sequence[float],
    *,
    proportional: bool = False,
    period: int | None = None,
) -> WorkPlan:
    """The plan of an epoch. ``period``: the workers take steps in proportion to their speeds, this many at least a round."""
    num_workers = len(speeds)
    batches = proportional_batches(base_batch, speeds) if proportional else [base_batch] * num_workers
    steps_a_round = local_periods(period, speeds) if period is not None else [1] * num_workers
    samples_a_round = [batch * k for batch, k in zip(batches, steps_a_round, strict=True)]
    num_rounds = num_samples // sum(samples_a_round)
    if num_rounds == 0:
        raise ValueError(
            f"{num_samples} training samples are fewer than the {sum(samples_a_round)} that {num_workers} worker(s) "
            "take in a round; use a smaller batch_size or fewer workers"
        )
    used = [num_rounds * samples for samples in samples_a_round]
    return WorkPlan(
        batches=tuple(batches),
        shards=tuple(_share_remainder(used, num_samples)),
        steps=tuple(num_rounds * k for k in steps_a_round),
        learning_rate_factor=sum(batches) / base_batch,
    )


def steps_in_shards(plan: WorkPlan, steps_a_round: Sequence[int]) -> tuple[int, ...]:
    """Steps of each worker in an epoch of whole rounds of ``steps_a_round``, within the shards of ``plan``."""
    rounds = [shard // (batch * k) for shard, batch, k in zip(plan.shards, plan.batches, steps_a_round, strict=True)]
    return tuple(min(rounds) * k for k in steps_a_round)


def _share_remainder(used: list[int], num_samples: int) -> list[int]:
    """What is left over goes to the shards in proportion, so that every sample belongs to somebody."""
    remainder = num_samples - sum(used)
    shares = [remainder * size // sum(used) for size in used]
    for index in range(remainder - sum(shares)):
        shares[index % len(shares)] += 1
    return [size + share for size, share in zip(used, shares, strict=True)]


class ShardSampler:
    """Which samples a worker sees in an epoch, in which order: its own shard, reshuffled every epoch.

    Shards are fixed by the seed. A shard may be larger than what an epoch uses; then the part that is left out moves on
    from epoch to epoch, so that no sample is left out for ever.
    """

    def __init__(self, num_samples: int, shards: Sequence[int], rank: int, seed: int) -> None:
        order = torch.randperm(num_samples, generator=seeded_generator(seed, "shards"))
        start = sum(shards[:rank])
        self.shard: Tensor = order[start : start + shards[rank]]
        self._seed = seed
        self._rank = rank

    def epoch(self, number: int, num_used: int) -> Tensor:
        """The indices of the samples of epoch ``number``, in the order they are used."""
        size = len(self.shard)
        if num_used > size:
            raise ValueError(f"an epoch of {num_used} samples does not fit into a shard of {size}")
        turned = self.shard.roll(-number * (size - num_used) % size)[:num_used]
        return turned[torch.randperm(num_used, generator=seeded_generator(self._seed, "epoch", self._rank, number))]


def seeded_generator(*key: int | str) -> torch.Generator:
    """A generator of its own for every key. Hashed, because torch's CPU generator uses the low 32 bits of a seed only."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))
