"""Two levels: workers of a node sum their gradients in every step, algorithms run between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import AsynLocalSGD, Checkpoints, CoCoDSGD, LocalSGD, PipeSGD, Sync, attach
from cocod_accel.comm.emulated import EmulatedLink, Link
from cocod_accel.comm.groups import TwoLevelComm
from cocod_accel.sync.nodes import Nodes
from tests import loops, reference
from tests.test_collectives import profiled, started_in
from tests.test_exactness import assert_traces_equal
from tests.workers import run_outcomes, run_workers

NODES = [[0, 1], [2, 3]]
#: Different inside a node and between nodes; and, for asynlocal, equal between them.
WEIGHTS = {"local": [1.0, 3.0, 2.0, 5.0], "cocod": [1.0, 3.0, 2.0, 5.0], "asynlocal": [1.0, 3.0, 2.0, 2.0]}
STEPS = 9


def node_group(rank: int, nodes: Sequence[Sequence[int]] = NODES) -> Any:
    """The process group of this worker's node; every worker makes all of them, as torch asks for."""
    groups = [dist.new_group(list(node)) for node in nodes]
    return next(group for group, node in zip(groups, nodes, strict=True) if rank in node)


# ----------------------------------------------------------------------------------------- the numbers


def period_of(name: str, rank: int) -> int:
    return [1, 2][rank // 2] if name == "asynlocal" else 3


def steps_of(name: str, rank: int) -> int:
    return [4, 8][rank // 2] if name == "asynlocal" else STEPS


def two_by_two(rank: int, name: str, optimizer_name: str, wrapped_for: str) -> Any:
    inner = node_group(rank)
    options: dict[str, Any] = {"process_group": inner} if wrapped_for == "node" else {}
    model = DistributedDataParallel(loops.make_model(), **options)
    optimizer = loops.OPTIMIZERS[optimizer_name](model)
    algorithm = loops.make_algorithm(name, period_of(name, rank))
    sync = attach(model, optimizer, algorithm, weight=WEIGHTS[name][rank], inner=inner)
    trace = []
    for step in range(steps_of(name, rank)):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        trace.append(loops.snapshot(model))
        if step == 3 and name != "asynlocal":  # in the middle of a round, an average in flight
            before = loops.snapshot(model)
            with sync.averaged():
                pass
            assert all(torch.equal(a, b) for a, b in zip(before, loops.snapshot(model), strict=True))
    sync.finish()
    return trace, loops.snapshot(model), sync.stats().rounds


def node_loss(model: nn.Module, xs: Any, ys: Any) -> Tensor:
    """The loss of a node: its workers' losses, weighted inside the node."""
    total = sum(weight for weight, _ in ys)
    return sum((w / total * loops.loss_of(model, x, y) for x, (w, y) in zip(xs, ys, strict=True)), torch.zeros(()))


def serial(name: str, optimizer_name: str) -> reference.Trace:
    """The reference sees each node as one worker on a weighted batch."""
    weights = WEIGHTS[name]
    batches: Any = []
    for node in NODES:
        rows = [[loops.make_batch(i, t) for i in node] for t in range(steps_of(name, node[0]))]
        batches.append([([x for x, _ in r], [(weights[i], y) for i, (_, y) in zip(node, r, strict=True)]) for r in rows])
    sums = [sum(weights[i] for i in node) for node in NODES]
    periods = [period_of(name, node[0]) for node in NODES]
    return reference.run(name, loops.make_model(), loops.OPTIMIZERS[optimizer_name], batches, node_loss, sums, periods)


@pytest.mark.parametrize(
    ("name", "wrapped_for"),
    [("local", "all"), ("local", "node"), ("cocod", "all"), ("cocod", "node"), ("asynlocal", "node")],
)
def test_two_nodes_of_two_equal_the_serial_reference(name: str, wrapped_for: str) -> None:
    for optimizer_name in ("momentum", "adam"):
        results = run_workers(4, two_by_two, name, optimizer_name, wrapped_for)
        expected = serial(name, optimizer_name)
        assert_traces_equal([trace for trace, *_ in results], [expected[rank // 2] for rank in range(4)], name)
        assert len({rounds for *_, rounds in results}) == 1
        for trace, final, _ in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(final, results[0][1], strict=True))
            del trace
        for rank in (0, 2):  # mates are equal to the bit, after every step
            for row, mate in zip(results[rank][0], results[rank + 1][0], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(row, mate, strict=True))


def one_node(rank: int, name: str) -> Any:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    inner = dist.group.WORLD if name != "ssgd" else None
    attach(model, optimizer, loops.make_algorithm(name, 2), weight=rank + 1, inner=inner)
    for step in range(5):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    return loops.snapshot(model)


@pytest.mark.parametrize("name", ["cocod", "local"])
def test_a_single_node_is_ssgd_bit_for_bit(name: str) -> None:
    expected, found = run_workers(2, one_node, "ssgd"), run_workers(2, one_node, name)
    for theirs, ours in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def nodes_of_one(rank: int, uses_nodes: bool) -> Any:
    inner = node_group(rank, [[0], [1]]) if uses_nodes else None
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, CoCoDSGD(2), weight=rank + 1, inner=inner)
    for step in range(5):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    return loops.snapshot(model), sync.stats().bytes


def test_nodes_of_one_worker_are_no_nodes() -> None:
    for (expected, sent), (found, sent_too) in zip(
        run_workers(2, nodes_of_one, False), run_workers(2, nodes_of_one, True), strict=True
    ):
        assert sent == sent_too
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# ------------------------------------------------------------------------------------- buffers, and starts


def with_batch_norm(rank: int, name: str) -> Any:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, loops.make_algorithm(name, 2), weight=WEIGHTS[name][rank], inner=node_group(rank))
    for step in range(3):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    state = {key: value.clone() for key, value in model.module.state_dict().items()}
    with sync.averaged():
        averaged = {key: value.clone() for key, value in model.module.state_dict().items()}
    again = {key: value.clone() for key, value in model.module.state_dict().items()}
    assert all(torch.equal(again[key], state[key]) for key in state)
    return state, averaged


@pytest.mark.parametrize("name", ["cocod", "local"])
def test_buffers_are_averaged_over_all_workers(name: str) -> None:
    """Mates hold equal parameters, but statistics of their own batches."""
    results = run_workers(4, with_batch_norm, name)
    shares = reference.shares(WEIGHTS[name])
    assert not torch.equal(results[0][0]["1.running_mean"], results[1][0]["1.running_mean"])
    for key in ("0.weight", "1.running_mean", "1.running_var"):
        expected = sum(w * state[key] for w, (state, _) in zip(shares, results, strict=True))
        for _, averaged in results:
            torch.testing.assert_close(averaged[key], expected, rtol=1e-12, atol=0)


def different_starts(rank: int) -> Any:
    model = loops.make_model()
    wrapped = DistributedDataParallel(model)
    with torch.no_grad():  # after wrapping, which makes them equal
        for p in model.parameters():
            p.add_(rank)
    start = loops.snapshot(model)
    sync = attach(
        wrapped, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(2), weight=WEIGHTS["cocod"][rank], inner=node_group(rank)
    )
    inside = loops.snapshot(model)
    sync.finish()
    return start, inside, loops.snapshot(model)


def test_workers_that_start_apart_are_brought_to_their_nodes_mean_and_then_to_everybodys() -> None:
    results = run_workers(4, different_starts)
    weights = WEIGHTS["cocod"]
    for rank, (_, inside, final) in enumerate(results):
        mates = NODES[rank // 2]
        share = reference.shares([weights[i] for i in mates])
        for index, value in enumerate(inside):
            expected = sum(w * results[i][0][index] for w, i in zip(share, mates, strict=True))
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-15)
        for index, value in enumerate(final):
            expected = sum(w * results[i][0][index] for i, w in enumerate(reference.shares(weights)))
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-15)


# ---------------------------------------------------------------------------------------- what is communicated


@contextmanager
def recorded(calls: list[Any]) -> Iterator[None]:
    """The group of every collective that Python starts."""
    names = ("all_reduce", "all_gather_into_tensor", "broadcast", "all_gather", "all_gather_object")
    originals = {name: getattr(dist, name) for name in names}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD))
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, wrap(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def counted(rank: int, name: str, wrapped_for: str) -> Any:
    inner = node_group(rank)
    options: dict[str, Any] = {"process_group": inner} if wrapped_for == "node" else {}
    model = DistributedDataParallel(loops.make_model(), **options)
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, loops.make_algorithm(name, 4), inner=inner)
    sync.control.listen()  # what a trainer asks travels at the end of a round, too
    calls: list[list[Any]] = [[] for _ in range(12)]
    with profiled() as profile:
        for step in range(12):
            x, y = loops.make_batch(rank, step)
            with recorded(calls[step]), torch.profiler.record_function(f"step {step}"):
                optimizer.zero_grad()
                loops.loss_of(model, x, y).backward()
                optimizer.step()
        sync.finish()
    return [(calls[step], count) for step, count in enumerate(started_in(profile, 12))]


