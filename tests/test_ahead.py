"""On a device that works ahead of its host: nothing is read or written too early, and nothing waits that need not."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.accelerator import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import SSGD, AsynLocalSGD, CoCoDSGD, LocalSGD, Outer, PipeSGD, attach
from cocod_accel.algorithms import Algorithm
from cocod_accel.averaging.weights import mean_
from cocod_accel.comm.emulated import Link
from cocod_accel.comm.groups import TorchComm, default_group, node_group, private_group
from cocod_accel.comm.meeting import TransferError
from cocod_accel.config.loading import load_training_config
from cocod_accel.plan import measure
from cocod_accel.runs import clock as clocks
from cocod_accel.runs.spans import read_spans
from cocod_accel.tasks import build_model, build_task
from cocod_accel.trainer import pace as pacing
from cocod_accel.trainer.pace import Pace
from cocod_accel.trainer.resume_policy import Place
from cocod_accel.trainer.steps import LossGuard, NonFiniteLossError
from cocod_accel.trainer.trainer import Trainer
from tests.ahead import Rig, ahead
from tests.workers import run_workers

STEPS = 11
#: Fewer than the averages whose headers may be unread.
FEW = 8
ALGORITHMS: dict[str, Algorithm] = {
    "ssgd": SSGD(),
    "ssgd ternary": SSGD(payload="ternary"),
    "ssgd qsgd": SSGD(payload="qsgd:4"),
    "pipe": PipeSGD(),
    "pipe int8": PipeSGD(payload="int8"),
    "pipe terngrad": PipeSGD(payload="terngrad"),
    "local": LocalSGD(3),
    "local DiLoCo": LocalSGD(3, outer=Outer(0.7, 0.9, nesterov=True), fragments=2),
    "asynlocal": AsynLocalSGD(3),
    "cocod": CoCoDSGD(3),
    "cocod k=1": CoCoDSGD(1),
    "cocod delay": CoCoDSGD(3, delay=1, own_share=0.5),
    "cocod fragments": CoCoDSGD(4, fragments=3, payload="int4"),
    **{f"cocod k=1 {code}": CoCoDSGD(1, payload=code) for code in ("bf16", "int8", "int4", "ternary", "topk:0.1")},
}


def wrapped(inner: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    model = DistributedDataParallel(module, process_group=inner)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def begin(algorithm: Algorithm, rank: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    inner = options.get("inner")
    model, optimizer = wrapped(inner)
    weight = 1 if isinstance(algorithm, AsynLocalSGD) or inner is not None else rank + 1
    return model, optimizer, attach(model, optimizer, algorithm, weight=weight, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, rig: Rig | None = None) -> None:
    for inputs in batches:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if rig is not None:
            rig.compute(0.010)
        optimizer.step()


def trained(rank: int, names: list[str], *, runs_ahead: bool, nodes: bool) -> list[torch.Tensor]:
    found = []
    for name in names:
        model, optimizer, sync = begin(ALGORITHMS[name], rank, **({"inner": node_group(2)} if nodes else {}))
        torch.manual_seed(rank)
        batches = torch.randn(STEPS, 8, 6)
        with ahead(Rig()) if runs_ahead else contextlib.nullcontext():
            train(model, optimizer, batches[:7])
            with sync.averaged():
                model(batches[0])
            train(model, optimizer, batches[7:])
            sync.finish()
        sync.detach()
        found.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    return found


def both(rank: int, names: list[str], nodes: bool) -> list[bool]:
    blocking, running = (trained(rank, names, runs_ahead=runs_ahead, nodes=nodes) for runs_ahead in (False, True))
    return [torch.equal(one, other) for one, other in zip(blocking, running, strict=True)]


@pytest.mark.parametrize(
    ("num_workers", "names"),
    [(2, list(ALGORITHMS)), (3, ["ssgd", "pipe int8", "local DiLoCo", "cocod delay", "cocod fragments"])],
    ids=["2", "3"],
)
def test_every_algorithm_ends_with_the_same_bits(num_workers: int, names: list[str]) -> None:
    for same in run_workers(num_workers, both, names, False, fresh=True):
        assert dict(zip(names, same, strict=True)) == dict.fromkeys(names, True)


def test_so_do_nodes() -> None:
    names = ["local", "cocod", "cocod k=1 ternary", "cocod fragments"]
    for same in run_workers(4, both, names, True, fresh=True):
        assert dict(zip(names, same, strict=True)) == dict.fromkeys(names, True)


def forgetful(rank: int) -> str:
    """A mean is merged before it has come."""
    model, optimizer, sync = begin(CoCoDSGD(1), rank)
    batches = torch.randn(2, 8, 6)
    rig = Rig(orders=False)
    said = "nothing"
    with ahead(rig):
        rig.gate.clear()
        try:
            train(model, optimizer, batches)
            sync.state_dict()
        except TransferError as error:
            said = str(error)
        finally:
            rig.gate.set()
    sync.detach()
    return said


def test_an_order_that_is_missing_shows() -> None:
    assert all("at the same step" in said for said in run_workers(2, forgetful, fresh=True))


def costs(rank: int) -> list[tuple[float, float, list[str]]]:
    found = []
    for transfer, algorithm in (
        (0.004, CoCoDSGD(1)),
        (0.025, CoCoDSGD(1)),
        (0.004, LocalSGD(2)),
        (0.003, CoCoDSGD(1, payload="ternary")),
    ):
        model, optimizer, sync = begin(algorithm, rank)
        batches = torch.randn(FEW, 8, 6)
        rig = Rig(transfer)
        with ahead(rig):
            train(model, optimizer, batches, rig)
            reads = list(rig.reads)
            stats = sync.stats()
        sync.detach()
        found.append((stats.exposed_seconds, stats.hidden_seconds, reads))
    return found


def test_what_communication_costs_is_what_the_device_saw() -> None:
    """Steps of 10 ms: a transfer of 4 ms is hidden, one of 25 ms blocks 15 ms a round; blocking ones block."""
    for rank_found in run_workers(2, costs, fresh=True):
        (hidden, long, blocking, coded) = rank_found
        rounds = FEW - 1  # the last mean is in flight
        assert hidden[:2] == (pytest.approx(0, abs=1e-6), pytest.approx(0.004 * rounds, rel=1e-3))
        assert long[:2] == (pytest.approx(0.015 * rounds, rel=1e-3), pytest.approx(0.010 * rounds, rel=1e-3))
        assert blocking[:2] == (pytest.approx(0.004 * (FEW // 2), rel=1e-3), pytest.approx(0, abs=1e-6))
        # Both stages of a coded average are hidden.
        assert coded[0] == pytest.approx(0, abs=1e-6)
        assert coded[1] == pytest.approx(0.006 * rounds, rel=1e-3)
        # The host waits in no step and at no round's end.
        assert [reads for _, _, reads in rank_found] == [[]] * 4


def paced(rank: int) -> bool:
    """A step is timed while an average is under way that ends only after it."""
    model, optimizer, sync = begin(CoCoDSGD(1), rank)
    batches = torch.randn(1, 8, 6)
    pace = Pace(is_on=True, device=torch.device("cpu"))
    rig = Rig()
    with ahead(rig):
        rig.gate.clear()
        train(model, optimizer, batches[:1])
        opener = threading.Timer(8.0, rig.gate.set)
        opener.start()
        pace.begin(sync.control.blocked_seconds)
        pace.end(sync.control.blocked_seconds)
        is_under_way = not rig.gate.is_set()
        opener.cancel()
        rig.gate.set()
    sync.detach()
    return is_under_way


def test_timing_a_step_does_not_wait_for_the_average_beside_it() -> None:
    assert run_workers(2, paced, fresh=True) == [True, True]


class _Clock:
    """The rig's, in the place of the module ``time``."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def perf_counter(self) -> float:
        return self._rig.host_milliseconds / 1e3

    def sleep(self, seconds: float) -> None:
        self._rig.host_milliseconds += 1e3 * seconds + 1e-9  # whatever rounding does, the time has come


