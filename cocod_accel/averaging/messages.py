"""What workers and a server of theirs say to each other: gradients one way, the model the other.

A message is a few numbers, and then the gradient in the code of the run, or the model in full. Both ends make the same
tensors from the same parameters, so nothing has to be told about sizes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cocod_accel.averaging.coder import Coder
from cocod_accel.averaging.flat import FlatCopy
from cocod_accel.averaging.header import Header, Kind
from cocod_accel.comm.handles import SoloComm


class Ask(IntEnum):
    """What a worker wants of the server. From ``MODEL`` to ``LOAD`` it is answered when all workers have asked for it."""

    STEP = 0  # apply this gradient
    MODEL = 1
    FINISH = 2
    SAVE = 3
    LOAD = 4
    WATCH = 5
    LEAVE = 6

    @property
    def meets_all(self) -> bool:
        return Ask.MODEL <= self <= Ask.LOAD


class Up(IntEnum):
    """Places of the numbers that a worker sends; those of its optimizers follow."""

    ASK = 0
    NUMBER = 1  # of its gradients, this one included
    VERSION = 2  # of the model that the gradient is of
    SCALE = 3  # what the gradient is multiplied by
    STOP = 4
    SAVE = 5
    EXTRA = 6  # bytes that follow the message; of WATCH: seconds
    SIZE = 7


class Down(IntEnum):
    """Places of the numbers that the server answers with."""

    VERSION = 0
    STALENESS = 1
    STOP_AT = 2  # after how many of its gradients a worker is to stop, or to save; 0: not
    SAVE_AT = 3
    EXTRA = 4
    LINK_BYTES = 5  # that have come and gone over the server's link
    SIZE = 6


class GradientCode:
    """Gradients on their way from one worker: as they are, or coded, with what rounding dropped sent later."""

    def __init__(self, payload: str, parameters: Sequence[Tensor], seed: int = 0, rank: int = 0) -> None:
        #: What is to be sent, or what has been received and decoded.
        self.flat = FlatCopy(parameters)
        self._factors = (1.0,)
        self._coders: list[Coder] | None = None
        if payload != "fp32":
            self._coders = [
                Coder(payload, core, SoloComm(), sizes=sizes, seed=(seed, index, rank))
                for index, (core, sizes) in enumerate(zip(self.flat.cores, self.flat.core_sizes, strict=True))
            ]

    @property
    def num_bytes(self) -> int:
        """Of a gradient on the wire, scales included and headers not."""
        if self._coders is None:
            return sum(buffer.numel() * buffer.element_size() for buffer in self.flat.buffers)
        return sum(coder.message_bytes for coder in self._coders)

    def room(self) -> list[Tensor]:
        """For a message."""
        if self._coders is None:
            return [torch.empty_like(buffer) for buffer in self.flat.buffers]
        return [torch.empty_like(coder.message) for coder in self._coders]

    @torch.no_grad()
    def write(self, room: Sequence[Tensor], number: int) -> None:
        """room <- the gradient in :attr:`flat`."""
        if self._coders is None:
            for place, buffer in zip(room, self.flat.buffers, strict=True):
                place.copy_(buffer)
            return
        for place, coder, core in zip(room, self._coders, self.flat.cores, strict=True):
            coder.encode(core, None, Header(Kind.GRADIENT, number, self._factors, 0))
            place.copy_(coder.message)

    @torch.no_grad()
    def read(self, room: Sequence[Tensor]) -> None:
        """:attr:`flat` <- the gradient in ``room``."""
        if self._coders is None:
            for place, buffer in zip(room, self.flat.buffers, strict=True):
                buffer.copy_(place)
            return
        for place, coder, core in zip(room, self._coders, self.flat.cores, strict=True):
            coder.message.copy_(place)
            coder.read_message(core)

    def state(self) -> Any:
        """What rounding has dropped and is not sent yet."""
        return None if self._coders is None else [coder.residual for coder in self._coders]

    def load(self, state: Any) -> None:
        for index, coder in enumerate(self._coders or ()):
            coder.clear()
            if state is not None:
                coder.residual.copy_(state[index])


def numbers_of(optimizers: Sequence[Optimizer]) -> list[float]:
    """Learning rates and whatever else of the optimizers is a number, in an order that is the same everywhere."""
    return [float(group[key]) for group, key in _places(optimizers)]


def set_numbers(optimizers: Sequence[Optimizer], numbers: Sequence[float], rate_divisor: int = 1) -> None:
    """The other way; learning rates are divided."""
    for (group, key), number in zip(_places(optimizers), numbers, strict=True):
        value = number / rate_divisor if key == "lr" else number
        if isinstance(group[key], Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def described(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> str:
    """What must be the same on workers and server for the numbers of one to mean anything to the other."""
    order = {id(parameter): index for index, parameter in enumerate(parameters)}
    groups = [
        f"{type(optimizer).__name__} {[order.get(id(p), -1) for p in group['params']]}"
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return f"{groups} {[key for _, key in _places(optimizers)]}"


def _places(optimizers: Sequence[Optimizer]) -> list[tuple[dict[str, Any], str]]:
    return [
        (group, key)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for key in sorted(group)
        if key not in ("params", "initial_lr") and _is_number(group[key])
    ]


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def packed(tree: Any) -> Tensor:
    """A state as bytes."""
    file = io.BytesIO()
    torch.save(tree, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(held: Tensor) -> Any:
    return torch.load(io.BytesIO(held.numpy().tobytes()), weights_only=True)