@pytest.mark.parametrize("wrapped_for", ["all", "node"])
@pytest.mark.parametrize("name", ["cocod", "local"])
def test_inside_a_round_only_mates_communicate(name: str, wrapped_for: str) -> None:
    for rank, rows in enumerate(run_workers(4, counted, name, wrapped_for)):
        for step, (calls, total) in enumerate(rows):
            ends_round = step % 4 == 3
            if step == 1:
                continue  # DDP agrees on the layout of its buckets, once
            assert total == len(calls), f"step {step}: somebody else communicates"
            others = [ranks for ranks in calls if ranks != NODES[rank // 2]]
            assert bool(others) == ends_round, f"step {step}: {calls}"


def sent(rank: int, uses_nodes: bool) -> Any:
    inner = node_group(rank) if uses_nodes else None
    model = DistributedDataParallel(loops.make_model(torch.float32))
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(2), inner=inner)
    for step in range(6):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step, dtype=torch.float32)).backward()
        optimizer.step()
    return sync.stats().bytes, sync.stats().rounds, sum(p.numel() for p in model.parameters())


def test_the_slow_link_carries_the_model_once_a_node() -> None:
    """A payload handed to the link: a model a worker without nodes, a model a node with them."""
    flat, nodes = run_workers(4, sent, False), run_workers(4, sent, True)
    num_parameters = flat[0][2]
    merged = flat[0][1] - 1  # a round's mean is counted when it is taken in; the first is known, the last under way
    payload = 4 * num_parameters * merged
    assert [row[0] for row in flat] == [round(2 * 3 / 4 * payload)] * 4
    # A ring of two nodes: each worker sends its half of the model.
    share, left = num_parameters // 2, num_parameters % 2
    assert [row[0] for row in nodes] == [4 * (share + left) * merged] * 4


