"""Weights, and the mean of what they weight: pure functions on tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import torch
from torch import Tensor

#: Weights are relative, so larger ones mean nothing; and sums of them must stay finite.
_LARGEST = 1e100


def check_weight(weight: object) -> float:
    """A worker's weight M_i as a positive finite float."""
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"weight={weight!r} is not a number; pass this worker's batch size, e.g. weight=32")
    try:
        value = float(weight)
    except OverflowError:
        value, weight = math.inf, "10**308 or more"
    if not 1 / _LARGEST <= value <= _LARGEST:  # not with nan either
        raise ValueError(f"weight={weight} is not positive and finite; pass this worker's batch size, e.g. weight=32")
    return value


@dataclass(frozen=True)
class Weights:
    """Every worker's weight M_j, seen from worker ``rank``: the mean is sum_j M_j x_j / sum_j M_j.

    The sum is formed with the reduced integers (1 and 2 for batches 32 and 64) and divided once. Multiplying by
    a rounded w_i = M_i / sum M_j instead would make the weights add up to 1 + 3e-8 in float32, and the model would grow
    by that factor in every round.
    """

    values: tuple[float, ...]
    rank: int = 0

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """What each worker's tensors are multiplied by before the sum."""
        if len(set(self.values)) == 1:
            return (1.0,) * len(self.values)
        if all(float(value).is_integer() for value in self.values):
            divisor = math.gcd(*(int(value) for value in self.values))
            return tuple(value / divisor for value in self.values)
        # Only a power of two divides every float exactly; it keeps tiny and huge weights in range.
        exponent = math.frexp(max(self.values))[1]
        return tuple(math.ldexp(value, -exponent) for value in self.values)

    @property
    def equal(self) -> bool:
        return len(set(self.values)) == 1

    @property
    def share(self) -> float:
        """w_i = M_i / sum M_j of this worker."""
        return self.values[self.rank] / math.fsum(self.values)

    @property
    def factor(self) -> float:
        """What this worker multiplies its tensors by before the sum."""
        return self.factors[self.rank]

    @property
    def total(self) -> float:
        """What the sum over all workers is divided by."""
        return math.fsum(self.factors)

    def scale_gradient_(self, gradient: Tensor) -> Tensor:
        """g_i -> w_i g_i in place; with equal weights this is what stock DDP does, to the bit."""
        return gradient.mul_(self.share)


# ----------------------------------------------------------------------------------------- merge rules


def mean_(weighted_sum: Tensor, total: float) -> Tensor:
    """weighted_sum <- mean = weighted_sum / total."""
    return weighted_sum.div_(_on_its_device(total, weighted_sum))


def negated_delta_(weighted_sum: Tensor, snapshot: Tensor, total: float) -> Tensor:
    """weighted_sum <- x_t - mean_t, with mean_t = weighted_sum / total, in one pass."""
    return torch.addcdiv(snapshot, weighted_sum, _on_its_device(total, weighted_sum), value=-1, out=weighted_sum)


def _on_its_device(number: float, like: Tensor) -> Tensor:
    # CUDA multiplies by the reciprocal of a number that is the host's: biased by 3e-8 where that is not exact, as for 3.
    return torch.full((), number, dtype=like.dtype, device=like.device)