def steps_with_and_without_pace(rank: int) -> list[float]:
    """What the device takes for steps of 10 ms beside transfers of 8 ms."""
    found = []
    for is_on in (False, True):
        model, optimizer, sync = begin(CoCoDSGD(1), rank)
        rig = Rig(0.008)
        pace_of_step = Pace(is_on=is_on, device=torch.device("cpu"))
        with ahead(rig), pytest.MonkeyPatch.context() as patch:
            patch.setattr(pacing, "time", _Clock(rig))
            for inputs in torch.randn(6, 8, 6):
                pace_of_step.begin(sync.control.blocked_seconds)
                train(model, optimizer, [inputs], rig)
                pace_of_step.end(sync.control.blocked_seconds)
            rig.current.synchronize()
            found.append(rig.current.milliseconds)
        sync.detach()
        if is_on:
            assert pace_of_step.seconds == pytest.approx([0.010] * 6, rel=1e-3)
    return found


def test_timing_steps_does_not_make_them_longer() -> None:
    for found in run_workers(2, steps_with_and_without_pace, fresh=True):
        assert found == pytest.approx([60.0, 60.0], rel=1e-3)


SLOWED = {"ssgd": 0.024, "pipe": 0.020, "local": 0.022, "cocod": 0.020, "asynlocal": 0.022}


