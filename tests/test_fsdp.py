"""Models that ``fully_shard`` shares out over a node: algorithms run between nodes, shard by shard."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cocod_accel import AsynLocalSGD, CoCoDSGD, LocalSGD, attach
from tests import loops, reference, reference_engine
from tests.test_combinations import PARTS, ROUNDS, algorithm_of, drawn_case
from tests.test_exactness import assert_traces_equal
from tests.workers import preload, run_workers

preload("torch.distributed.fsdp", "torch.distributed.tensor")

STEPS = 36
#: Of nodes: their workers have equal ones.
WEIGHTS = [1.0, 3.0, 2.0]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **loops.OPTIMIZERS,
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
}


class Odd(nn.Module):
    """Layers that two or three workers cannot share evenly, one parameter that most hold nothing of, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.second.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.tied(torch.tanh(self.second(x))))
        out: Tensor = self.last(x * self.scale)
        return out


def make_model() -> nn.Module:
    return Odd().double()


def mesh_of(num_nodes: int, size: int = 2) -> Any:
    return init_device_mesh("cpu", (num_nodes, size), mesh_dim_names=("node", "shard"))


def shard(model: nn.Module, mesh: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.get_submodule("first"), mesh=mesh, **options)
    fully_shard(model.get_submodule("last"), mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(model: nn.Module) -> list[Tensor]:
    """The node's parameters; collective inside the node."""
    return [p.full_tensor().detach().clone() for p in model.parameters()]  # type: ignore[operator]


def shards_of(model: nn.Module) -> list[Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore[operator]


# ----------------------------------------------------------------------------------------- the numbers


@dataclass(frozen=True)
class Case:
    algorithm: str = "cocod"
    optimizer: str = "adamw"
    num_nodes: int = 2
    reshard: bool | None = None
    accumulated: int = 1
    #: Gradients are accumulated before they are reduced inside the node.
    deferred: bool = False
    clipping: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()

    def period(self, node: int) -> int:
        return node + 1 if self.algorithm == "asynlocal" else 3

    def steps(self, node: int) -> int:
        return STEPS // 3 * (node + 1) if self.algorithm == "asynlocal" else STEPS

    def weight(self, node: int) -> float:
        return 1.0 if self.algorithm == "asynlocal" else WEIGHTS[node]

    def make(self, node: int) -> Any:
        kinds: dict[str, Any] = {"cocod": CoCoDSGD, "local": LocalSGD, "asynlocal": AsynLocalSGD}
        return kinds[self.algorithm](self.period(node), **dict(self.options))


CASES = {
    "cocod": Case(),
    "cocod, momentum, every layer gathered twice": Case(optimizer="momentum", reshard=True),
    "cocod, gathered layers kept": Case(optimizer="sgd", reshard=False),
    "cocod, clipping": Case(clipping=0.05),
    "cocod, accumulation": Case(accumulated=2),
    "cocod, deferred accumulation": Case(accumulated=2, deferred=True, clipping=0.05),
    "local": Case("local"),
    "local, momentum": Case("local", optimizer="momentum"),
    "asynlocal": Case("asynlocal"),
    "three nodes": Case(num_nodes=3),
}


def train(rank: int, case: Case) -> Any:
    node = rank // 2
    mesh = mesh_of(case.num_nodes)
    model = shard(make_model(), mesh["shard"], reshard_after_forward=case.reshard)
    optimizer = OPTIMIZERS[case.optimizer](model)
    sync = attach(model, optimizer, case.make(node), weight=case.weight(node), inner=mesh)
    trace = []
    for step in range(case.steps(node)):
        for part in range(case.accumulated):
            if case.deferred:
                model.set_requires_gradient_sync(part + 1 == case.accumulated)
            x, y = loops.make_batch(rank, step * case.accumulated + part)
            (loops.loss_of(model, x, y) / case.accumulated).backward()
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
        optimizer.zero_grad()
        trace.append(whole(model))
        if step == 4 and case.algorithm != "asynlocal":  # in the middle of a round
            before = shards_of(model)
            with sync.averaged():
                mean = whole(model)
                with torch.no_grad():
                    model(x)  # what it gathers must not be left behind
            assert all(torch.equal(a, b) for a, b in zip(before, shards_of(model), strict=True))
            trace[-1] = [*trace[-1], *mean]
    rounds = sync.stats().rounds
    sync.finish()
    return trace, whole(model), rounds


def batches_of(case: Case, node: int) -> Any:
    """A batch of a node: those of its workers."""
    rows = []
    for step in range(case.steps(node)):
        parts = [
            loops.make_batch(rank, step * case.accumulated + part)
            for rank in (2 * node, 2 * node + 1)
            for part in range(case.accumulated)
        ]
        rows.append(([x for x, _ in parts], [y for _, y in parts]))
    return rows


def node_loss(model: nn.Module, xs: Any, ys: Any) -> Tensor:
    return sum((loops.loss_of(model, x, y) / len(xs) for x, y in zip(xs, ys, strict=True)), torch.zeros(()))


class Clipped(torch.optim.AdamW):
    """AdamW on gradients of a limited norm."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        return super().step(closure)


def serial(case: Case) -> reference.Trace:
    """The reference sees each node as one worker."""
    make: Any = (lambda m: Clipped(m.parameters(), lr=1e-2)) if case.clipping else OPTIMIZERS[case.optimizer]
    nodes = range(case.num_nodes)
    return reference.run(
        case.algorithm,
        make_model(),
        make,
        [batches_of(case, node) for node in nodes],
        node_loss,
        [case.weight(node) for node in nodes],
        [case.period(node) for node in nodes],
    )


@pytest.mark.parametrize("name", list(CASES))
def test_sharded_nodes_equal_the_serial_reference(name: str) -> None:
    case = CASES[name]
    results = run_workers(2 * case.num_nodes, train, case)
    expected = serial(case)
    found = [[row[: len(expected[0][0])] for row in trace] for trace, *_ in results]
    assert_traces_equal(found, [expected[rank // 2] for rank in range(len(results))], name)
    assert {rounds for *_, rounds in results} == {12}
    for _, final, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(final, results[0][1], strict=True))
    if case.algorithm != "asynlocal":
        w = reference.shares([case.weight(node) for node in range(case.num_nodes)])
        for index in range(len(expected[0][4])):
            mean = sum(share * expected[node][4][index] for node, share in enumerate(w))
            for trace, *_ in results:
                torch.testing.assert_close(trace[4][len(expected[0][4]) + index], mean, rtol=1e-12, atol=1e-15)


# -------------------------------------------------------------------- codecs, delay, fragments, outer rules, own shares


def combined(rank: int, given: list[reference_engine.Case]) -> Any:
    found = []
    mesh = mesh_of(2)["shard"]
    for case in given:
        from torch.distributed.fsdp import fully_shard

        model: Any = fully_shard(loops.make_model(), mesh=mesh)
        optimizer = loops.OPTIMIZERS[case.optimizer](model)
        sync = attach(model, optimizer, algorithm_of(case, rank // 2), weight=case.weights[rank])
        trace = []
        for step in range(case.num_steps(rank // 2, ROUNDS)):
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
            optimizer.step()
            trace.append(whole(model))
        sync.finish()
        found.append((trace, whole(model), sync.stats().bytes))
        sync.detach()
    return found


PAYLOADS = ["fp32", "bf16", "int8", "int4", "ternary", "topk:0.2", "fp32", "fp32"]


def test_combinations_equal_the_serial_reference() -> None:
    draw, given = random.Random(5), []
    while len(given) < 16:
        case = replace(drawn_case(draw), payload=PAYLOADS[len(given) % len(PAYLOADS)])
        weights = [1.0] * 2 if case.name == "asynlocal" else case.weights[:2]
        periods = (case.periods * 2)[:2] if case.name == "asynlocal" else case.periods
        given.append(replace(case, sharded=True, node_size=2, weights=(*weights[:1] * 2, *weights[1:] * 2), periods=periods))
    results = run_workers(4, combined, given)
    for index, case in enumerate(given):
        expected, finished = reference_engine.run(
            case, loops.make_model(), PARTS[case.fragments], loops.OPTIMIZERS[case.optimizer], loops.make_batch,
            loops.loss_of, ROUNDS,
        )  # fmt: skip
        assert_traces_equal([worker[index][0] for worker in results], expected, str(case))
        for worker in results:
            for ours, theirs in zip(worker[index][1], finished, strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13), f"{case} after finish()"
