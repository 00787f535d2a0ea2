"""Pipe-SGD: the mean gradient of the previous step, which travelled under this step's computation."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from cocod_accel.algorithms.base import Bucket
from cocod_accel.algorithms.ssgd import GradientAlgorithm, gradients_of
from cocod_accel.averaging.flat import FlatCopy
from cocod_accel.averaging.gradients import fill
from cocod_accel.averaging.replica import Replica
from cocod_accel.comm.handles import Handle


class PipeSGD(GradientAlgorithm):
    """Pipelined SGD with staleness 1 (Li et al. 2018)::

        .grad of step t  <-  sum_j w_j g_{t-1}^j       (zero at t = 0)

    The last bucket of backward t starts the sum of g_t and waits for that of g_{t-1}, which stands in ``.grad`` when
    backward returns. Gradients are kept by parameter, because DDP rebuilds its buckets after the first backward. A coded
    ``payload`` (:mod:`cocod_accel.averaging.codecs`) is sent once the sum before has arrived.
    """

    name: ClassVar[str] = "pipe"
    refuses_scaler = (
        "PipeSGD delays gradients by a step, so a GradScaler would divide them by another step's scale; use bf16 autocast"
    )

    _previous: FlatCopy | None  # the mean gradient of the step before, complete when ``_handle`` is; None: zero
    _spare: FlatCopy | None
    _handle: Handle | None
    _is_delivered: bool  # since the last attempt
    _is_kept: bool  # by a module without DDP, since the last attempt

    def bind(self, replica: Replica) -> Self:
        bound = super().bind(replica)
        bound._previous = bound._spare = bound._handle = None
        bound._is_delivered = bound._is_kept = False
        return bound

    @torch.no_grad()
    def complete(self, buckets: list[Bucket]) -> None:
        gradients = self._keep(gradients_of(buckets))
        assert self._spare is not None
        if self._coder is None:
            for buffer in self._spare.buffers:
                self.replica.route.weights.scale_gradient_(buffer)
            handle = self.replica.route.comm.launch(self._spare.buffers)
            self._take_in()
        else:  # its bytes are in use until the one before has arrived
            self._take_in()
            handle = self._coder.launch(self._spare)
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

    def backward_dropped(self) -> None:
        super().backward_dropped()
        if self._is_delivered and not self._is_kept:  # what was delivered is still the next step's
            self._wait()
            self._previous, self._spare = self._spare, self._previous
        self._is_delivered = self._is_kept = False

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
        super().drain()
        self._previous = self._spare = None
        self._is_delivered = self._is_kept = False

    def state(self) -> Any:
        self._wait()
        previous = None if self._previous is None else self._previous.buffers
        return previous if self._coder is None else {"previous": previous, **self._coder.state()}

    def load_state(self, state: Any) -> None:
        self._wait()
        if self._coder is not None:
            self._coder.load(state)
        previous = state["previous"] if isinstance(state, dict) else state
        self._previous = self._spare = None  # freed before there is more
        if previous is not None:
            self._previous = FlatCopy(self.replica.parameters)
            self._previous.fill(previous)
        self._is_delivered = self._is_kept = False

    def poll(self) -> None:
        if self._handle is not None:
            self._handle.poll()

    # ---- details

    def _keep(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Copy this step's gradients; those of parameters that were trainable at attach."""
        if self._spare is None:
            self._spare = FlatCopy(self.replica.parameters)
        return fill(self._spare, gradients)

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
            comm, traffic = self.replica.route.comm, self.replica.route.traffic
            traffic.num_bytes += comm.sent_bytes(self._previous.buffers) if self._coder is None else self._coder.num_bytes

    def _wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self.replica.route.traffic.wait_for([handle])
            if self._coder is not None and self._previous is not None:
                self._coder.decode(self._previous)
