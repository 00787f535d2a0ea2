"""Counting attempted optimizer steps, whatever a worker's own loop does.

Workers meet in collectives, so all of them must count the same rounds even when one of them skips a step. Counting
``optimizer.step`` calls is not enough: a GradScaler that finds an overflow never calls it. An *attempt* is therefore

* an optimizer step that ran (with several optimizers: all of them stepped), or
* a backward whose gradients were dropped without one, noticed at the next forward or when somebody asks.

Gradients that merely accumulate over several backwards are one attempt: they are still there at the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer


def tensors_in(output: object) -> Iterator[Tensor]:
    """Every tensor in a module's output: nested sequences, mappings and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple | set):
        for value in output:
            yield from tensors_in(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))


class AttemptCounter:
    """Watches a model's forwards and backwards and its optimizers' steps, and reports every attempt."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        parameters: Sequence[Tensor],
        on_attempt: Callable[[], None],
        before_step: Callable[[bool], None],
        in_passing: Callable[[], None],
    ) -> None:
        self._optimizers = list(optimizers)
        self._parameters = list(parameters)
        self._on_attempt = on_attempt
        self._before_step = before_step
        self._in_passing = in_passing
        self._stepped: set[int] = set()
        self._in_closure = False
        self._in_backward = False
        self._backward_ran = False
        self._num_owed = 0
        self.paused = False  # True: what the model does now is evaluation
        self._watches_parameters = False
        self._witness: tuple[Tensor, int, int] | None = None
        self._removables: list[Any] = [
            model.register_forward_pre_hook(self._forward_begins),
            model.register_forward_hook(self._forward_ends),
        ]
        for optimizer in self._optimizers:
            self._removables.append(optimizer.register_step_pre_hook(self._step_begins))
            self._removables.append(optimizer.register_step_post_hook(self._step_ends))

    def remove(self) -> None:
        """Take all hooks off again."""
        for removable in self._removables:
            removable.remove()
        self._removables = []

    def settle(self) -> None:
        """Count what is known to have been attempted by now; from the main thread, outside a step."""
        if self._stepped or (self._backward_ran and self._gradients_dropped()):
            self._num_owed += 1
            self.forget()
        self._pay()

    def forget(self) -> None:
        """Begin with a clean slate: no step, no backward since the last attempt."""
        self._stepped.clear()
        self._backward_ran = False
        self._witness = None

    # ---- hooks

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        self._in_passing()
        # Without grad it is an evaluation, perhaps on one worker only: nothing may start a collective there.
        if torch.is_grad_enabled() and not self._in_closure and not self.paused:
            self._in_backward = False  # in case the last backward raised
            self.settle()

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._in_passing()
        if not torch.is_grad_enabled() or self._watches_parameters or self.paused:
            return
        found = False
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)
                found = True
        if not found and module.training and self._parameters:
            # An output that hides its tensors: watch the parameters instead, which costs a call for each of them.
            self._watches_parameters = True
            self._removables.append(register_multi_grad_hook(self._parameters, self._backward_begins, mode="any"))

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._in_backward or self.paused:
            return
        self._in_backward = True
        if self._backward_ran and not self._stepped and not self._in_closure and self._gradients_dropped():
            # Dropped between forward and backward. Ending a round here would change parameters that this backward
            # still reads, so the attempt is owed until the step.
            self._num_owed += 1
        Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._in_backward = False
        holder = next((parameter for parameter in self._parameters if parameter.grad is not None), None)
        # No gradient anywhere: autograd.grad() of an output, not a backward that a step could follow.
        self._backward_ran = holder is not None
        self._witness = None if holder is None else (holder, *_identity(holder.grad))

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_passing()
        self._in_closure = kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)
        if not self._stepped:
            self._before_step(self._in_closure)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_passing()
        self._in_closure = False
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self.settle()

    # ---- details

    def _gradients_dropped(self) -> bool:
        if self._witness is not None:
            holder, *identity = self._witness
            if holder.grad is not None and _identity(holder.grad) == tuple(identity):
                return False  # untouched since backward: the usual case while gradients accumulate, and free of charge
        return not any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._parameters)

    def _pay(self) -> None:
        while self._num_owed:
            self._num_owed -= 1
            self._on_attempt()


def _identity(gradient: Tensor | None) -> tuple[int, int]:
    assert gradient is not None
    return gradient.data_ptr(), gradient._version
