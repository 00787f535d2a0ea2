"""Which workers share a node: gradients are summed inside, models are averaged between.

Pure arithmetic. A run without nodes is one in which every worker is a node of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from cocod_accel.averaging.weights import Weights


@dataclass(frozen=True)
class Nodes:
    """All workers by node, seen from worker ``rank``."""

    members: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, stated: Sequence[tuple[int, ...]], rank: int) -> Nodes:
        """From what every worker says of its own node; () is a worker that says nothing."""
        silent = [i for i, node in enumerate(stated) if not node]
        if silent and len(silent) < len(stated):
            raise ValueError(f"workers differ in inner: rank {silent[0]} passes none; pass its node's group on every worker")
        if silent:
            return cls(tuple((i,) for i in range(len(stated))), rank)
        for i, node in enumerate(stated):
            if i not in node:
                raise ValueError(f"inner: rank {i} passes the group of ranks {list(node)}, which it is not in; pass its own")
            if any(stated[j] != node for j in node):
                raise ValueError(f"inner: the workers of ranks {list(node)} pass different groups; pass the same one")
        sizes = sorted({len(node) for node in stated})
        if len(sizes) > 1:
            raise ValueError(f"inner: nodes of {sizes[0]} and of {sizes[-1]} workers; use groups of equal size")
        return cls(tuple(sorted(set(stated))), rank)

    @property
    def index(self) -> int:
        """This worker's node."""
        return next(i for i, node in enumerate(self.members) if self.rank in node)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The workers of this node."""
        return self.members[self.index]

    @property
    def peers(self) -> tuple[int, ...]:
        """The worker in this worker's place, of every node."""
        place = self.node_ranks.index(self.rank)
        return tuple(node[place] for node in self.members)

    def first_namesake(self, rank: int) -> int:
        """The worker in the place of worker ``rank``, on the first node."""
        return next(self.members[0][node.index(rank)] for node in self.members if rank in node)

    @property
    def is_flat(self) -> bool:
        """Whether every worker is alone on its node."""
        return len(self.node_ranks) == 1

    def inside(self, weights: Sequence[float]) -> Weights:
        """What gradients are weighted with: normalised inside this node."""
        return Weights(tuple(weights[i] for i in self.node_ranks), self.node_ranks.index(self.rank))

    def between(self, weights: Sequence[float]) -> Weights:
        """What models are weighted with: a node counts as much as its workers together."""
        return Weights(tuple(fsum(weights[i] for i in node) for node in self.members), self.index)
