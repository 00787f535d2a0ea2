"""Counting attempted optimizer steps, whatever a worker's own loop does.

Workers meet in collectives, so all of them must count the same rounds even when one of them skips a step. Counting
``optimizer.step`` calls is not enough: a GradScaler that finds an overflow never calls it. An *attempt* is therefore

* an optimizer step that ran (with several optimizers: all of them stepped), or
* a backward whose gradients were dropped without one, noticed at the next forward or when somebody asks.

Gradients that merely accumulate over several backwards are one attempt: they are still there at the next forward.

A model may also be used inside the loss of another one, as a GAN's discriminator is in its generator's: what it is given
then requires gradients. If the gradients of such a backward are dropped, it was none of this model's own, and is no attempt;
unless they were not finite, because then it may have been a GradScaler that dropped them.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from cocod_accel.averaging.flat import local


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


class Watcher(Protocol):
    """Who is told what a loop does."""

    def attempted(self) -> None:
        """One more attempt, from the main thread and outside a step."""

    def step_begins(self, has_closure: bool = False) -> None:
        """The first optimizer of an attempt is about to step; with a closure, that computes its gradients itself."""

    def backward_begins(self, accumulating: bool) -> None:
        """``accumulating``: the gradients of an earlier backward are still there, so these will be added to them."""

    def backward_ends(self) -> None:
        """Gradients have been accumulated."""

    def backward_dropped(self) -> None:
        """The last backward was for another model's sake, and no step follows."""

    def accumulates(self) -> bool:
        """Whether the loop has said (with ``no_sync``) that more backwards will follow before a step."""


def is_stepped_by_scaler() -> bool:
    """Whether an optimizer's step hook that asks this runs inside ``GradScaler.step``.

    Nothing else tells: a scaler is an object of the loop, which optimizers and models never see.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, GradScaler) and caller.is_enabled():
            return True
        frame = frame.f_back
    return False


class _Hook(functools.partial[None]):
    """A hook that is left behind when the module it hangs on is copied or saved."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(_nothing)


def _nothing(*args: Any) -> None:
    pass


_Identity = tuple[int, int, int] | None
#: In a backward, at most; each costs a call of some microseconds.
_NUM_PLACES = 64


