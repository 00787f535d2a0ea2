"""Models that ``fully_shard`` shares out over a node: algorithms run between nodes, shard by shard."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cocod_accel import SSGD, AsynLocalSGD, Checkpoints, CoCoDSGD, LocalSGD, PipeSGD, attach, export_model
from tests import loops, reference, reference_engine
from tests.test_combinations import PARTS, ROUNDS, algorithm_of, drawn_case
from tests.test_exactness import assert_traces_equal
from tests.workers import preload, run_outcomes, run_workers

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


def whole(model: Any) -> list[Tensor]:
    """The node's parameters; collective inside the node."""
    parameters: list[Any] = list(model.parameters())
    return [p.full_tensor().detach().clone() for p in parameters]


def shards_of(model: nn.Module) -> list[Tensor]:
    parameters: list[Any] = list(model.parameters())
    return [p.to_local().detach().clone() for p in parameters]


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
    sync.detach()
    return trace, whole(model), rounds


def train_all(rank: int, cases: dict[str, Case]) -> dict[str, Any]:
    return {name: train(rank, case) for name, case in cases.items()}


@functools.cache
def trained(num_nodes: int) -> list[dict[str, Any]]:
    """All cases in one start, because starting is what takes the time."""
    cases = {name: case for name, case in CASES.items() if case.num_nodes == num_nodes}
    return run_workers(2 * num_nodes, train_all, cases, seconds=100, fresh=True)


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


@pytest.mark.parametrize("name", ["ssgd", "pipe", *CASES])
@pytest.mark.timeout(150)
def test_sharded_nodes_equal_the_serial_reference(name: str) -> None:
    if name not in CASES:
        assert all(REFUSED[name] in said[name] for said in refusals())
        return
    case = CASES[name]
    results = [worker[name] for worker in trained(case.num_nodes)]
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


@pytest.mark.slow
def test_combinations_equal_the_serial_reference() -> None:
    draw = random.Random(5)
    given: list[Any] = []
    while len(given) < 16:
        case = replace(drawn_case(draw), payload=PAYLOADS[len(given) % len(PAYLOADS)])
        weights = [1.0] * 2 if case.name == "asynlocal" else case.weights[:2]
        periods = (case.periods * 2)[:2] if case.name == "asynlocal" else case.periods
        given.append(replace(case, sharded=True, node_size=2, weights=(*weights[:1] * 2, *weights[1:] * 2), periods=periods))
    results = run_workers(4, combined, given, fresh=True)
    for index, case in enumerate(given):
        expected, finished = reference_engine.run(
            case, loops.make_model(), PARTS[case.fragments], loops.OPTIMIZERS[case.optimizer], loops.make_batch,
            loops.loss_of, ROUNDS,
        )  # fmt: skip
        assert_traces_equal([worker[index][0] for worker in results], expected, str(case))
        for worker in results:
            for ours, theirs in zip(worker[index][1], finished, strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13), f"{case} after finish()"


# ----------------------------------------------------------------------------- checkpoints, other nodes, one model file


