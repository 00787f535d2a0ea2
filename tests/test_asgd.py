"""A-SGD: the server's rule against a serial reference, real processes, and who is named when one of them is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cocod_accel import ASGD, LocalSGD, Served, attach, serve
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.server import Server
from cocod_accel.averaging.weights import Weights
from cocod_accel.comm.handles import SoloComm
from cocod_accel.comm.in_process import InProcessSpoke
from cocod_accel.sync.driver import Driver
from tests import reference
from tests.loops import loss_of, make_batch, make_model, snapshot
from tests.workers import Outcome, run_outcomes, run_workers

STEPS = 6


def rate(step: int) -> float:
    return 0.1 / (1 + step)


def make_optimizer(model: nn.Module, momentum: float = 0.9, decay: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate(0), momentum=momentum, weight_decay=decay)


def is_server(rank: int) -> bool:
    return rank == dist.get_world_size() - 1


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.param_groups[0]["lr"] = rate(number)
    optimizer.zero_grad()
    loss_of(model, *make_batch(rank, number)).backward()
    optimizer.step()


# ------------------------------------------------------------------------------------------------------ the rule


SCRIPTS = {
    "in turns": [0, 1, 2] * 4,
    "one is fast": [0, 0, 0, 1, 0, 0, 2, 0, 1, 0, 2, 2, 1],
    "one comes late": [0, 1, 0, 1, 2],
}


class Script:
    """Workers and their server in one process; messages are delivered in the order of the script."""

    def __init__(self, algorithm: ASGD, weights: list[float], momentum: float, decay: float) -> None:
        self.model = make_model()
        optimizer = make_optimizer(self.model, momentum, decay)
        n = len(weights)
        self.server = Server(list(self.model.parameters()), [optimizer], n, algorithm.payload, algorithm.bound)
        self.spokes = [InProcessSpoke(rank, n) for rank in range(n)]
        self.workers = []
        for rank in range(n):
            model = make_model()
            own = make_optimizer(model, momentum, decay)
            route = Route(SoloComm(), Weights(tuple(weights), rank), SoloComm(), server=self.spokes[rank])
            driver = Driver(algorithm, list(model.parameters()), list, [own], route)
            driver.start(equal=True)
            self.workers.append((model, own, driver))
        self.bound, self.taken = algorithm.bound, [0] * n

    def run(self, script: list[int]) -> list[list[Tensor]]:
        trace = []
        for rank in script:
            for _ in range(self.bound + 1 - len(self.spokes[rank].letters)):
                self._compute(rank)
            self.server.take_from(self.spokes, rank)
            self.spokes[rank].deliver()
            trace.append(snapshot(self.model))
            self._go_on(rank)
        return trace

    def _compute(self, rank: int) -> None:
        model, optimizer, driver = self.workers[rank]
        number, self.taken[rank] = self.taken[rank], self.taken[rank] + 1
        optimizer.param_groups[0]["lr"] = rate(number)
        loss_of(model, *make_batch(rank, number)).backward()
        driver.method.step_begins()
        optimizer.step()
        driver.attempt()
        driver.launch(0)
        if len(self.spokes[rank].letters) <= self.bound:
            driver.land(0)

    def _go_on(self, rank: int) -> None:
        self.workers[rank][2].land(0)


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.02)])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [32.0, 64.0, 16.0]])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_any_order_of_arrival_is_the_serial_delayed_rule(
    script: list[int], weights: list[float], momentum: float, decay: float, max_staleness: int
) -> None:
    course = Script(ASGD(max_staleness=max_staleness), weights, momentum, decay)
    trace = course.run(script)
    batches = [[make_batch(rank, number) for number in range(len(script))] for rank in range(3)]
    expected, late = reference.served(
        make_model(), script, batches, loss_of, weights, max_staleness, rate=rate, momentum=momentum, decay=decay
    )
    for ours, theirs in zip(trace, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    served = course.server.served
    assert (served.gradients, served.largest_staleness) == (len(script), max(late))
    assert served.staleness == pytest.approx(sum(late) / len(late))


# ------------------------------------------------------------------------------------------------ real processes


def train_alone() -> list[Tensor]:
    model = make_model(torch.float32)
    optimizer = make_optimizer(model)
    for number in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(number)
        optimizer.zero_grad()
        loss_of(model, *make_batch(0, number, dtype=torch.float32)).backward()
        optimizer.step()
    return snapshot(model)


def one_worker(rank: int) -> Any:
    model = make_model(torch.float32)
    optimizer = make_optimizer(model)
    if is_server(rank):
        return serve(model, optimizer, ASGD(max_staleness=0)), snapshot(model)
    with attach(model, optimizer, ASGD(max_staleness=0)) as sync:
        for number in range(STEPS):
            optimizer.param_groups[0]["lr"] = rate(number)
            optimizer.zero_grad()
            loss_of(model, *make_batch(0, number, dtype=torch.float32)).backward()
            optimizer.step()
        stepped = snapshot(model)
        sync.finish()
    return stepped, snapshot(model), sync.stats()


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_one_worker_that_waits_is_plain_sgd_to_the_bit() -> None:
    (stepped, finished, stats), (served, held) = run_workers(2, one_worker)
    expected = train_alone()
    assert equal(stepped, expected)
    assert equal(finished, expected)
    assert equal(held, expected)
    size = 4 * sum(tensor.numel() for tensor in expected)
    assert (stats.staleness, stats.largest_staleness, stats.rounds, stats.bytes) == (0, 0, STEPS, STEPS * size)
    assert served == Served(STEPS, 0.0, 0, 2 * STEPS * size)
    assert stats.server_bytes == 2 * STEPS * size
    assert stats.exposed_seconds > 0


def in_order(rank: int, script: list[int], weights: list[float]) -> Any:
    """Workers compute at once, and send when it is their turn."""
    model = make_model()
    optimizer = make_optimizer(model)
    if is_server(rank):
        return serve(model, optimizer, ASGD(max_staleness=0)), snapshot(model)
    store = dist.distributed_c10d._get_default_store()
    sync = attach(model, optimizer, ASGD(max_staleness=0), weight=weights[rank])
    models = []
    for number, turn in enumerate(turn for turn, who in enumerate(script) if who == rank):
        optimizer.param_groups[0]["lr"] = rate(number)
        optimizer.zero_grad()
        loss_of(model, *make_batch(rank, number)).backward()
        if turn > 0:
            store.wait([f"turn {turn}"])
        optimizer.step()
        models.append((turn, snapshot(model)))
        store.set(f"turn {turn + 1}", "")
    with sync.averaged():
        held = snapshot(model)
    sync.detach()
    return models, held


def test_real_workers_in_a_scripted_order_are_the_serial_delayed_rule() -> None:
    script, weights = SCRIPTS["one is fast"], [32.0, 64.0, 16.0]
    *workers, (served, final) = run_workers(4, in_order, script, weights)
    batches = [[make_batch(rank, number) for number in range(len(script))] for rank in range(3)]
    expected, late = reference.served(
        make_model(), script, batches, loss_of, weights, 0, rate=rate, momentum=0.9, decay=0.02
    )
    for models, held in workers:
        for turn, ours in models:
            for a, b in zip(ours, expected[turn], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert equal(held, final)
    assert (served.largest_staleness, served.gradients) == (max(late), len(script))
    assert served.staleness == pytest.approx(sum(late) / len(late))


class WithBuffers(nn.Module):
    """A model whose buffer is another on each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.mean: Tensor
        self.mean.copy_(y.detach().mean(0))
        return y