class AttemptCounter:
    """Watches a model's forwards and backwards and its optimizers' steps, and reports every attempt."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        watcher: Watcher,
        in_passing: Callable[[], None],
        passed: Sequence[Tensor] = (),
        in_node: Callable[[bool], bool] | None = None,
    ) -> None:
        """``in_node``: of a model that a node shares out, whether any of its workers says yes."""
        self._watcher = watcher
        self._in_node = in_node
        self._in_passing = (
            in_passing  # called where the main thread comes by: twice a step, and when ``passed`` have gradients
        )
        self._num_optimizers = len(optimizers)
        # Only what the optimizers hold: their zero_grad() leaves the gradients of other parameters accumulating.
        self._parameters: list[Tensor] = [
            parameter
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self.paused = False  # True: what the model does now is evaluation
        self._stepped: set[int] = set()
        self._in_closure = False
        self._in_backward = False
        self._forward_is_open = False  # a training forward has had no backward yet
        self._accumulates = False
        self._backward_ran = False
        self._is_own_forward = False  # of this model's own, since the last backward
        self._is_own_backward = False  # since the last attempt
        self._sizes: list[Tensor] = []  # of gradients for the sake of another model
        self._num_owed = 0
        self._watches_parameters = False
        self._before: list[_Identity] | None = None
        self._witness: tuple[Tensor, _Identity] | None = None
        self._removables: list[Any] = [
            # Before those of whoever gathers a sharded model: a round that ends here changes its shards.
            model.register_forward_pre_hook(_Hook(self._forward_begins), with_kwargs=True, prepend=in_node is not None),
            model.register_forward_hook(_Hook(self._forward_ends)),
        ]
        for optimizer in optimizers:
            self._removables.append(optimizer.register_step_pre_hook(_Hook(self._step_begins)))
            self._removables.append(optimizer.register_step_post_hook(_Hook(self._step_ends)))
        for parameter in passed:
            self._removables.append(parameter.register_post_accumulate_grad_hook(_Hook(_passes, weakref.ref(self))))

    def remove(self) -> None:
        """Take all hooks off again."""
        for removable in self._removables:
            removable.remove()
        self._removables = []

    def settle(self) -> None:
        """Count everything attempted by now, because somebody is about to meet the other workers.

        A backward that no step has followed counts even if its gradients still stand: a loop that calls ``zero_grad()``
        first will drop them a moment later. Unless the loop has said that it accumulates.
        """
        if self._stepped:
            self._owe()
        elif self._backward_ran and self._is_for_another:
            if self._gradients_dropped():
                self._drop()
        elif self._backward_ran and (not self._accumulates or self._gradients_dropped()):
            self._owe()
        self._pay()

    def forget(self) -> None:
        """Begin with a clean slate: no step, no backward since the last attempt."""
        self._stepped.clear()
        self._backward_ran = self._is_own_backward = False
        self._sizes = []
        self._witness = None

    # ---- hooks

    def _forward_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._in_passing()
        # Without grad it is an evaluation, perhaps on one worker only: nothing may start a collective there.
        if not torch.is_grad_enabled() or self._in_closure or self.paused:
            return
        self._in_backward = False  # in case the last backward raised
        if self._stepped:
            self._owe()
        elif self._backward_ran and self._gradients_dropped():
            self._drop()
        if not any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
            self._is_own_forward = True
        if not self._forward_is_open:  # else ending a round would change parameters that a backward still needs
            self._pay()

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or self.paused:
            return
        self._forward_is_open = True
        self._accumulates = self._watcher.accumulates()
        if self._watches_parameters:
            return
        found = False
        for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._backward_begins)  # a fraction of the price of tensor.register_hook
                found = True
        if not found and module.training and self._parameters:
            # An output that hides its tensors: watch the parameters instead, which costs a call for each of them.
            self._watches_parameters = True
            self._removables.append(register_multi_grad_hook(self._parameters, self._backward_begins, mode="any"))

    def _backward_begins(self, gradients: Any) -> None:
        if self._in_backward or self.paused:
            return
        self._in_backward = True
        self._forward_is_open = False
        accumulating = self._holder() is not None
        self._before = [_identity(parameter) for parameter in self._parameters] if accumulating else None
        if self._backward_ran and not self._stepped and not self._in_closure:
            accumulating = accumulating and not self._gradients_dropped()
            if not accumulating:
                # Dropped between forward and backward. Ending a round here would change parameters that this backward
                # still reads, so the attempt is owed until the step.
                self._drop()
        else:
            accumulating = False
        self._watcher.backward_begins(accumulating)
        Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._in_backward = False
        before, self._before = self._before, None
        holder = self._holder()
        if holder is None or (
            before is not None and all(_identity(p) == old for p, old in zip(self._parameters, before, strict=True))
        ):
            return  # it was autograd.grad() of an output, not a backward that a step could follow
        self._backward_ran = True
        self._is_own_backward = self._is_own_backward or self._is_own_forward
        self._is_own_forward = False
        if not self._is_own_backward:
            gradients = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
            held = [gradient for gradient in gradients if gradient.numel()]
            self._sizes = list(torch._foreach_norm(held, float("inf"))) if held else []
        self._watcher.backward_ends()
        self._witness = holder, _identity(holder)

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_passing()
        self._in_closure = kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)
        if not self._stepped:
            self._watcher.step_begins(self._in_closure)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_closure = self._forward_is_open = False
        self._stepped.add(id(optimizer))
        if len(self._stepped) == self._num_optimizers:
            self._owe()
            self._pay()

    # ---- details

    def _holder(self) -> Tensor | None:
        """The first parameter that has a gradient."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                return parameter
        return None

    def _gradients_dropped(self) -> bool:
        if self._witness is not None:
            holder, identity = self._witness
            if identity is not None and _identity(holder) == identity:
                return False  # untouched since backward: the usual case while gradients accumulate, and free of charge
        found = any(p.grad is not None and bool(local(p.grad).any()) for p in self._parameters)
        return not (found if self._in_node is None else self._in_node(found))

    @property
    def _is_for_another(self) -> bool:
        """Whether the last backward was for the sake of another model, whose own step it was for."""
        if self._is_own_backward:
            return False
        overflows = not all(bool(torch.isfinite(size)) for size in self._sizes)
        return not (overflows if self._in_node is None else self._in_node(overflows))

    def _drop(self) -> None:
        """The gradients of the last backward are gone, and no step has used them."""
        if self._is_for_another:
            self.forget()
            self._watcher.backward_dropped()
        else:
            self._owe()

    def _owe(self) -> None:
        self._num_owed += 1
        self.forget()

    def _pay(self) -> None:
        while self._num_owed:
            self._num_owed -= 1
            self._watcher.attempted()


def _passes(counter: weakref.ref[AttemptCounter], parameter: Tensor) -> None:
    # Weakly: a parameter keeps its hooks where Python's garbage collector cannot see them.
    alive = counter()
    if alive is not None:
        alive._in_passing()


def places_in_backward(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Some of the parameters, spread over a backward: it comes by them from the last to the first."""
    return list(parameters[:: -(-len(parameters) // _NUM_PLACES)]) if parameters else []


def _identity(parameter: Tensor) -> _Identity:
    gradient = parameter.grad
    if gradient is None:
        return None
    shard = local(gradient)  # what is added to it counts there, what the loop does counts outside
    return shard.data_ptr(), shard._version, gradient._version