def slowed(rank: int) -> dict[str, tuple[list[float], float]]:
    """Steps of 10 ms, worker 1 slowed down to 20 ms, transfers of 4 ms: each worker's computing, and what a step takes."""
    found = {}
    algorithms = (SSGD(), PipeSGD(), LocalSGD(2), CoCoDSGD(2), AsynLocalSGD(2))
    for algorithm in algorithms:
        model, optimizer, sync = begin(algorithm, rank)
        rig = Rig(0.004)
        pace_of_step = Pace(is_on=True, slowdown=1.0 + rank, device=torch.device("cpu"))
        blocked, ends = sync.control.blocked_seconds, []
        with ahead(rig), pytest.MonkeyPatch.context() as patch:
            patch.setattr(pacing, "time", _Clock(rig))
            for inputs in torch.randn(8, 8, 6):
                pace_of_step.begin(blocked)
                optimizer.zero_grad()
                rig.compute(0.010)
                model(inputs).square().mean().backward()
                optimizer.step()
                pace_of_step.end(blocked)
                ends.append(rig.host_milliseconds / 1e3)
        sync.detach()
        found[algorithm.name] = pace_of_step.seconds, (ends[6] - ends[2]) / 4
    return found


def test_a_worker_is_slowed_down_under_every_algorithm() -> None:
    """What it waits for is not computing, and is not stretched; whoever blocks waits for it."""
    for rank, found in enumerate(run_workers(2, slowed, fresh=True)):
        for name, (seconds, step) in found.items():
            assert seconds == pytest.approx([0.010 * (1 + rank)] * 8, rel=1e-3), name
            if rank == 1:
                assert step == pytest.approx(SLOWED[name], rel=1e-3), name


class _Beside:
    """A link whose transfers take half of the device."""

    def __init__(self, rig: Rig) -> None:
        self._comm, self._rig, self.busy_until = TorchComm(private_group(default_group())), rig, 0.0

    def launch(self, tensors: Any) -> Any:
        self.busy_until = max(self.busy_until, self._rig.host_milliseconds) + 1e3 * self._rig.transfer_seconds
        return self._comm.launch(tensors)


def interfered(rank: int, share: float) -> float:
    rig = Rig(0.020)
    comm: Any = _Beside(rig)
    with ahead(rig), pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "time", _Clock(rig))
        link = measure._Link(comm, torch.device("cpu"))
        return link.interference(lambda: rig.compute(0.010, comm.busy_until, share), 100, 0.010, 0.020, 1.0)


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_interference_is_found(share: float) -> None:
    """A wait for the whole device would put the transfers into the time of the steps before and after them."""
    for found in run_workers(2, interfered, share, fresh=True):
        assert found == pytest.approx(share, abs=0.05)


def divided(rank: int) -> tuple[bool, bool]:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    exact = values / 3
    ours, theirs = values.clone(), values.clone()
    with ahead(Rig(reciprocals=True)):
        mean_(ours, 3.0)
        theirs.div_(3.0)
    return torch.equal(ours, exact), torch.equal(theirs, exact)


def test_a_mean_is_divided_where_a_division_by_a_number_is_not() -> None:
    assert run_workers(1, divided, fresh=True) == [(True, False)]


def blocked(rank: int) -> list[float]:
    """What Pace is told that communication has blocked, step by step, for steps of 10 ms and transfers of 5 ms."""
    model, optimizer, sync = begin(SSGD(), rank)
    told: list[float] = []
    rig = Rig(0.005)
    with ahead(rig):
        for inputs in torch.randn(4, 8, 6):
            train(model, optimizer, [inputs], rig)
            rig.current.synchronize()
            told.append(sync.control.blocked_seconds())
    sync.detach()
    return told


def test_waiting_for_gradients_is_told_from_computing() -> None:
    for told in run_workers(2, blocked, fresh=True):
        assert told == pytest.approx([0.005, 0.010, 0.015, 0.020], rel=1e-3)


def beside_nodes(rank: int) -> tuple[float, list[str]]:
    """A long transfer between nodes, and gradients inside them that must not wait for it."""
    model, optimizer, sync = begin(CoCoDSGD(3), rank, inner=node_group(2))
    rig = Rig()
    rig.seconds_of[sync._driver.replica.route.comm.outer.group] = 0.025
    with ahead(rig):
        train(model, optimizer, torch.randn(5, 8, 6), rig)
        reads = list(rig.reads)
        cost = sync.control.blocked_seconds()
    sync.detach()
    return cost, reads