def saved(rank: int, folder: str, num_nodes: int, steps: int, dies_at: int | None = None) -> Any:
    model = shard(make_model(), mesh_of(num_nodes)["shard"])
    optimizer = OPTIMIZERS["adamw"](model)
    algorithm = CoCoDSGD(3, payload="int8", fragments=2, delay=2)
    sync = attach(model, optimizer, algorithm, weight=WEIGHTS[rank // 2])
    checkpoints = Checkpoints(folder, sync)
    resumed = checkpoints.resume()
    begin = whole(model)
    first = 0 if resumed is None else resumed.position
    for step in range(first, steps):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        if step + 1 == 4:  # in the middle of a round, an average in flight
            checkpoints.save(step + 1)
        if step + 1 == dies_at and rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    stats = sync.stats()
    states = [value for state in optimizer.state.values() for value in state.values()]
    moments = [getattr(value, "_local_tensor", value).clone() for value in states]
    return (None if resumed is None else resumed.is_exact), begin, [*whole(model), *moments], (stats.bytes, stats.rounds)


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit_and_other_nodes_from_the_mean(tmp_path: Path) -> None:
    expected = run_workers(4, saved, str(tmp_path / "whole"), 2, 11, fresh=True)
    killed = run_outcomes(4, saved, str(tmp_path / "parts"), 2, 11, 7, fresh=True)
    assert killed[3].exit_code == -signal.SIGKILL
    for (_, _, values, counts), (is_exact, _, found, others) in zip(
        expected, run_workers(4, saved, str(tmp_path / "parts"), 2, 11, fresh=True), strict=True
    ):
        assert is_exact is True
        assert counts == others
        assert all(torch.equal(a, b) for a, b in zip(values, found, strict=True))
    at_save = [row[2] for row in run_workers(4, saved, str(tmp_path / "four"), 2, 4, fresh=True)]
    shares = reference.shares([WEIGHTS[0], WEIGHTS[1]])
    for is_exact, begin, *_ in run_workers(6, saved, str(tmp_path / "four"), 3, 6, fresh=True):
        assert is_exact is False
        for index, value in enumerate(begin):
            mean = shares[0] * at_save[0][index] + shares[1] * at_save[2][index]
            torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-15)


def of_other_size(rank: int, folder: str) -> None:
    model = shard(make_model(), mesh_of(1, 3)["shard"])
    sync = attach(model, OPTIMIZERS["adamw"](model), CoCoDSGD(3), inner=mesh_of(1, 3))
    Checkpoints(folder, sync).resume()


def test_a_checkpoint_of_nodes_of_another_size_is_refused(tmp_path: Path) -> None:
    run_workers(4, saved, str(tmp_path), 2, 4, fresh=True)
    for outcome in run_outcomes(3, of_other_size, str(tmp_path), fresh=True):
        assert outcome.error is not None
        assert "was saved by nodes of 2 workers, here 3 share a model" in outcome.error[1]
        assert "\n" not in outcome.error[1]


def exported(rank: int, path: str) -> Any:
    model = shard(make_model(), mesh_of(2)["shard"])
    optimizer = OPTIMIZERS["adamw"](model)
    sync = attach(model, optimizer, CoCoDSGD(3), weight=WEIGHTS[rank // 2])
    for step in range(5):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    sync.finish()
    export_model(sync, path)
    with pytest.raises(OSError, match=r"no/such/place: rank 0: .*No such file"):
        export_model(sync, "no/such/place")
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_one_file_holds_the_mean_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    results = run_workers(4, exported, str(tmp_path / "model.safetensors"), fresh=True)
    model = make_model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for state in results:
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


# ------------------------------------------------------------------------------------------ what is communicated, and when

_COLLECTIVES = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_gather", "all_gather_object",
    "reduce_scatter", "barrier", "all_to_all_single", "reduce", "all_gather_single", "reduce_scatter_single",
)  # fmt: skip


@contextlib.contextmanager
def recorded(calls: list[Any]) -> Iterator[None]:
    """The group of every collective that Python starts; who imports one by name is not seen, but waits all the same."""
    originals = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}

    def wrap(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
            calls.append(dist.get_process_group_ranks(groups[0] if groups else dist.group.WORLD))
            return call(*args, **kwargs)

        return wrapped

    for name, original in originals.items():
        setattr(dist, name, wrap(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def collectives_in_turns(rank: int, period: int, step: Callable[[int], None], name: str) -> list[list[Any]]:
    """The groups of the collectives in each step of three rounds.

    The second node begins a round when the first has taken all but its last step: if they met before, they would wait for
    each other for ever.
    """
    store = dist.distributed_c10d._get_default_store()
    calls: list[list[Any]] = [[] for _ in range(3 * period)]
    for number in range(3 * period):
        key = f"{name} {number // period} {rank % 2}"
        if rank >= 2 and number % period == 0:
            store.get(key)
        with recorded(calls[number]):
            step(number)
        if rank < 2 and number % period == period - 2:
            store.set(key, "done")
    return calls


def check_turns(calls: list[list[Any]], rank: int, period: int) -> None:
    mates = [rank // 2 * 2, rank // 2 * 2 + 1]
    for number, groups in enumerate(calls):
        assert mates in groups, "the count sees what a node does"
        others = [ranks for ranks in groups if not set(ranks) <= set(mates)]
        assert bool(others) == (number % period == period - 1), f"step {number}: {groups}"
        assert all(ranks in ([rank % 2, 2 + rank % 2], [0, 1, 2, 3]) for ranks in others)


def in_turns(rank: int) -> Any:
    counted = []
    for name in ("cocod", "local"):
        model = shard(make_model(), mesh_of(2)["shard"])
        optimizer = OPTIMIZERS["adamw"](model)
        sync = attach(model, optimizer, loops.make_algorithm(name, 4))

        def step(number: int, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, number)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()

        counted.append(collectives_in_turns(rank, 4, step, name))
        sync.finish()
        sync.detach()
    return counted


def test_inside_a_round_only_mates_communicate() -> None:
    for rank, algorithms in enumerate(run_workers(4, in_turns, fresh=True)):
        for steps in algorithms:
            check_turns(steps, rank, 4)


def sent(rank: int) -> Any:
    model = shard(make_model(), mesh_of(2)["shard"])
    optimizer = OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(2))
    for step in range(6):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    return sync.stats().bytes, sync.stats().rounds, sum(value.numel() for value in shards_of(model))


def test_a_worker_sends_its_shard() -> None:
    found = run_workers(4, sent, fresh=True)
    for num_bytes, rounds, size in found:
        assert num_bytes == 8 * size * (rounds - 1)  # 2 (N - 1) / N of float64, N = 2; the last mean is under way
    assert found[0][2] + found[1][2] == sum(p.numel() for p in make_model().parameters())
    assert found[0][2] != found[1][2]


# ------------------------------------------------------------------------- policies, what stays gathered, frozen parameters


class Normed(nn.Module):
    """With statistics, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(self.last(torch.tanh(self.norm(self.first(x)))))
        return out


def with_policies(rank: int) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    found = []
    for options in (
        {},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ):
        # Statistics and bfloat16 do not go together.
        model = shard(Odd() if "mp_policy" in options else Normed(), mesh_of(2)["shard"], **options)
        optimizer = OPTIMIZERS["momentum"](model)
        sync = attach(model, optimizer, LocalSGD(1), weight=WEIGHTS[rank // 2])
        for step in range(3):
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step, dtype=torch.float32)).backward()
            if step == 2:
                sync.detach()
            optimizer.step()
        before = {name: getattr(v, "full_tensor", v.clone)() for name, v in model.state_dict().items()}
        sync = attach(model, optimizer, LocalSGD(3), weight=WEIGHTS[rank // 2])
        sync.finish()
        after = {name: getattr(v, "full_tensor", v.clone)() for name, v in model.state_dict().items()}
        assert all(p.dtype == torch.float32 for p in model.parameters())
        found.append((before, after))
        sync.detach()
    return found


def test_policies_buffers_and_frozen_parameters() -> None:
    results = run_workers(4, with_policies, fresh=True)
    weights = [1.0, 1.0, 3.0, 3.0]
    share = reference.shares(weights)
    for index in range(3):
        rows = [worker[index] for worker in results]
        assert not torch.equal(rows[0][0]["first.weight"], rows[2][0]["first.weight"])
        if index < 2:
            assert not torch.equal(rows[0][0]["norm.running_mean"], rows[1][0]["norm.running_mean"])
            assert "frozen.weight" in rows[0][0]
        for name in [name for name, value in rows[0][0].items() if value.is_floating_point()]:
            mean = sum(w * before[name].double() for w, (before, _) in zip(share, rows, strict=True))
            for _, after in rows:
                torch.testing.assert_close(after[name].double(), mean, rtol=1e-6, atol=1e-7)
                assert torch.equal(after[name], rows[0][1][name])
    for name, value in results[0][0][0].items():  # offloading changes no bit
        assert torch.equal(value, results[0][1][0][name])


def evaluated(rank: int, how: str) -> Any:
    """Gathered parameters of an evaluation, or of a backward, must not survive what is written into shards."""
    model = shard(make_model(), mesh_of(2)["shard"], reshard_after_forward=False)
    optimizer = OPTIMIZERS["adamw"](model)
    x, y = loops.make_batch(rank, 0)
    with torch.no_grad():
        model(x)  # everything is gathered when the algorithm is attached
    sync = attach(model, optimizer, CoCoDSGD(2, delay=1), weight=WEIGHTS[rank // 2])
    losses = []
    for step in range(6):
        x, y = loops.make_batch(rank, step)
        optimizer.zero_grad()
        loops.loss_of(model, x, y).backward()
        optimizer.step()
        if how == "no evaluation":
            continue
        with torch.no_grad():
            model(x)
        with sync.averaged(), torch.no_grad():
            losses.append(loops.loss_of(model, x, y))
            mean = make_model()
            for own, p in zip(mean.parameters(), whole_again(model), strict=True):
                own.copy_(p)
            torch.testing.assert_close(losses[-1], loops.loss_of(mean, x, y), rtol=1e-12, atol=0)
    if how == "skipped step":  # gradients that are dropped count when the next forward begins, which merges
        for step in (6, 7):
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
            optimizer.zero_grad(set_to_none=False)
        assert sync.attempts == 7
        with torch.no_grad():
            model(x)
        loss = loops.loss_of(model, x, y)
        assert sync.attempts == 8
        mean = make_model()
        with torch.no_grad():
            for own, p in zip(mean.parameters(), whole_again(model), strict=True):
                own.copy_(p)
        torch.testing.assert_close(loss.detach(), loops.loss_of(mean, x, y).detach(), rtol=1e-12, atol=0)
        return None
    return whole_again(model)


def whole_again(model: Any) -> list[Tensor]:
    for child in model.modules():
        if hasattr(child, "reshard"):
            child.reshard()
    return whole(model)


def test_what_was_gathered_before_a_merge_is_not_used_after_it() -> None:
    for alone, evaluating in zip(
        run_workers(4, evaluated, "no evaluation", fresh=True),
        run_workers(4, evaluated, "evaluation", fresh=True),
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(alone, evaluating, strict=True))
    run_workers(4, evaluated, "skipped step", fresh=True)


def with_nothing(rank: int) -> Any:
    """The second worker of a node holds nothing at all, so it cannot tell by itself whether gradients were dropped."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model: Any = fully_shard(nn.Linear(6, 1, bias=False).double(), mesh=mesh_of(2)["shard"])
    optimizer = OPTIMIZERS["adamw"](model)
    sync = attach(model, optimizer, CoCoDSGD(2), weight=WEIGHTS[rank // 2])
    attempts = []
    for step in range(6):
        for part in (0, 1):
            x, y = loops.make_batch(rank, 2 * step + part)
            loops.loss_of(model, x, y[:, :1]).backward()
            model.weight.grad.mul_(0.5)  # they are not what they were after backward
        optimizer.step()
        attempts.append(sync.attempts)
        optimizer.zero_grad()
    sync.finish()
    uneven: Any = nn.ParameterList([torch.ones(1, 40), torch.ones(40), torch.ones(40)])
    fully_shard(uneven, mesh=mesh_of(2)["shard"])
    in_parts = attach(uneven, OPTIMIZERS["sgd"](uneven), CoCoDSGD(2, fragments=2))
    cuts = [len(part.parameters) for part in in_parts._driver.replica.parts]
    return attempts, [value.numel() for value in shards_of(model)], whole(model), cuts


def test_a_worker_without_any_parameters_counts_like_its_mate() -> None:
    results = run_workers(4, with_nothing, fresh=True)
    assert [sizes for _, sizes, *_ in results] == [[6], [0]] * 2
    for attempts, _, final, cuts in results:
        assert cuts == [1, 2], "parts are the same on all workers, whatever they hold of them"
        assert attempts == [1, 2, 3, 4, 5, 6]
        assert all(torch.equal(a, b) for a, b in zip(final, results[0][2], strict=True))


# ------------------------------------------------------------------------------------------------------------- memory


class Storages(TorchDispatchMode):
    """The bytes of plain tensors that live, and the most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        self._known = {key: held for key, held in self._known.items() if not held[0].expired()}
        return sum(size for _, size in self._known.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tree_map(self._note, found)
        return found

    def _note(self, leaf: Any) -> None:
        if type(leaf) in (Tensor, nn.Parameter):
            storage = leaf.untyped_storage()
            if storage._cdata not in self._known or self._known[storage._cdata][0].expired():
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.peak = max(self.peak, self.live)


def measured(rank: int) -> Any:
    """A model of 50 M parameters, in layers of 2.1 M."""
    from torch.distributed.fsdp import fully_shard

    found = []
    mesh = mesh_of(2)["shard"]
    for attaches in (False, True):
        with Storages() as storages:
            model: Any = nn.Sequential(*(nn.Linear(1448, 1448, bias=False) for _ in range(24)))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            own = sum(p.to_local().numel() * 4 for p in model.parameters())
            sync = attach(model, optimizer, CoCoDSGD(2)) if attaches else None
            gc.collect()
            storages.peak = 0
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.ones(1, 1448)).mean().backward()
                optimizer.step()
            gc.collect()
            peaks, between = [storages.peak], storages.live
            for verb in ("averaged", "finish"):
                storages.peak = storages.live
                if sync is not None and verb == "averaged":
                    with sync.averaged():
                        pass
                elif sync is not None:
                    sync.finish()
                peaks.append(storages.peak)
            found.append((own, peaks[0], between, *peaks[1:]))
            if sync is not None:
                sync.detach()
        del sync, optimizer, model
        gc.collect()
    return found


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_worker_needs_two_more_shards_and_no_model() -> None:
    for (own, *alone), (_, *ours) in run_workers(4, measured, seconds=120, fresh=True):
        assert own == 24 * 1448 * 1448 * 4 // 2
        steps, between = ours[0] - alone[0], ours[1] - alone[1]
        print(f"shards more: {steps / own:.3f} in a step, {between / own:.3f} between steps")
        print(f"{(ours[2] - alone[1]) / own:.3f} in averaged(), {(ours[3] - alone[1]) / own:.3f} in finish()")
        assert 1.9 * own < between <= 2.1 * own
        assert max(steps, ours[2] - alone[2], ours[3] - alone[3]) <= 2.1 * own


# ------------------------------------------------------------------------------------------------------------ bad input


def refused(rank: int, what: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(2)
    model: Any = make_model()
    optimizer = OPTIMIZERS["sgd"](model)
    algorithm: Any = {"pipe": PipeSGD(), "ssgd": SSGD(), "average": LocalSGD(2, optimizer_state="average")}.get(
        what, AsynLocalSGD(2 + rank) if what == "periods" else CoCoDSGD(2)
    )
    over: Any = {"hsdp": mesh, "all": init_device_mesh("cpu", (4,)), "alone": init_device_mesh("cpu", (4, 1))}.get(
        what, mesh["shard"]
    )
    if what == "alone":
        over = init_device_mesh("cpu", (4, 1), mesh_dim_names=("node", "shard"))["shard"]
    if what == "unequal":
        three = DeviceMesh("cpu", [0, 1, 2], _init_backend=True) if rank < 3 else None
        over = three or DeviceMesh("cpu", [3], _init_backend=True)
    if what == "two meshes":
        fully_shard(model.first, mesh=mesh["node"])
    if what == "part":
        fully_shard(model.first, mesh=over)
    else:
        fully_shard(model, mesh=over)
    if what != "optimizer":
        optimizer = OPTIMIZERS["sgd"](model)
    inner: Any = {"other group": mesh["node"], "no group": 4}.get(what)
    weight = rank + 1 if what == "weights" else 1
    attach(model, optimizer, algorithm, weight=weight, inner=inner)


REFUSED = {
    "pipe": "PipeSGD reduces gradients over all workers",
    "ssgd": "SSGD reduces gradients over all workers",
    "average": 'optimizer_state="average": the optimizer state of a sharded model stays local',
    "hsdp": "is replicated over a dimension of its mesh (HSDP)",
    "all": "the model is sharded over all 4 workers, so none can step alone",
    "alone": "the model is sharded over one worker, so each holds a whole one",
    "weights": "the workers of ranks [0, 1] share a model, whose gradients are averaged with equal weights, got [1.0, 2.0]",
    "part": "is not sharded, so its gradient is not summed inside the node",
    "two meshes": "use one mesh for all",
    "optimizer": "build the optimizer from this model's parameters()",
    "other group": "inner has the ranks [0, 2], the model is sharded over [0, 1]",
    "no group": "inner=4 is not a process group with this worker",
    "periods": "the workers of ranks [0, 1] share a node but differ in period",
}


def refused_one_by_one(rank: int) -> dict[str, str]:
    said = {}
    for what in REFUSED:
        with pytest.raises((TypeError, ValueError)) as caught:
            refused(rank, what)
        said[what] = str(caught.value)
    return said


@functools.cache
def refusals() -> list[dict[str, str]]:
    return run_workers(4, refused_one_by_one, fresh=True)


def test_a_mistake_is_one_clear_line_on_every_worker() -> None:
    for said in refusals():
        for what, line in REFUSED.items():
            # Who is somewhere else names ranks of its own.
            assert line in said[what] or (what == "other group" and said[what].startswith("inner has the ranks")), said[what]
            assert "\n" not in said[what]