# ----------------------------------------------------------------------------------------- going on, reweighting


def stopped(rank: int, stop_at: int | None) -> Any:
    inner = node_group(rank)

    def begin(state: Any) -> tuple[Any, Any, Sync]:
        model = DistributedDataParallel(loops.make_model(), process_group=inner)
        optimizer = loops.OPTIMIZERS["momentum"](model)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        sync = attach(model, optimizer, CoCoDSGD(3), weight=WEIGHTS["cocod"][rank], inner=inner)
        if state is not None:
            sync.load_state_dict(state[2])
        return model, optimizer, sync

    model, optimizer, sync = begin(None)
    for step in range(10):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        if step == 6:
            sync.reweight(WEIGHTS["cocod"][3 - rank])
        if step == stop_at:
            state = model.state_dict(), optimizer.state_dict(), sync.state_dict()
            sync.detach()
            model, optimizer, sync = begin(state)
    stats = sync.stats()
    return loops.snapshot(model), stats.bytes, stats.rounds


def test_a_resumed_run_is_the_run_that_never_stopped_bit_for_bit() -> None:
    for theirs, ours in zip(run_workers(4, stopped, None), run_workers(4, stopped, 4), strict=True):
        assert theirs[1:] == ours[1:]
        assert all(torch.equal(a, b) for a, b in zip(theirs[0], ours[0], strict=True))


def emulated(rank: int, emulates: bool) -> Any:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, CoCoDSGD(2), weight=rank + 1, inner=node_group(rank))
    if emulates:
        sync.control.emulate_link(Link(latency_ms=5))
    for step in range(6):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    sync.finish()
    return loops.snapshot(model), sync.stats().bytes


def test_an_emulated_link_between_nodes_changes_no_bit() -> None:
    for theirs, ours in zip(run_workers(4, emulated, False), run_workers(4, emulated, True), strict=True):
        assert theirs[1] == ours[1]
        assert all(torch.equal(a, b) for a, b in zip(theirs[0], ours[0], strict=True))


def saved_flat(rank: int, folder: str, uses_nodes: bool) -> Any:
    """Models that differ from worker to worker are saved without nodes, and gone on from with them."""
    inner = node_group(rank) if uses_nodes else None
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, CoCoDSGD(5), weight=rank + 1, inner=inner)
    checkpoints = Checkpoints(folder, sync)
    resumed = checkpoints.resume()
    if resumed is None:
        for step in range(3):
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
            optimizer.step()
        checkpoints.save(3)
        return None, loops.snapshot(model)
    return resumed.is_exact, loops.snapshot(model)


def test_a_checkpoint_of_other_nodes_goes_on_from_the_mean(tmp_path: Path) -> None:
    """Workers of a node must hold equal parameters, or averages would mix shares of different models."""
    flat = run_workers(4, saved_flat, str(tmp_path), False)
    shares = reference.shares([1, 2, 3, 4])
    mean = [sum(w * row[1][i] for w, row in zip(shares, flat, strict=True)) for i in range(len(flat[0][1]))]
    for is_exact, values in run_workers(4, saved_flat, str(tmp_path), True):
        assert is_exact is False
        for value, wanted in zip(values, mean, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-15)