def test_gradients_inside_a_node_do_not_wait_for_an_average_between_nodes() -> None:
    for cost, reads in run_workers(4, beside_nodes, fresh=True):
        assert cost == pytest.approx(0, abs=1e-6)
        assert reads == []


#: Where the host waits for what was computed a round ago, if it is that far ahead.
OLD = ("averaging/header.py:_read_first", "trainer/steps.py:check")


def asked(rank: int) -> tuple[list[tuple[int, bool, bool]], list[str]]:
    """Worker 1 asks all to save at step 3, and to stop at step 6."""
    model, optimizer, sync = begin(CoCoDSGD(2), rank)
    guard = LossGuard(rank)
    agreed: list[tuple[int, bool, bool]] = []
    rig = Rig()
    with ahead(rig):
        sync.control.listen()
        sync.control.guard = lambda: guard.check(sync.attempts)
        for step, inputs in enumerate(torch.randn(14, 8, 6), start=1):
            train(model, optimizer, [inputs], rig)
            guard.note(inputs.new_full((), 0.5))
            if rank == 1 and step in (3, 6):
                sync.control.request(save=step == 3, stop=step == 6)
            wishes = sync.control.agreed()
            if wishes.stop or wishes.save:
                agreed.append((step, wishes.stop, wishes.save))
                if wishes.stop:
                    break
        reads = list(rig.reads)
    sync.detach()
    return agreed, [read for read in reads if read not in OLD]


def test_votes_are_agreed_at_one_step_without_waiting_for_the_device() -> None:
    """A vote of step 3 travels from 4 to 6, and counts on a device one round later."""
    assert run_workers(2, asked, fresh=True) == [([(8, False, True), (12, True, False)], [])] * 2


#: Where the built-in trainer waits at the end of an epoch, if it does not end with a round.
AT_AN_EPOCHS_END = "trainer/steps.py:check_finite"
#: At both ends: the clock.
AT_AN_EPOCHS_ENDS = ("runs/clock.py:start", "runs/clock.py:stop")
#: The simulation takes every tensor for the device's; these are the host's.
ON_THE_HOST = ("sharding/", "tasks/data.py")


def trainer_of(rank: int, folder: str, options: list[str]) -> Trainer:
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # as a launcher does
    small = ["task.name=synthetic", "task.args={num_train: 96, num_test: 8, size: 4}", "model.name=mlp", "batch_size=4"]
    run = ["cluster.num_workers=2", "logging.every_steps=1000", "schedule.epochs=1"]
    config = load_training_config([*small, *run, *options])
    task = build_task(config)
    path = Path(folder) / str(rank)
    path.mkdir()
    trainer = Trainer(config, task, build_model(config, task), Accelerator(cpu=True), Place(path))
    trainer.recorder.start_bar()
    return trainer


def an_epoch(rank: int, folder: str, options: list[str]) -> tuple[list[str], int]:
    """An epoch of the trainer itself, on a device that works ahead."""
    trainer = trainer_of(rank, folder, options)
    rig = Rig(0.001)
    with ahead(rig):
        trainer._train_epoch(0)
        reads = [read for read in rig.reads if not read.startswith(ON_THE_HOST)]
    trainer.sync.detach()
    return reads, trainer.step


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        (["algorithm.period=5"], [AT_AN_EPOCHS_END]),
        (["algorithm.name=local", "algorithm.period=2"], []),
        (["algorithm.name=ssgd", "algorithm.payload=int8"], []),
    ],
    ids=["cocod", "local", "ssgd"],
)
def test_an_epoch_of_the_trainer_waits_in_no_step(options: list[str], waits: list[str], tmp_path: Path) -> None:
    """Nor at a round's end, except for what it asked at the one before."""
    for reads, steps in run_workers(2, an_epoch, str(tmp_path), options, fresh=True):
        assert steps == 12
        assert [read for read in reads if read not in (*OLD, *AT_AN_EPOCHS_ENDS)] == waits
        assert all(reads.count(end) <= 1 for end in AT_AN_EPOCHS_ENDS)


def an_epochs_times(rank: int, folder: str) -> tuple[float, dict[str, list[float]]]:
    """Of an epoch of the trainer with steps of 10 ms and blocking averages of 4 ms: its clock, and its spans."""
    trainer = trainer_of(rank, folder, ["algorithm.name=local", "algorithm.period=2", "logging.spans=true"])
    worker, rig = trainer.worker, Rig(0.004)
    loss = worker.loss

    def slow_loss(batch: Any) -> torch.Tensor:
        rig.compute(0.010)
        return loss(batch)

    worker.loss = slow_loss  # type: ignore[method-assign]
    with ahead(rig), pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "time", _Clock(rig))
        trainer._train_epoch(0)
        patch.undo()
        trainer.recorder.write_spans()
    trainer.sync.detach()
    lengths: dict[str, list[float]] = {}
    for span in read_spans(Path(folder) / str(rank)):
        lengths.setdefault(span.name, []).append(span.end - span.start)
    return worker.clock.seconds, lengths


