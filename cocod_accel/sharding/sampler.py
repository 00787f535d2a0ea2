"""Which samples a worker sees, epoch by epoch: disjoint shards, reshuffled, or skewed by label."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from cocod_accel.sharding.plan import WorkPlan


class ShardSampler(Sampler[list[int]]):
    """Which samples a worker sees in an epoch, in which batches. Workers are disjoint within an epoch.

    Within shards: every worker keeps its samples and reshuffles them. Across: all samples are redistributed every
    epoch. Either way, the samples that do not fit in an epoch change from epoch to epoch, so none is left out forever.

    ``order``: all samples, to be cut into consecutive shards, e.g. from :func:`skewed_order`; default: random.

    As the ``batch_sampler`` of a ``DataLoader``, each complete pass moves on to the next epoch; ``set_epoch`` sets it.
    """

    def __init__(
        self, plan: WorkPlan, rank: int, *, seed: int | str = 0, across: bool = False, order: Tensor | None = None
    ) -> None:
        if not 0 <= rank < len(plan.batches):
            raise ValueError(f"rank={rank} is not one of the {len(plan.batches)} workers of the plan")
        self.plan, self.rank = plan, rank
        self._seed, self._across = seed, across
        self._next = 0
        if order is None:
            order = torch.randperm(plan.num_samples, generator=seeded_generator(seed, "shards"))
        self._order = order

    def epoch(self, number: int, steps: Sequence[int] | None = None) -> Tensor:
        """The indices of this worker's samples in epoch ``number``, in the order they are used.

        ``steps``: steps of every worker, if not those of the plan.
        """
        plan, rank = self.plan, self.rank
        used = [s * m for s, m in zip(plan.steps if steps is None else steps, plan.batches, strict=True)]
        for worker, (count, shard) in enumerate(zip(used, plan.shards, strict=True)):
            if count > shard:
                raise ValueError(f"an epoch of {count} samples does not fit in worker {worker}'s shard of {shard}")
        if self._across:
            return self._turned(self._order, number, sum(used), "deal")[sum(used[:rank]) : sum(used[: rank + 1])]
        return self._turned(self.shard, number, used[rank], f"epoch/{rank}")

    @property
    def shard(self) -> Tensor:
        """The samples this worker owns, if epochs stay within shards."""
        start = sum(self.plan.shards[: self.rank])
        return self._order[start : start + self.plan.shards[self.rank]]

    def _turned(self, samples: Tensor, number: int, num_used: int, key: str) -> Tensor:
        """``num_used`` of the samples, shuffled; which ones are left out rotates every epoch."""
        size = len(samples)
        turned = samples.roll(-number * (size - num_used) % size)[:num_used]
        return turned[torch.randperm(num_used, generator=seeded_generator(self._seed, key, number))]

    def set_epoch(self, number: int) -> None:
        """Make the next pass this epoch, counted from 0."""
        self._next = number

    def __iter__(self) -> Iterator[list[int]]:
        number = self._next
        for chosen in self.epoch(number).split(self.plan.batches[self.rank]):
            yield chosen.tolist()
        self._next = number + 1  # not after a peek at the first batch, or workers would be in different epochs

    def __len__(self) -> int:
        return self.plan.steps[self.rank]


@lru_cache(maxsize=4)
def skewed_order(labels: Tensor, shards: tuple[int, ...], alpha: float, seed: int | str) -> Tensor:
    """All samples in an order whose consecutive ``shards`` are label-skewed: p_i ~ Dirichlet(alpha), worker by worker.

    Places are filled in random order; each draws a class from its worker's p_i among the classes that are left, then a
    sample of it. So sizes match ``shards`` exactly, every sample is used once, and no worker gets only leftovers.
    With ``alpha`` 0 samples are sorted by label: no worker has more labels than the sizes require.
    """
    if alpha == 0:
        return labels.argsort(stable=True)
    import numpy as np  # only needed here

    random = np.random.default_rng(int(torch.randint(1 << 62, (), generator=seeded_generator(seed, "skew"))))
    classes, counts = np.unique(labels.numpy(), return_counts=True)
    # Floored, because for a tiny alpha all of a worker's shares may be zero in floating point.
    shares = np.maximum(random.dirichlet(np.full(len(classes), alpha), len(shards)), 1e-12)
    pools = [random.permutation(np.flatnonzero(labels.numpy() == c)).tolist() for c in classes]
    owners = random.permutation(np.repeat(np.arange(len(shards)), shards))
    draws = random.random(len(owners))
    limits = shares.cumsum(axis=1)
    found: list[list[int]] = [[] for _ in shards]
    left = counts.copy()
    for owner, draw in zip(owners.tolist(), draws.tolist(), strict=True):
        row = limits[owner]
        chosen = int(np.searchsorted(row, draw * row[-1], side="right"))
        if chosen == len(classes):  # the product was rounded up
            chosen = int(np.flatnonzero(left)[-1])
        found[owner].append(pools[chosen].pop())
        left[chosen] -= 1
        if left[chosen] == 0:
            limits = (shares * (left > 0)).cumsum(axis=1)
    return torch.tensor([sample for mine in found for sample in mine])


def seeded_generator(*key: int | str) -> torch.Generator:
    """A separate generator for every key. Hashed, because torch's CPU generator uses only the low 32 bits of a seed."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))