def freely(rank: int, max_staleness: int | None, payload: str) -> Any:
    torch.manual_seed(rank)
    model = WithBuffers()
    if rank == 0:
        next(model.parameters()).data.add_(1)
    optimizer = make_optimizer(model)
    algorithm = ASGD(max_staleness=max_staleness, payload=payload)
    if is_server(rank):
        return serve(model, optimizer, algorithm), snapshot(model)
    sync = attach(model, optimizer, algorithm, weight=rank + 1)
    begun = snapshot(model)
    for number in range(STEPS):
        step(model, optimizer, rank, number)
    before, own = snapshot(model), model.mean.clone()
    with sync.averaged():
        within, mean = snapshot(model), model.mean.clone()
    assert equal(before, snapshot(model))
    assert torch.equal(own, model.mean)
    step(model, optimizer, rank, STEPS)
    sync.finish()
    finished = snapshot(model)
    sync.finish()
    assert equal(finished, snapshot(model))
    stats = sync.stats()
    sync.detach()
    optimizer.zero_grad()
    loss_of(model, *make_batch(rank, 0)).backward()
    optimizer.step()
    assert not equal(finished, snapshot(model)), "after detach the optimizer steps here again"
    return begun, within, mean, own, finished, stats


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize(("max_staleness", "payload"), [(0, "fp32"), (1, "int8"), (3, "fp32"), (None, "topk:0.5")])
def test_real_workers_end_with_the_servers_model(num_workers: int, max_staleness: int | None, payload: str) -> None:
    *workers, (served, held) = run_workers(num_workers + 1, freely, max_staleness, payload)
    assert served.gradients == num_workers * (STEPS + 1)
    start = snapshot(WithBuffers())
    bound = 16 if max_staleness is None else max_staleness
    weights = torch.arange(1.0, num_workers + 1, dtype=torch.float64)
    own_means = torch.stack([own for _, _, _, own, _, _ in workers])
    expected = (weights.unsqueeze(1) * own_means).sum(0) / weights.sum()
    for begun, within, mean, _, finished, stats in workers:
        assert equal(begun, start), "all begin with the server's model"
        assert equal(within, workers[0][1])
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)
        assert equal(finished, held)
        # Of each other worker at most what it may have under way, and what it sends in the meantime.
        assert 0 <= stats.staleness <= stats.largest_staleness <= served.largest_staleness
        assert stats.server_bytes == served.bytes
    assert served.largest_staleness >= min(bound, num_workers - 1) or num_workers > 1
    assert served.largest_staleness <= num_workers * (STEPS + 1)
    if num_workers == 1:
        assert served.largest_staleness <= bound