def test_the_trainer_tells_the_devices_times(tmp_path: Path) -> None:
    """The host has told the device the whole epoch in no time."""
    for seconds, spans in run_workers(2, an_epochs_times, str(tmp_path), fresh=True):
        assert seconds == pytest.approx(12 * 0.010 + 6 * 0.004, rel=1e-3)
        assert spans["compute"] == pytest.approx([0.010, 0.014] * 6, rel=1e-2)
        assert spans["wait"] == pytest.approx([0.004] * 6, rel=1e-2)


def not_finite(rank: int) -> tuple[int, list[str]]:
    guard = LossGuard(rank)
    rig = Rig()
    with ahead(rig):
        step = 0
        try:
            for step in range(1, 9):
                guard.note(torch.full((), math.nan if step == 3 else 0.5))
                if step % 2 == 0:
                    guard.check(step)
        except NonFiniteLossError as error:
            return step, [str(error), *(read for read in rig.reads if read not in OLD)]
    return 0, []


def test_a_loss_that_is_not_finite_is_told_a_round_later() -> None:
    found = "worker 0: the loss is not finite at step 3; lower the learning rate"
    assert run_workers(1, not_finite, fresh=True) == [(6, [found])]


OFFLOADED = ["local", "local DiLoCo", "cocod", "cocod delay", "cocod fragments", "cocod k=1 int8", "cocod k=1 topk:0.1"]


def offloaded(rank: int, names: list[str]) -> list[tuple[bool, bool, list[str]]]:
    """Whether a run ends with the bits of one that keeps everything, on a CPU and on a device that works ahead."""
    with pytest.MonkeyPatch.context() as patch:  # several segments and tiles
        patch.setattr("cocod_accel.averaging.flat._CPU_SEGMENT_BYTES", 256)
        patch.setattr("cocod_accel.averaging.coder._CPU_TILE", 64)
        return runs_offloaded(rank, names)


def runs_offloaded(rank: int, names: list[str]) -> list[tuple[bool, bool, list[str]]]:
    found = []
    for name in names:
        ends: list[torch.Tensor] = []
        reads: list[str] = []
        for offload, is_ahead in ((None, False), ("cpu", False), ("cpu", True)):
            model, optimizer, sync = begin(ALGORITHMS[name], rank, offload=offload)
            torch.manual_seed(rank)
            batches = torch.randn(STEPS, 8, 6)
            rig = Rig()
            with ahead(rig) if is_ahead else contextlib.nullcontext():
                train(model, optimizer, batches[:5])
                if is_ahead:
                    reads += rig.reads
                with sync.averaged():
                    model(batches[0])
                state = sync.state_dict()
                train(model, optimizer, batches[5:7])
                sync.load_state_dict(state)
                train(model, optimizer, batches[7:])
                sync.finish()
            sync.detach()
            ends.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
        found.append((torch.equal(ends[0], ends[1]), torch.equal(ends[0], ends[2]), reads))
    return found


def test_what_waits_on_the_host_changes_no_bit() -> None:
    """Nor does the host wait for it in a step."""
    for found in run_workers(2, offloaded, OFFLOADED, fresh=True):
        assert dict(zip(OFFLOADED, found, strict=True)) == dict.fromkeys(OFFLOADED, (True, True, []))


def emulated(rank: int) -> list[str]:
    """What an emulated link waits for, and whether anything else does."""
    model, optimizer, sync = begin(CoCoDSGD(1), rank)
    sync.control.emulate_link(Link(latency_ms=1.0))
    seen: list[str] = []
    rig = Rig()
    with ahead(rig), pytest.MonkeyPatch.context() as patch:
        patch.setattr("cocod_accel.comm.emulated.wait_for_stream", lambda device: seen.append("stream"))
        train(model, optimizer, torch.randn(4, 8, 6), rig)
    sync.detach()
    return seen


def test_an_emulated_link_waits_for_computing_before_it_looks_at_the_hosts_clock() -> None:
    """At 4 launches and 3 merges: a host that is ahead would take the whole transfer for one that blocks."""
    assert run_workers(2, emulated, fresh=True) == [["stream"] * 7] * 2
