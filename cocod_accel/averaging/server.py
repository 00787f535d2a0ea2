"""The server of an asynchronous run: the model that workers send gradients for, and its optimizer. It knows no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cocod_accel.averaging.flat import FlatCopy
from cocod_accel.averaging.messages import Ask, Down, GradientCode, Up, numbers_of, packed, set_numbers, unpacked
from cocod_accel.comm.in_process import InProcessSpoke


@dataclass
class Served:
    """What a server has done; also what ``serve`` returns."""

    #: Gradients that it has applied.
    gradients: int = 0
    #: Updates between the model that a gradient is of and the one that it was applied to.
    staleness: float = 0.0
    largest_staleness: int = 0
    #: What has come and gone over its link: gradients as they are coded, and models.
    bytes: int = 0

    def note(self, staleness: int, num_bytes: int) -> None:
        self.gradients += 1
        self.staleness += (staleness - self.staleness) / self.gradients
        self.largest_staleness = max(self.largest_staleness, staleness)
        self.bytes += num_bytes


@dataclass
class _Client:
    """What the server knows of a worker."""

    #: Gradients that it has sent.
    number: int = 0
    #: What it waits for with all others; None: nothing.
    asks: Ask | None = None


@dataclass(frozen=True)
class Answer:
    """To one worker: numbers, and the model."""

    rank: int
    numbers: Tensor
    model: FlatCopy
    extra: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class Server:
    """Applies gradients in the order in which it is given them::

        x <- step(x, N w_i g_i, learning rate / N)        w_i = M_i / sum_j M_j

    so N gradients of equal weight move the model, and decay its weights, as far as a step of S-SGD.
    ``bound``: gradients of its own that a worker may be ahead of the answers.
    """

    def __init__(
        self, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer], num_workers: int, payload: str, bound: int
    ) -> None:
        self.parameters, self.optimizers = list(parameters), list(optimizers)
        self.code = GradientCode(payload, self.parameters)
        self.served = Served()
        #: Updates so far.
        self.version = 0
        self._clients = [_Client() for _ in range(num_workers)]
        self._bound = bound
        self._stop_at = self._save_at = 0
        self._spare: list[FlatCopy] = []
        self._model_bytes = sum(b.numel() * b.element_size() for b in FlatCopy(self.parameters).buffers)

    @property
    def numbers_size(self) -> int:
        """Of the numbers that a worker sends."""
        return int(Up.SIZE) + len(numbers_of(self.optimizers))

    def take(self, rank: int, numbers: Tensor, gradient: Sequence[Tensor], extra: Callable[[int], Tensor]) -> list[Answer]:
        """A message of one worker has come; what is to be answered now, and to whom. ``extra``: so many bytes after it."""
        client, ask = self._clients[rank], Ask(int(numbers[Up.ASK]))
        if ask is Ask.STEP:
            client.number = int(numbers[Up.NUMBER])
            self._vote(bool(numbers[Up.STOP]), bool(numbers[Up.SAVE]))
            return [self._answer(rank, self._apply(numbers, gradient))]
        if ask is Ask.LOAD and int(numbers[Up.EXTRA]):
            self._load(unpacked(extra(int(numbers[Up.EXTRA]))))
        if not ask.meets_all:
            return []
        client.asks = ask
        if any(other.asks is None for other in self._clients):
            return []
        asked, same = {other.asks for other in self._clients}, [other.asks for other in self._clients]
        if len(asked) > 1:
            places = ", ".join(f"rank {rank} asks for {one.name}" for rank, one in enumerate(same) if one is not None)
            raise RuntimeError(f"{places}: call averaged(), finish() and state_dict() on all workers at the same step")
        for other in self._clients:
            other.asks = None
            if ask is Ask.LOAD:
                other.number = 0
        saved = packed(self.state()) if ask is Ask.SAVE else None
        return [self._answer(r, 0, saved if r == 0 else None) for r in range(len(self._clients))]

    def take_from(self, spokes: Sequence[InProcessSpoke], rank: int) -> None:
        """The next message of a worker of this process has come."""
        numbers, *gradient = spokes[rank].take()
        for answer in self.take(rank, numbers, gradient, _nothing_follows):
            spokes[answer.rank].answer([answer.numbers, *answer.model.buffers])
            self.free(answer)

    def free(self, answer: Answer) -> None:
        """It has been sent."""
        self._spare.append(answer.model)

    @torch.no_grad()
    def state(self) -> dict[str, Any]:
        model = FlatCopy(self.parameters)
        model.load()
        return {
            "version": self.version,
            "model": model.buffers,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    # ---- details

    def _apply(self, numbers: Tensor, gradient: Sequence[Tensor]) -> int:
        self.code.read(gradient)
        scale = float(numbers[Up.SCALE])
        if scale != 1:
            for buffer in self.code.flat.buffers:
                buffer.mul_(scale)
        for parameter, view in self.code.flat.views.items():
            parameter.grad = view.to(parameter.dtype)
        set_numbers(self.optimizers, numbers[Up.SIZE :].tolist(), rate_divisor=len(self._clients))
        for optimizer in self.optimizers:
            optimizer.step()
        staleness = self.version - int(numbers[Up.VERSION])
        self.version += 1
        self.served.note(staleness, self.code.num_bytes + self._model_bytes)
        return staleness

    @torch.no_grad()
    def _answer(self, rank: int, staleness: int, extra: Tensor | None = None) -> Answer:
        model = self._spare.pop() if self._spare else FlatCopy(self.parameters)
        model.load()
        numbers = torch.zeros(Down.SIZE, dtype=torch.float64)
        said = {
            Down.VERSION: self.version, Down.STALENESS: staleness, Down.STOP_AT: self._stop_at, Down.SAVE_AT: self._save_at,
            Down.EXTRA: 0 if extra is None else len(extra), Down.LINK_BYTES: self.served.bytes,
        }  # fmt: skip
        for place, value in said.items():
            numbers[place] = value
        return Answer(rank, numbers, model) if extra is None else Answer(rank, numbers, model, extra)

    def _vote(self, stop: bool, save: bool) -> None:
        """What one worker asks for, all do after the same number of gradients: one that none has come to unawares."""
        ahead = max(client.number for client in self._clients) + self._bound + 1
        if stop and not self._stop_at:
            self._stop_at = ahead
        if save and self._save_at <= ahead - self._bound - 1:
            self._save_at = ahead

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        model = FlatCopy(self.parameters)
        model.fill(state["model"])
        model.store()
        self.version = state["version"]
        self._stop_at = self._save_at = 0
        for index, optimizer in enumerate(self.optimizers):
            optimizer.state.clear()
            if state["optimizers"] is not None:
                optimizer.load_state_dict(state["optimizers"][index])


def _nothing_follows(size: int) -> Tensor:
    raise AssertionError("states are not sent inside a process")
