"""Pipe-SGD: the mean gradient of the previous step, which travelled under this step's computation."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from cocod_accel.algorithms.base import Algorithm, Bucket
from cocod_accel.averaging import FlatCopy, Replica, as_real
from cocod_accel.comm import Handle


class PipeSGD(Algorithm):
    """Pipelined SGD with staleness 1 (Li et al. 2018)::

        .grad of step t  <-  sum_j w_j g_{t-1}^j       (zero at t = 0)

    The last bucket of backward t starts the sum of g_t and waits for that of g_{t-1}, which stands in ``.grad`` when
    backward returns. Gradients are kept by parameter, because DDP rebuilds its buckets after the first backward.
    """

    name: ClassVar[str] = "pipe"
    reduces_gradients: ClassVar[bool] = True

    _previous: FlatCopy  # the mean gradient of the step before, complete when ``_handle`` is
    _spare: FlatCopy
    _handle: Handle | None

    def __init__(self) -> None:
        super().__init__(period=1)

    def __repr__(self) -> str:
        return "PipeSGD()"

    def bind(self, replica: Replica) -> Self:
        bound = super().bind(replica)
        bound._previous, bound._spare = FlatCopy(replica.parameters), FlatCopy(replica.parameters)
        bound._handle = None
        bound.drain()
        return bound

    def start(self, equal: bool) -> None:
        if not equal:
            self.replica.equalise()

    @torch.no_grad()
    def complete(self, buckets: list[Bucket]) -> None:
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        gradients = [as_real(gradient) for bucket in buckets for gradient in bucket.gradients]
        torch._foreach_copy_([self._spare.views[parameter] for parameter in parameters], gradients)
        for buffer in self._spare.buffers:
            self.replica.weights.scale_gradient_(buffer)
        handle = self.replica.comm.launch(self._spare.buffers)
        self._wait()
        torch._foreach_copy_(gradients, [self._previous.views[parameter] for parameter in parameters])
        self._previous, self._spare, self._handle = self._spare, self._previous, handle

    @torch.no_grad()
    def before_step(self, has_closure: bool) -> None:
        """Without DDP there is one worker: exchange the gradients with those of the step before, in place."""
        if has_closure:
            raise RuntimeError("PipeSGD cannot delay the gradients of a closure on a bare module; wrap the model in DDP")
        parameters = [parameter for parameter in self.replica.parameters if parameter.grad is not None]
        gradients = [as_real(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            kept = [gradient.clone() for gradient in gradients]
            previous = [self._previous.views[parameter] for parameter in parameters]
            torch._foreach_copy_(gradients, previous)
            torch._foreach_copy_(previous, kept)

    def drain(self) -> None:
        self._wait()
        for buffer in self._previous.buffers:
            buffer.zero_()

    def state(self) -> list[Tensor] | None:
        self._wait()
        return self._previous.clone_buffers()

    def load_state(self, state: list[Tensor] | None) -> None:
        self._wait()
        self._previous.fill(state if state is not None else [])

    def poll(self) -> None:
        if self._handle is not None:
            self._handle.poll()

    def _wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self.replica.traffic.wait_for([handle])
