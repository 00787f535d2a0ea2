"""Pipe-SGD: the mean gradient of the previous step, which travelled under this step's computation."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from cocod_accel.algorithms.base import Algorithm, Bucket
from cocod_accel.averaging.flat import FlatCopy, as_real
from cocod_accel.averaging.replica import Replica
from cocod_accel.comm.handles import Handle


class PipeSGD(Algorithm):
    """Pipelined SGD with staleness 1 (Li et al. 2018)::

        .grad of step t  <-  sum_j w_j g_{t-1}^j       (zero at t = 0)

    The last bucket of backward t starts the sum of g_t and waits for that of g_{t-1}, which stands in ``.grad`` when
    backward returns. Gradients are kept by parameter, because DDP rebuilds its buckets after the first backward.
    """

    name: ClassVar[str] = "pipe"
    reduces_gradients: ClassVar[bool] = True
    optimizer_policies: ClassVar[tuple[str, ...]] = ("keep",)
    payloads: ClassVar[tuple[str, ...]] = ("fp32",)
    refuses_scaler: ClassVar[str] = (
        "PipeSGD delays gradients by a step, so a GradScaler would divide them by another step's scale; use bf16 autocast"
    )

    _previous: FlatCopy | None  # the mean gradient of the step before, complete when ``_handle`` is; None: zero
    _spare: FlatCopy | None
    _handle: Handle | None
    _is_delivered: bool  # since the last attempt
    _is_kept: bool  # by a module without DDP, since the last attempt

    def __init__(self) -> None:
        super().__init__(period=1)

    def __repr__(self) -> str:
        return "PipeSGD()"

    def bind(self, replica: Replica) -> Self:
        bound = super().bind(replica)
        bound._previous = bound._spare = bound._handle = None
        bound._is_delivered = bound._is_kept = False
        return bound

    def start(self, equal: bool) -> None:
        if not equal:
            self.replica.equalise()

    @torch.no_grad()
    def complete(self, buckets: list[Bucket]) -> None:
        pairs = [pair for bucket in buckets for pair in zip(bucket.parameters, bucket.gradients, strict=True)]
        gradients = self._keep(dict(pairs))
        assert self._spare is not None
        for buffer in self._spare.buffers:
            self.replica.route.weights.scale_gradient_(buffer)
        handle = self.replica.route.comm.launch(self._spare.buffers)
        self._take_in()
        self._deliver(gradients)
        self._previous, self._spare, self._handle = self._spare, self._previous, handle

    def backward_begins(self, accumulating: bool, without_ddp: bool) -> None:
        if accumulating and self._is_delivered and not without_ddp:
            raise RuntimeError(
                "PipeSGD has put the previous step's gradient into .grad, so no backward can add to it; "
                "when accumulating, run all but the last backward under model.no_sync()"
            )
        if accumulating and self._is_delivered and self._spare is not None:
            with torch.no_grad():  # this step's own gradients again, so that the backward adds to them
                for parameter, view in self._spare.views.items():
                    if parameter.grad is not None:
                        parameter.grad.copy_(view)

    @torch.no_grad()
    def backward_ends(self, without_ddp: bool) -> None:
        """Without DDP there is one worker: keep the gradients for the next step, show those of the step before."""
        if without_ddp:
            self._deliver(self._keep({p: p.grad for p in self.replica.parameters if p.grad is not None}))
            self._is_kept = True

    @torch.no_grad()
    def after_buckets(self) -> None:
        """What the step before used and this one does not: its gradient is due now all the same."""
        if self._spare is not None:  # what was delivered
            for parameter, delivered in self._spare.views.items():
                if parameter.grad is not None:
                    parameter.grad.copy_(delivered)
                elif bool(delivered.any()):
                    parameter.grad = delivered.to(parameter.dtype, copy=True)

    def launch(self, part: int = 0) -> None:
        if self._is_kept:
            self._previous, self._spare = self._spare, self._previous
        self._is_delivered = self._is_kept = False

    def drain(self) -> None:
        self._take_in()
        self._previous = self._spare = None
        self._is_delivered = self._is_kept = False

    def state(self) -> list[Tensor] | None:
        self._wait()
        return None if self._previous is None else self._previous.clone_buffers()

    def load_state(self, state: list[Tensor] | None) -> None:
        self._wait()
        loaded = None
        if state is not None:
            loaded = FlatCopy(self.replica.parameters)
            loaded.fill(state)
        self._previous, self._spare = loaded, None
        self._is_delivered = self._is_kept = False

    def poll(self) -> None:
        if self._handle is not None:
            self._handle.poll()

    # ---- details

    def _keep(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Copy this step's gradients; those of parameters that were trainable at attach."""
        if self._spare is None:
            self._spare = FlatCopy(self.replica.parameters)
        ours = {p: as_real(g) for p, g in gradients.items() if p in self._spare.views}
        missing = [parameter for parameter in self._spare.views if parameter not in ours]
        for parameter in missing:  # no gradient this time
            self._spare.views[parameter].zero_()
        if ours:
            torch._foreach_copy_([self._spare.views[parameter] for parameter in ours], list(ours.values()))
        return ours

    def _deliver(self, gradients: dict[Tensor, Tensor]) -> None:
        """Put the previous step's gradients in the place of this step's."""
        self._is_delivered = True
        if gradients and self._previous is not None:
            torch._foreach_copy_(list(gradients.values()), [self._previous.views[p] for p in gradients])
        elif gradients:
            torch._foreach_zero_(list(gradients.values()))

    def _take_in(self) -> None:
        """Wait, and count what was sent; not when a state is saved, which must not change a count."""
        self._wait()
        if self._previous is not None:
            self.replica.route.traffic.num_bytes += self.replica.route.comm.sent_bytes(self._previous.buffers)

    def _wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self.replica.route.traffic.wait_for([handle])
