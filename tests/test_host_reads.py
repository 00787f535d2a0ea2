"""Where our code makes the host wait for a device: every read of a value, every blocking copy, by function.

A new line in what is found is a wait that somebody has added. It is either taken out, or put into the list, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cocod_accel import SSGD, CoCoDSGD, LocalSGD, PipeSGD
from cocod_accel.algorithms import Algorithm, Bucket
from cocod_accel.comm.device import Moment
from cocod_accel.comm.groups import Channels, TorchComm, TwoLevelComm
from cocod_accel.config.loading import load_training_config
from cocod_accel.runs.clock import TrainingClock
from cocod_accel.sync.nodes import Nodes
from cocod_accel.sync.preflight import Report, Subject
from cocod_accel.sync.sync import Sync
from cocod_accel.tasks.data import Images
from cocod_accel.trainer.pace import Pace
from cocod_accel.trainer.steps import LossGuard, loss_of
from cocod_accel.trainer.trainer import Trainer
from cocod_accel.trainer.work import Position
from tests.fake_cuda import CUDA, FakeCuda, fake_cuda
from tests.test_ahead import ALGORITHMS

#: Steps of each algorithm; more rounds than the averages whose headers may be unread.
STEPS = 13

RANDOM = ("qsgd:4", "terngrad")

#: What a step, or a round's end, may wait for: the host is rounds ahead by then, and nothing has been put there since.
IN_STEPS = {("event", "averaging/header.py:_read_first"): "headers and votes of averages that have come long ago"}

#: Outside of steps, by what is called: who waits there, and why.
ELSEWHERE = {
    "averaged": {
        **IN_STEPS,  # the average in flight lends its room
        ("value", "averaging/evaluation.py:_take"): "its header is read at once, because what is evaluated must be right",
    },
    "finish": {("value", "averaging/header.py:check"): "so must a model that is exported"},
    "state_dict": {
        ("event", "averaging/header.py:_read_first"): "no header may stay unread: a wrong average must not be saved",
        ("event", "comm/traffic.py:_count"): "what communication has cost so far is saved",
        ("value", "averaging/drift.py:state"): "so are the drifts",
        ("value", "averaging/drift.py:largest"): "and the largest of them",
    },
    "load_state_dict": {},
    "stats": {
        ("event", "comm/traffic.py:_count"): "what communication has cost is known when it has happened",
        **{("value", f"averaging/drift.py:{name}"): "drifts are numbers" for name in ("ratio", "largest", "mean")},
    },
}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40, device=CUDA), nn.BatchNorm1d(40, device=CUDA), nn.Linear(40, 3, device=CUDA))


def attached(
    algorithm: Algorithm, module: nn.Module | None = None, *, nodes: bool = False, offloads: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, Sync]:
    """As :func:`~cocod_accel.attach`, which compares checksums of real numbers and wants DDP."""
    module = small() if module is None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    everyone: Any = dist.group.WORLD
    comm = TorchComm(everyone, everyone)
    channels = Channels(comm, None, comm)
    stated: list[tuple[int, ...]] = [(), ()]
    if nodes:
        inside, peers = (dist.new_group(ranks) for ranks in ([0, 1], [0, 2]))
        between = TwoLevelComm(TorchComm(peers, peers), inside)
        channels, stated = Channels(between, TorchComm(inside), comm), [(0, 1), (0, 1), (2, 3), (2, 3)]
    subject = Subject(
        model=module,
        module=module,
        ddp=None,
        engine=None,
        router=None,
        optimizers=[optimizer],
        trainable=list(module.parameters()),
        frozen=[],
        buffer_shapes={name: buffer.shape for name, buffer in module.named_buffers()},
        signature="",
        node=stated[0],
        offloads=offloads,
    )
    assert channels.between.size == 2
    reports = [Report(weight=1.0, node=node, trainable_digest="equal") for node in stated]
    return module, optimizer, Sync(subject, algorithm, channels, Nodes.of(stated, 0), reports)


def bucket_of(module: nn.Module) -> Bucket:
    """All gradients, from nowhere, as DDP would hand them over."""
    parameters: list[Tensor] = list(module.parameters())
    flat = torch.empty(sum(parameter.numel() for parameter in parameters), device=CUDA)
    pieces = flat.split([parameter.numel() for parameter in parameters])
    gradients = [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]
    return Bucket(flat, gradients, parameters)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, sync: Sync, bucket: Bucket | None = None) -> None:
    """``bucket``: of gradients that are in their places already."""
    module(torch.empty(8, next(module.parameters()).shape[1], device=CUDA))
    backward(module, sync, bucket)
    optimizer.step()


def backward(module: nn.Module, sync: Sync, bucket: Bucket | None = None) -> None:
    made = bucket_of(module) if bucket is None else bucket
    reducer = sync._driver.method if sync._inside is None else sync._inside
    if reducer.reduces_gradients:
        reducer.backward_begins(False, False)
        reducer.reduce(made)
        reducer.send([made])
        reducer.complete([made])
        reducer.backward_ends(False)
    if bucket is None:
        for parameter, gradient in zip(made.parameters, made.gradients, strict=True):
            parameter.grad = gradient


def whole_life(device: FakeCuda, algorithm: Algorithm, nodes: bool) -> dict[str, set[tuple[str, str]]]:
    module, optimizer, sync = attached(algorithm, nodes=nodes)
    sync.control.listen()
    found: dict[str, set[tuple[str, str]]] = {}

    def during(call: str, what: Callable[[], Any]) -> Any:
        device.waits.clear()
        result = what()
        found[call] = set(device.waits)
        return result

    def steps() -> None:
        for number in range(STEPS):
            step(module, optimizer, sync)
            if number == 2:
                sync.control.request(save=True)
            sync.control.agreed()

    def averaged() -> None:
        with sync.averaged():
            module(torch.empty(8, 6, device=CUDA))

    during("steps", steps)
    during("stats", sync.stats)
    during("averaged", averaged)
    state = during("state_dict", sync.state_dict)
    during("load_state_dict", lambda: sync.load_state_dict(state))
    during("finish", sync.finish)
    sync.detach()
    return found


@pytest.mark.parametrize("nodes", [False, True])
def test_where_the_host_waits_for_a_gpu_is_known(nodes: bool) -> None:
    seen: dict[str, set[tuple[str, str]]] = {}
    with fake_cuda(4 if nodes else 2) as device:
        for name, algorithm in ALGORITHMS.items():
            if (nodes and algorithm.reduces_gradients) or algorithm.payload in RANDOM:  # no GPU, no random numbers of a GPU
                continue
            for call, waits in whole_life(device, algorithm, nodes).items():
                if call == "steps":
                    assert waits <= IN_STEPS.keys(), name
                seen.setdefault(call, set()).update(waits)
    assert seen == {call: set(waits) for call, waits in {"steps": IN_STEPS, **ELSEWHERE}.items()}


def test_averaged_momentum_is_asked_for_before_it_is_sent() -> None:
    """Sums of other sizes would be mixed up, or hang, so workers compare what they hold, and wait for the answer."""
    found = set()
    with fake_cuda() as device:
        module, optimizer, sync = attached(LocalSGD(2, optimizer_state="average"))
        for _ in range(STEPS):
            step(module, optimizer, sync)
        found = {wait for wait in device.waits if wait[1] != "the test"} - IN_STEPS.keys()
        sync.detach()
    where = "averaging/replica.py:_agreed_optimizer_tensors"
    assert found == {("copy", where), ("value", where)}


def test_a_read_and_a_blocking_copy_are_noticed() -> None:
    """The control."""
    with fake_cuda() as device:
        there = torch.ones(3, device=CUDA)
        device.waits.clear()
        float(there.sum())
        there.tolist()
        there.cpu()
        torch.ones(3).to(CUDA, non_blocking=True)
        torch.ones(3).pin_memory().to(CUDA)
        there.copy_(torch.ones(3))
        assert [what for what, _ in device.waits] == ["value", "value", "copy", "copy", "copy", "copy"]
        device.waits.clear()
        torch.ones(3).pin_memory().to(CUDA, non_blocking=True)
        there.mul_(2.0).add_(there)
        assert device.waits == []


#: In an epoch of the built-in trainer, beside what a round's end may wait for.
IN_AN_EPOCH = {
    **IN_STEPS,
    ("event", "trainer/steps.py:check"): "whether the losses of the round before were finite",
    ("value", "trainer/steps.py:check_finite"): "at the epoch's end: and the last ones",
    ("stream", "runs/clock.py:start"): "at its beginning: what is not training has been done",
    ("stream", "runs/clock.py:stop"): "at its end: training has",
}


@pytest.mark.parametrize("algorithm", [CoCoDSGD(5), LocalSGD(2), SSGD(), PipeSGD(payload="int8")], ids=lambda a: str(a.name))
def test_an_epoch_of_the_trainer_waits_for_what_is_known(algorithm: Algorithm) -> None:
    """The trainer's own loop; a backward makes no gradients here, and the rest of a run is left away."""
    config = load_training_config(["cluster.num_workers=2", "logging.every_steps=1000", "schedule.epochs=1"])
    with fake_cuda() as device:
        data = Images(torch.zeros(50, 3, 8, 8, dtype=torch.uint8), torch.zeros(50).long(), (0.5,) * 3, (0.2,) * 3, True)
        data.batch(torch.arange(4), CUDA, None)  # mean and std are sent once
        module = nn.Sequential(nn.Flatten(), nn.Linear(192, 10, device=CUDA))
        _, optimizer, sync = attached(algorithm, module)
        at, guard = Position(seed=0), LossGuard(0)
        sync.control.listen()
        sync.control.guard = lambda: guard.check(at.step)

        def step_backward(batch: Any) -> torch.Tensor:
            loss = loss_of(module, batch)
            guard.note(loss)
            backward(module, sync)
            return loss.detach()

        worker = SimpleNamespace(
            rank=0,
            at=at,
            guard=guard,
            pace=Pace(is_on=False, device=CUDA),
            clock=TrainingClock(CUDA),
            losses=torch.zeros((), device=CUDA),
            work=SimpleNamespace(steps=[STEPS], all_samples_per_own=lambda epoch: 2.0, learning_rate=lambda *_: 0.1),
            batches=lambda epoch: (data.batch(torch.arange(4), CUDA, torch.Generator()) for _ in range(STEPS)),
            backward=step_backward,
            optimizer=optimizer,
            now_at=lambda where: None,
        )
        trainer: Any = Trainer.__new__(Trainer)
        trainer.config, trainer.worker, trainer.model, trainer.sync = config, worker, module, sync
        trainer.recorder = SimpleNamespace(now=lambda: Moment(CUDA), computed=lambda start: Moment(CUDA))
        trainer.checkpoints = SimpleNamespace(is_due=lambda: False)
        device.waits.clear()
        trainer._train_epoch(0)
        found = list(device.waits)
        sync.detach()
    assert at.step == STEPS
    assert set(found) <= IN_AN_EPOCH.keys()
    assert found[0][1] == "runs/clock.py:start"
    assert found[-1][1] == "runs/clock.py:stop"
    assert sum(what != "event" for what, _ in found) <= 3, "once an epoch"
