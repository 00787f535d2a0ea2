"""What a merge pulls towards: the mean, or a point that follows the means with a momentum of its own.

The remedies for long rounds and for workers whose data differ. With mean_t the mean that was started at step t, z the
anchor, at first the common start, and v its velocity, at first 0::

    v <- beta v + (mean_t - z)            z <- z + v            (beta = 0: z = mean_t)

Local-SGD then takes x <- z, which is SlowMo (Wang et al. 2020) with a slow rate of 1, not divided by the learning rate;
CoCoD-SGD takes x_{t+k} <- z + (1 - alpha) (x_{t+k} - x_t), where alpha pulls a worker back towards the anchor, as
Overlap-Local-SGD (Wang et al. 2020) does. All workers compute z and v from the same sums, so they hold the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def check_share(name: str, value: object) -> float:
    """A momentum or a pull: a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} is not in [0, 1); use 0 for none, e.g. {name}=0.5")
    return float(value)


def follow_(anchor: Tensor, velocity: Tensor, mean: Tensor, momentum: float) -> Tensor:
    """v <- momentum v + (mean - z); z <- z + v; returns z."""
    velocity.mul_(momentum).add_(mean).sub_(anchor)
    return anchor.add_(velocity)


def pulled_offset_(anchor: Tensor, snapshot: Tensor, pull_back: float) -> Tensor:
    """anchor <- (1 - alpha) x_t - z, so that the merged model is (1 - alpha) x_{t+k} minus this."""
    return torch.sub(snapshot * (1 - pull_back) if pull_back else snapshot, anchor, out=anchor)


class Anchor:
    """One worker's copy of z and v, as flat tensors beside those of an average."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        #: z and v; None before the first mean that all workers share.
        self._points: list[Tensor] | None = None
        self._velocities: list[Tensor] = []

    def centre_on(self, means: Sequence[Tensor]) -> None:
        """All workers hold this mean now: it is the anchor. The velocity stays."""
        if self._points is None:
            self._points = [mean.clone() for mean in means]
            self._velocities = [torch.zeros_like(mean) for mean in means]
            return
        for point, mean in zip(self._points, means, strict=True):
            point.copy_(mean)

    def follow_(self, means: Sequence[Tensor]) -> None:
        """Take in the next mean; ``means`` become the anchor."""
        if self._points is None:
            self.centre_on(means)
            return
        for point, velocity, mean in zip(self._points, self._velocities, means, strict=True):
            mean.copy_(follow_(point, velocity, mean, self.momentum))

    # ---- the state between two steps

    def state(self) -> dict[str, Any]:
        points = None if self._points is None else [point.clone() for point in self._points]
        return {"momentum": self.momentum, "points": points, "velocities": [v.clone() for v in self._velocities]}

    def check_state(self, state: dict[str, Any], like: Sequence[Tensor]) -> None:
        """Refuse what :meth:`load` could not load."""
        if state["points"] is not None:
            sizes = [[t.numel() for t in tensors] for tensors in (state["points"], state["velocities"], like)]
            if sizes[0] != sizes[2] or sizes[1] != sizes[2]:
                raise ValueError(
                    f"the saved anchor has {sizes[0]} elements, this model {sizes[2]}; load a state of this model"
                )

    def load(self, state: dict[str, Any] | None, like: Sequence[Tensor]) -> None:
        """None: of a run with other workers, so the next mean is the anchor, at rest."""
        points = None if state is None else state["points"]
        self._points = None if points is None else [p.to(t, copy=True) for p, t in zip(points, like, strict=True)]
        velocities = [] if state is None or points is None else state["velocities"]
        self._velocities = [v.to(t, copy=True) for v, t in zip(velocities, like, strict=True)] if velocities else []
