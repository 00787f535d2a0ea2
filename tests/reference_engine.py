"""An independent serial reference of everything that composes: parts, codecs, outer rules, shares, nodes, weights.

Written from the definitions in docs/library.md and nothing else; it shares no code with the package. A node is one model
whose gradient is the weighted mean of its workers'. Local updates are added up step by step, as the definitions say, instead
of being read off the parameters; the outer rule is a ``torch.optim.SGD``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.reference import MakeOptimizer, Trace, period_at, shares, values
from tests.reference_payload import coded_chunks


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    periods: tuple[int, ...]  # of each node; one for all but asynlocal
    weights: tuple[float, ...]  # of each worker
    fragments: int = 1
    payload: str = "fp32"
    own_share: float = 1.0
    outer: tuple[float, float, bool] = (1.0, 0.0, False)
    node_size: int = 1
    optimizer: str = "momentum"


class SerialPart:
    """Some parameters on all nodes: the common point, what each node has added since, and what is in flight."""

    def __init__(self, indices: Sequence[int], models: Sequence[nn.Module], case: Case, w: Sequence[float]) -> None:
        self.indices, self.models, self.case, self.w = indices, models, case, w
        self.z = nn.Parameter(self.flat(0))
        rate, momentum, nesterov = case.outer
        self.outer = torch.optim.SGD([self.z], lr=rate, momentum=momentum, nesterov=nesterov)
        zero = torch.zeros_like(self.z.detach())
        self.since_launch = [zero.clone() for _ in models]  # u
        self.since_flight = [zero.clone() for _ in models]  # f
        self.in_flight: Tensor | None = None  # sum_j w_j u_j
        self.e = [zero.clone() for _ in models]
        self.owned = zero.clone()

    def flat(self, node: int) -> Tensor:
        parameters = list(self.models[node].parameters())
        return torch.cat([parameters[i].detach().reshape(-1) for i in self.indices])

    def assign(self, node: int, flat: Tensor) -> None:
        parameters, offset = list(self.models[node].parameters()), 0
        with torch.no_grad():
            for i in self.indices:
                size = parameters[i].numel()
                parameters[i].copy_(flat[offset : offset + size].view_as(parameters[i]))
                offset += size

    def stepped(self, node: int, before: Tensor) -> None:
        change = self.flat(node) - before
        self.since_launch[node] = self.since_launch[node] + change
        self.since_flight[node] = self.since_flight[node] + change

    def launch(self) -> None:
        sent = self.since_launch
        if self.case.payload == "fp32":
            self.in_flight = self.mean(sent)
        else:
            num_chunks = len(self.models) * self.case.node_size
            wanted = [u + e for u, e in zip(sent, self.e, strict=True)]
            codes = [coded_chunks(self.case.payload, v, num_chunks) for v in wanted]
            self.e = [v - q for v, q in zip(wanted, codes, strict=True)]
            total = self.mean(codes) + self.owned
            self.in_flight = coded_chunks(self.case.payload, total, num_chunks)
            self.owned = total - self.in_flight
        self.since_launch = [torch.zeros_like(u) for u in sent]
        self.since_flight = [torch.zeros_like(u) for u in sent]

    def mean(self, rows: Sequence[Tensor]) -> Tensor:
        return sum((wi * row for wi, row in zip(self.w, rows, strict=True)), torch.zeros(()))

    def merge(self, own_share: float) -> None:
        if self.in_flight is None:
            return
        self.z.grad = -self.in_flight
        self.outer.step()
        for node, f in enumerate(self.since_flight):
            self.assign(node, self.z.detach() + own_share * f)
        self.in_flight = None


def run(
    case: Case,
    model: nn.Module,
    parts: Sequence[Sequence[int]],
    make_optimizer: MakeOptimizer,
    make_batch: Callable[[int, int], tuple[Tensor, Tensor]],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    num_rounds: int,
) -> tuple[Trace, list[Tensor]]:
    """Every worker's parameters after every step, and those of all after finish()."""
    nodes = [range(i, i + case.node_size) for i in range(0, len(case.weights), case.node_size)]
    models = [copy.deepcopy(model) for _ in nodes]
    optimizers = [make_optimizer(m) for m in models]
    w = shares([sum(case.weights[i] for i in node) for node in nodes])
    pieces = [SerialPart(indices, models, case, w) for indices in parts]
    trace: Trace = [[] for _ in nodes]
    steps, starts = [0] * len(nodes), [0] * len(nodes)

    def local_step(n: int) -> None:
        before = [piece.flat(n) for piece in pieces]
        optimizers[n].zero_grad()
        for share, i in zip(shares([case.weights[i] for i in nodes[n]]), nodes[n], strict=True):
            (share * loss_of(models[n], *make_batch(i, steps[n]))).backward()
        optimizers[n].step()
        steps[n] += 1
        for piece, old in zip(pieces, before, strict=True):
            piece.stepped(n, old)
        trace[n].append(values(models[n]))

    def next_turn(n: int) -> int:
        """Take steps up to the next one after which a part has its turn."""
        k = period_at(case.periods[n % len(case.periods)], 0)
        while True:
            local_step(n)
            if steps[n] - starts[n] == k:
                starts[n] = steps[n]
                return 0
            for part in range(1, case.fragments):
                if steps[n] - starts[n] == part * k // case.fragments:
                    return part

    ended = 0
    while ended < num_rounds:
        (part,) = {next_turn(n) for n in range(len(nodes))}
        piece = pieces[part]
        if case.name == "cocod":
            piece.merge(case.own_share)
            piece.launch()
        else:
            piece.launch()
            piece.merge(0.0)
        for n, m in enumerate(models):
            trace[n][-1] = values(m)
        ended += part == 0
    for piece in pieces:
        piece.merge(1.0)
    finished = [sum((wi * p.detach() for wi, p in zip(w, row, strict=True)), torch.zeros(()))
                for row in zip(*(m.parameters() for m in models), strict=True)]  # fmt: skip
    return [trace[i // case.node_size] for i in range(len(case.weights))], finished
