"""What becomes of an arrived mean: the paper's merge, an outer optimizer, a share of a worker's own steps.

With z the point that all workers hold, at first the common start; u_j worker j's local updates since it last sent; f_i those
since it sent what has now arrived::

    z <- Outer(z, sum_j w_j u_j)          x_i <- z + a f_i          what was left out, (1 - a) f_i, is sent all the same

a = 1 and Outer() is the paper's CoCoD-SGD, computed as x_i += mean - x_t^i, to the bit. With a = 1/N a worker counts its own
steps once (eager), with a = 0 it waits until they come back with the mean (delayed). Local-SGD, whose means arrive at once,
has f_i = 0 and takes x_i <- z: with Outer(0.7, 0.9, nesterov=True) that is DiLoCo (Douillard et al. 2023), with
Outer(1, beta) SlowMo (Wang et al. 2020) with a slow rate that is not divided by the learning rate.

All workers compute z from the same sums, so they hold the same to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cocod_accel.averaging.flat import FlatCopy, Segment


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Outer:
    """What moves the common point: ``torch.optim.SGD(lr=rate, momentum, nesterov)`` on the gradient -sum_j w_j u_j.

    The default takes the mean as it is.
    """

    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.rate) or self.rate <= 0:
            raise ValueError(f"outer rate={self.rate!r} is not a positive number; use 1 to take the mean as it is")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"outer momentum={self.momentum!r} is not in [0, 1); use 0 for none")
        if not isinstance(self.nesterov, bool):
            raise TypeError(f"outer nesterov={self.nesterov!r} is not a bool; use True or False")
        if self.nesterov and self.momentum == 0:
            raise ValueError("outer nesterov=True requires a momentum above 0; use e.g. Outer(0.7, 0.9, nesterov=True)")

    @property
    def is_mean(self) -> bool:
        """Whether the common point is the mean itself."""
        return self.rate == 1 and self.momentum == 0

    def __repr__(self) -> str:
        return f"Outer({self.rate:g}, {self.momentum:g}{', nesterov=True' if self.nesterov else ''})"


def check_own_share(value: object) -> float:
    """The part of its own steps that a worker keeps at a merge."""
    if not _is_number(value) or not 0 <= value <= 1:  # type: ignore[operator]
        raise ValueError(f"own_share={value!r} is not in [0, 1]; use 1 for the paper's rule, 1/N or 0 for less")
    return float(value)  # type: ignore[arg-type]


def check_mix(value: object) -> float:
    """The part of its own parameters that a worker keeps at a merge."""
    if not _is_number(value) or not 0 <= value <= 1:  # type: ignore[operator]
        raise ValueError(f"mix={value!r} is not in [0, 1]; use 0.5 for the paper's rule")
    return float(value)  # type: ignore[arg-type]


def check_outer(value: object) -> Outer:
    if value is None:
        return Outer()
    if not isinstance(value, Outer):
        raise TypeError(f"outer={value!r} is not an Outer; pass e.g. Outer(0.7, 0.9, nesterov=True)")
    return value


@dataclass(frozen=True)
class Rule:
    """What a part does with a mean."""

    outer: Outer = Outer()
    own_share: float = 1.0
    #: m of x <- m x + (1 - m) z, in the place of own_share, as in streaming DiLoCo.
    mix: float | None = None

    @property
    def is_paper(self) -> bool:
        return self.outer.is_mean and self.own_share == 1 and self.mix is None


# ------------------------------------------------------------------------------------------------ pure functions


def outer_step_(z: Tensor, velocity: Tensor | None, mean: Tensor, outer: Outer) -> Tensor:
    """z <- Outer(z, mean - z): v <- momentum v + (mean - z); z <- z + rate v. Returns z."""
    if outer.is_mean:
        return z.copy_(mean)
    if velocity is None:
        return z.add_(mean - z, alpha=outer.rate)
    if not outer.nesterov:
        velocity.mul_(outer.momentum).add_(mean).sub_(z)
        return z.add_(velocity, alpha=outer.rate)
    change = mean - z
    velocity.mul_(outer.momentum).add_(change)
    return z.add_(change.add_(velocity, alpha=outer.momentum), alpha=outer.rate)


def keep_share_(now: Tensor, start: Tensor, z: Tensor, share: float) -> Tensor:
    """``start`` <- z + share (now - start); ``now`` <- what was left out, (1 - share) (now - start). Returns ``start``."""
    now.sub_(start)
    torch.add(z, now, alpha=share, out=start)
    now.mul_(1 - share)
    return start


def mix_(now: Tensor, z: Tensor, mix: float) -> Tensor:
    """now <- mix now + (1 - mix) z"""
    return now.mul_(mix).add_(z, alpha=1 - mix)


# ----------------------------------------------------------------------------------------------- the common point


class Point:
    """One worker's copy of z, and its velocity; flat, laid out like the averages of the same parameters."""

    def __init__(self, parameters: Sequence[Tensor], outer: Outer) -> None:
        self.outer = outer
        self._z = FlatCopy(parameters)
        self._velocity = FlatCopy(parameters) if outer.momentum else None
        if self._velocity is not None:
            for buffer in self._velocity.cores:
                buffer.zero_()
        #: False until all workers hold one: the first mean is then taken as it is.
        self.is_set = False

    @property
    def cores(self) -> list[Tensor]:
        return self._z.cores

    @property
    def segments(self) -> list[Segment]:
        return self._z.segments

    def set_to(self, views: Mapping[Tensor, Tensor]) -> None:
        """All workers hold these values, by parameter. The velocity stays."""
        for segment in self._z.segments:
            torch._foreach_copy_(segment.views, [views[source] for source in segment.sources])
        self.is_set = True

    def set_to_parameters(self) -> None:
        """All workers hold the same parameters now."""
        self._z.load()
        self.is_set = True

    def follow(self, index: int, mean: Tensor) -> Tensor:
        """Take in the mean of one segment; returns z there."""
        z = self._z.segments[index].flat
        if not self.is_set:
            return z.copy_(mean)
        return outer_step_(z, None if self._velocity is None else self._velocity.segments[index].flat, mean, self.outer)

    # ---- the state between two steps

    def state(self, *, copies: bool = True) -> dict[str, Any] | None:
        if not self.is_set:
            return None
        keep = torch.clone if copies else torch.detach
        velocity = [] if self._velocity is None else [keep(core) for core in self._velocity.cores]
        return {"z": [keep(core) for core in self._z.cores], "velocity": velocity}

    def check_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            sizes = [[tensor.numel() for tensor in state[key]] for key in ("z", "velocity")]
            whole = [core.numel() for core in self._z.cores]
            if sizes != [whole, whole if self._velocity is not None else []]:
                raise ValueError(
                    f"the saved common point has {sizes[0]} elements, this model {whole}; load a state of this model"
                )

    def load(self, state: dict[str, Any] | None) -> None:
        """None: the state of a run with other workers, so the next mean becomes the point, with zero velocity."""
        self.is_set = state is not None
        velocities = [] if self._velocity is None else self._velocity.cores
        for core, value in zip(self._z.cores, [] if state is None else state["z"], strict=state is not None):
            core.copy_(value)
        for core in velocities:
            core.zero_()
        for core, value in zip(velocities, [] if state is None else state["velocity"], strict=state is not None):
            core.copy_(value)