def with_an_own_pace(rank: int) -> Any:
    """Bytes of coded gradients, a new weight, and gradients that are clipped, accumulated or dropped."""
    model = make_model()
    optimizer = make_optimizer(model)
    algorithm = ASGD(max_staleness=0, payload="int8")
    if is_server(rank):
        return serve(model, optimizer, algorithm)
    with attach(model, optimizer, algorithm) as sync:
        loss_of(model, *make_batch(rank, 0)).backward()
        optimizer.zero_grad()  # dropped: an attempt without a gradient
        step(model, optimizer, rank, 1)
        sync.reweight(rank + 1)
        optimizer.zero_grad()
        for number in (2, 3):
            loss_of(model, *make_batch(rank, number)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        return sync.stats(), sync.weight


def test_codes_weights_and_what_loops_do() -> None:
    (first, _), (second, weight), served = run_workers(3, with_an_own_pace)
    assert served.gradients == 4
    assert weight == 2
    # Two blocks of the 53 numbers would be too many: one, of 53 bytes and its scale, up to a multiple of 8.
    assert 2 * 57 <= first.bytes == second.bytes <= 2 * 64


def with_a_closure(rank: int) -> str:
    model = make_model()
    optimizer = make_optimizer(model)
    if is_server(rank):
        serve(model, optimizer, ASGD())
        return ""
    sync = attach(model, optimizer, ASGD())
    said = "accepted"
    try:
        optimizer.step(lambda: float(loss_of(model, *make_batch(0, 0))))
    except RuntimeError as error:
        said = str(error)
    sync.detach()
    return said


def test_a_closure_is_refused() -> None:
    assert "optimizer.step(closure) computes gradients inside the step" in run_workers(2, with_a_closure)[0]


# ------------------------------------------------------------------------------------------------- states


def stop_and_go(rank: int, max_staleness: int, is_stopped: bool) -> Any:
    algorithm = ASGD(max_staleness=max_staleness)

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model()
        return model, make_optimizer(model)

    if is_server(rank):
        model, optimizer = start()
        serve(model, optimizer, algorithm)
        if is_stopped:
            model, optimizer = start()
            serve(model, optimizer, algorithm)
        return snapshot(model), optimizer.state_dict()["state"]
    model, optimizer = start()
    sync = attach(model, optimizer, algorithm)
    for number in range(3):
        step(model, optimizer, rank, number)
    state, held = sync.state_dict(), model.state_dict()
    if is_stopped:
        sync.detach()
        model, optimizer = start()
        sync = attach(model, optimizer, algorithm)
        model.load_state_dict(held)
        sync.load_state_dict(state)
    for number in range(3, STEPS):
        step(model, optimizer, rank, number)
    sync.finish()
    sync.detach()
    return snapshot(model), sync.stats().rounds


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_one_worker_goes_on_bit_for_bit_from_a_state(max_staleness: int) -> None:
    (ours, rounds), (held, momentum) = run_workers(2, stop_and_go, max_staleness, True)
    (theirs, _), (_, expected) = run_workers(2, stop_and_go, max_staleness, False)
    assert equal(ours, theirs)
    assert equal(held, theirs)
    assert rounds == STEPS
    for index, state in expected.items():
        assert torch.equal(momentum[index]["momentum_buffer"], state["momentum_buffer"])


def test_two_workers_go_on_from_the_servers_state() -> None:
    (first, _), (second, _), (held, momentum) = run_workers(3, stop_and_go, 1, True)
    assert equal(first, held)
    assert equal(second, held)
    assert len(momentum) == len(held)


# -------------------------------------------------------------------------------------------------- faults


def with_a_fault(rank: int, culprit: int, fault: str, folder: str) -> Any:
    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)  # what a watchdog says
    model = make_model()
    optimizer = make_optimizer(model)
    begin = time.monotonic()

    def fails() -> None:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ValueError("of its own")

    try:
        if is_server(rank):
            if culprit == rank:
                signal.signal(signal.SIGALRM, lambda *_: fails())
                signal.setitimer(signal.ITIMER_REAL, 1.0)
            serve(model, optimizer, ASGD())
        else:
            with attach(model, optimizer, ASGD()) as sync:
                if fault == "frozen":
                    sync.watch(frozen_seconds=3)
                for number in range(100_000):
                    if rank == culprit and number == 5:
                        fails()
                    step(model, optimizer, rank, number)
    except BaseException as error:
        raise RuntimeError(f"{time.monotonic() - begin:.1f} s: {type(error).__name__}: {error}") from error


