"""What belongs to an attached model. Whatever is added to it later would be trained, and averaged by nobody."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer

_Slot: TypeAlias = tuple[nn.Module, list[tuple[str, nn.Parameter | None]], list[tuple[str, nn.Module | None]]]

_FIX = "on all workers, call sync.finish() and sync.detach() before such a change, and attach() after it"


class Belongings:
    """The parameters of a model and of its optimizers, as they were at attach."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], ignored: Collection[str]) -> None:
        self._module, self._optimizers, self._ignored = module, optimizers, frozenset(ignored)
        self._slots = _slots(module)
        self._known = {id(parameter) for parameter in module.parameters()}
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._held = [_held_by(optimizer) for optimizer in optimizers]

    def problem(self) -> str | None:
        """What is trained now and was not at attach, in one line; None: nothing.

        Asked at every round's end. As a rule nothing has changed, which takes comparing objects and no more.
        """
        if self._is_as_before:
            return None
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad or name in self._ignored:
                continue
            if id(parameter) not in self._known:
                return f"parameter {name} was added or replaced after attach, so it is not averaged; {_FIX}"
            if any(parameter is other for other in self._frozen):
                return f"parameter {name} was frozen at attach and is trained now, so it is not averaged; {_FIX}"
        for optimizer, before in zip(self._optimizers, self._held, strict=True):
            added = set(_held_by(optimizer)) - set(before)
            if added - self._known:
                return f"the optimizer was given {len(added)} more parameter(s) after attach, not averaged; {_FIX}"
        # Modules without parameters may come and go, and frozen parameters may be held by an optimizer.
        self._slots, self._held = _slots(self._module), [_held_by(optimizer) for optimizer in self._optimizers]
        self._frozen = [p for p in self._frozen if not p.requires_grad]
        return None

    @property
    def _is_as_before(self) -> bool:
        for owner, parameters, children in self._slots:
            own, modules = owner._parameters, owner._modules
            if len(own) != len(parameters) or len(modules) != len(children):
                return False
            for name, parameter in parameters:
                if own.get(name) is not parameter:
                    return False
            for name, child in children:
                if modules.get(name) is not child:
                    return False
        for parameter in self._frozen:
            if parameter.requires_grad:
                return False
        return all(_held_by(o) == before for o, before in zip(self._optimizers, self._held, strict=True))


def _slots(module: nn.Module) -> list[_Slot]:
    return [(each, list(each._parameters.items()), list(each._modules.items())) for each in module.modules()]


def _held_by(optimizer: Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