def state_of_other_nodes(rank: int) -> None:
    def attached(inner: Any) -> Sync:
        model = DistributedDataParallel(loops.make_model())
        return attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(5), inner=inner)

    state = attached(None).state_dict()
    attached(node_group(rank)).load_state_dict(state)


def test_a_state_of_other_nodes_is_refused() -> None:
    for outcome in run_outcomes(4, state_of_other_nodes):
        assert outcome.error is not None
        assert "[[0, 1], [2, 3]]; use the same inner" in outcome.error[1]


def emulated_once(rank: int) -> bool:
    inner = node_group(rank)
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(2), inner=inner)
    sync.control.emulate_link(Link(latency_ms=5))
    sync.finish()
    sync.detach()
    again = attach(model, optimizer, CoCoDSGD(2), inner=inner)
    comm = again._driver.replica.route.comm
    assert isinstance(comm, TwoLevelComm)
    return isinstance(comm.outer, EmulatedLink)


def test_an_emulated_link_is_gone_after_detach() -> None:
    assert run_workers(4, emulated_once) == [False] * 4


class TwoKinds(nn.Module):
    """Parameters of two dtypes: two buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(6, 5).double(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)).float())
        return out.double()


def static_graph_of_two_kinds(rank: int, uses_nodes: bool) -> Any:
    inner = dist.group.WORLD if uses_nodes else None
    model = DistributedDataParallel(TwoKinds(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, loops.make_algorithm("cocod" if uses_nodes else "ssgd", 2), inner=inner)
    for step in range(4):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    sync.finish()
    return loops.snapshot(model)


@pytest.mark.parametrize("uses_nodes", [False, True])
def test_a_static_graph_with_several_buckets(uses_nodes: bool) -> None:
    """In its first backward DDP calls no bucket the last."""
    first, second = run_workers(2, static_graph_of_two_kinds, uses_nodes, seconds=30)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------------------ bad input


def refused(rank: int, what: str) -> None:
    nodes = [[0, 1], [2]] if what == "unequal" else [[0], [1], [2]]
    inner = node_group(rank, nodes)
    algorithm: Any = {"pipe": PipeSGD(), "period": AsynLocalSGD(rank + 1), "ssgd": loops.make_algorithm("ssgd", 1)}.get(
        what, LocalSGD(2)
    )
    if what == "period":
        inner = dist.group.WORLD
    if what == "asynlocal for all":
        algorithm = AsynLocalSGD(2)
    model = DistributedDataParallel(loops.make_model(), find_unused_parameters=what == "unused")
    if what == "missing" and rank == 1:
        inner = None
    if what == "no group":
        inner = 4
    attach(model, loops.OPTIMIZERS["sgd"](model), algorithm, inner=inner)


REFUSED = {
    "pipe": "PipeSGD reduces gradients over all workers",
    "ssgd": "SSGD reduces gradients over all workers",
    "unequal": "inner: nodes of 1 and of 2 workers; use groups of equal size",
    "missing": "workers differ in inner: rank 1 passes none",
    "period": "the workers of ranks [0, 1, 2] share a node but differ in period",
    "unused": "find_unused_parameters communicates with all workers in every step",
    "asynlocal for all": "use DistributedDataParallel(model, process_group=inner)",
    "no group": "inner=4 is not a process group with this worker",
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_mistake_is_one_clear_line_on_every_worker(what: str) -> None:
    for outcome in run_outcomes(3, refused, what):
        assert outcome.error is not None
        assert REFUSED[what] in outcome.error[1]
        assert "\n" not in outcome.error[1]


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_weights_inside_and_between_nodes_are_those_of_all_workers(num_nodes: int, size: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(num_nodes * size)))
    stated: list[tuple[int, ...]] = [()] * len(order)
    for n in range(num_nodes):
        node = tuple(sorted(order[n * size : (n + 1) * size]))
        for rank in node:
            stated[rank] = node
    weights = data.draw(st.lists(st.integers(1, 500), min_size=len(order), max_size=len(order)))
    for rank in range(len(order)):
        nodes = Nodes.of(stated, rank)
        share = nodes.inside(weights).share * nodes.between(weights).share
        assert share == pytest.approx(weights[rank] / sum(weights), rel=1e-12)
        assert rank in nodes.node_ranks
        assert rank in nodes.peers
        assert len(nodes.peers) == num_nodes
        assert sorted({Nodes.of(stated, peer).index for peer in nodes.peers}) == list(range(num_nodes))