def outcomes_of(culprit: int, fault: str, folder: Path) -> list[Outcome]:
    """How all others ended."""
    outcomes = run_outcomes(3, with_a_fault, culprit, fault, str(folder), fresh=True, seconds=40)
    return [outcome for outcome in outcomes if outcome.rank != culprit]


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("fault", ["killed", "fails"])
def test_whoever_is_gone_is_named_by_all_others(culprit: int, fault: str, tmp_path: Path) -> None:
    others = outcomes_of(culprit, fault, tmp_path)
    for outcome in others:
        assert outcome.error is not None
        assert f"rank {culprit}" in outcome.error[1], outcome.error[1]
        assert "has left" in outcome.error[1]
        assert float(outcome.error[1].split()[0]) < 12
        if fault == "fails":
            assert "of its own" in outcome.error[1]


@pytest.mark.alone
@pytest.mark.parametrize("culprit", [1, 2])
def test_whoever_freezes_is_named_and_ended(culprit: int, tmp_path: Path) -> None:
    others = outcomes_of(culprit, "frozen", tmp_path)
    assert all(outcome.error is not None for outcome in others)
    name = "the server" if culprit == 2 else f"worker {culprit}"
    said = "".join(path.read_text() for path in tmp_path.iterdir())
    assert f"error: {name} has not responded for" in said


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"max_staleness": -1}, "max_staleness=-1 must be at least 0; use 0 to wait for every answer, or None for no bound"),
        ({"max_staleness": 1.5}, "max_staleness=1.5 is not an int"),
        ({"max_staleness": True}, "max_staleness=True is not an int"),
        ({"payload": "int7"}, "payload='int7'"),
        ({"period": 5}, "unexpected keyword argument 'period'"),
        ({"fragments": 2}, "unexpected keyword argument 'fragments'"),
    ],
)
def test_bad_options_are_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        ASGD(**arguments)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_single_process_has_no_server() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="there is no process for the server, because this is the only one"):
        attach(model, make_optimizer(model), ASGD())
    with pytest.raises(ValueError, match="there is no process for the server, because this is the only one"):
        serve(model, make_optimizer(model), ASGD())


def badly(rank: int, how: str) -> str:
    model = make_model()
    optimizer = make_optimizer(model)
    algorithm: Any = ASGD()
    serves, weight = is_server(rank), 1.0
    options: dict[str, Any] = {}
    if how == "no server":
        serves = False
    elif how == "two servers":
        serves = True
    elif how == "inner":
        options = {"inner": dist.group.WORLD}
    elif how == "offload":
        options = {"offload": "cpu"}
    elif how == "optimizer" and serves:
        optimizer = torch.optim.Adam(model.parameters())
    elif how == "options" and serves:
        algorithm = ASGD(max_staleness=2)
    elif how == "weight" and rank == 0:
        weight = -1.0
    elif how == "other":
        algorithm, model = LocalSGD(period=2), nn.parallel.DistributedDataParallel(model)
    try:
        if serves:
            serve(model, optimizer, algorithm)
        else:
            attach(model, optimizer, algorithm, weight=weight, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("no server", "there is no process for the server: rank 2, the last one, called attach(); start one process more"),
        ("two servers", "rank 0 called serve(), but the server is the last rank, 2"),
        ("inner", "inner is for algorithms that average models between nodes"),
        ("offload", "offload"),
        ("optimizer", "the optimizers differ: rank 2 has"),
        ("options", "workers differ in max_staleness: rank 0 has 1, rank 2 has 2"),
        ("weight", "weight=-1.0 is not positive"),
        ("other", "serve() is for ASGD, and LocalSGD has no server"),
    ],
)
def test_bad_set_ups_are_one_line_on_all(how: str, line: str) -> None:
    for found in run_workers(3, badly, how):
        assert line in found
        assert "\n" not in found


def test_it_is_shown_as_it_was_made() -> None:
    assert repr(ASGD()) == "ASGD()"
    assert repr(ASGD(max_staleness=None, payload="int8")) == "ASGD(payload='int8', max_staleness=None)"
