"""The checks of ``cocod selftest``, in the order in which they run. Every worker runs each of them.

A check returns this worker's figures, the largest of which counts, and in one line what they mean.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel.algorithms import SSGD, Algorithm, AsynLocalSGD, CoCoDSGD, LocalSGD, PipeSGD
from cocod_accel.checkpoint.checkpoints import Checkpoints
from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.groups import node_group
from cocod_accel.selftest.overlap import measure_overlap
from cocod_accel.selftest.serial import MOMENTUM, RATE, Run, loss_of, trained
from cocod_accel.simulator.lockstep import Lockstep
from cocod_accel.sync.attach import attach
from cocod_accel.sync.sync import Sync

_STEPS, _CODED_STEPS = 13, 8
_PAYLOADS = ("bf16", "int8", "int4", "ternary", "topk:0.1")


@dataclass(frozen=True)
class Place:
    """Where a check runs."""

    device: torch.device
    rank: int
    num_workers: int
    #: For what whoever runs this is to have.
    folder: Path
    #: For what nobody needs afterwards.
    scratch: Path
    #: What :func:`coded_in_one_process` found.
    coded: list[Tensor] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """The widest type that the device computes with."""
        return torch.float32 if self.device.type in ("mps", "xpu") else torch.float64

    @property
    def tolerance(self) -> float:
        if self.dtype == torch.float32:
            return 1e-5
        return 1e-12 if self.device.type == "cpu" else 1e-11  # other kernels, other orders of addition


@dataclass(frozen=True)
class Finding:
    """What a check found on this worker."""

    #: In words; worker 0's is shown.
    text: str
    is_right: bool = True
    is_skipped: bool = False
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A question, and who answers it."""

    name: str
    run: Callable[[Place], Finding]


# ------------------------------------------------------------------------------------------------ what is trained


def _model(place: Place, dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).to(place.device, dtype or place.dtype)


def _batches(place: Place, dtype: torch.dtype | None = None) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shape = place.num_workers, _STEPS, 8, 6
    return [list(steps) for steps in torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or place.dtype)]


def _wrapped(place: Place, model: nn.Module, group: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    devices = None if place.device.type == "cpu" else [place.device]
    wrapped = DistributedDataParallel(model, device_ids=devices, process_group=group)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=RATE, momentum=MOMENTUM)


def _train(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch.to(place.device)).backward()
        optimizer.step()


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


# ------------------------------------------------------------------------------------------------------ the checks


def _algorithm(run: Run) -> Algorithm:
    made: dict[str, Algorithm] = {
        "ssgd": SSGD(),
        "pipe": PipeSGD(),
        "local": LocalSGD(run.period),
        "cocod": CoCoDSGD(run.period, delay=run.delay),
        "asynlocal": AsynLocalSGD(run.period),
    }
    return made[run.rule]


def _is_exact(place: Place, runs: Sequence[Run]) -> Finding:
    worst, where = 0.0, ""
    batches = _batches(place)
    for run in runs:
        reference = _model(place).cpu()
        expected = torch.cat([value.reshape(-1) for value in trained(run, reference, batches)[place.rank]])
        inner = node_group(run.node_size)
        model, optimizer = _wrapped(place, _model(place), inner)
        with attach(model, optimizer, _algorithm(run), weight=run.weights[place.rank], inner=inner) as sync:
            _train(place, model, optimizer, batches[place.rank])
            found = _flat(model)
            sync.detach()
        apart = _apart(found, expected)
        if not apart <= worst:
            worst, where = apart, run.rule
    everybodys = exchange_reports((worst, where), dist.group.WORLD, place.device)
    worst, where = max(everybodys, key=lambda pair: (pair[0] != pair[0], pair[0]))
    names = ", ".join(dict.fromkeys(run.rule for run in runs))
    text = f"{names}: at most {worst:.1e} apart in {str(place.dtype).removeprefix('torch.')}"
    is_right = worst <= place.tolerance
    if not is_right:
        text += f" ({where}); {place.tolerance:.0e} is allowed"
    return Finding(text, is_right, values={"worst": worst, "tolerance": place.tolerance, "algorithm": where})


def exactness(place: Place) -> Finding:
    weights = tuple(float(1 + rank % 3) for rank in range(place.num_workers))
    equal = (1.0,) * place.num_workers
    rules = [("ssgd", 1, None), ("pipe", 1, None), ("local", 4, None), ("cocod", 4, None), ("cocod", 4, 1)]
    return _is_exact(place, [Run(name, k, weights, delay) for name, k, delay in rules] + [Run("asynlocal", 4, equal)])


def nodes(place: Place) -> Finding:
    if place.num_workers < 4 or place.num_workers % 2:
        return Finding("takes an even number of workers, 4 or more", is_skipped=True)
    weights = tuple(float(1 + rank % 3) for rank in range(place.num_workers))
    return _is_exact(place, [Run(name, 4, weights, node_size=2) for name in ("local", "cocod")])


def like_ddp(place: Place) -> Finding:
    """S-SGD with equal weights is plain DDP, to the bit."""
    results = []
    for attached in (False, True):
        model, optimizer = _wrapped(place, _model(place, torch.float32))
        sync = attach(model, optimizer, SSGD()) if attached else None
        _train(place, model, optimizer, _batches(place, torch.float32)[place.rank])
        results.append(_flat(model))
        if sync is not None:
            sync.detach()
    same = torch.equal(*results)
    return Finding(f"{_STEPS} steps of ssgd and of stock DDP: {'equal bits' if same else 'other bits'}", same)


class _Drift(nn.Module):
    """Its gradient is what it is given, so that every device computes the same steps."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.pieces = nn.ParameterList([nn.Parameter(torch.randn(size, generator=generator)) for size in (3000, 1100, 7)])

    def forward(self, noise: Tensor) -> Tensor:
        sizes = [piece.numel() for piece in self.pieces]
        total: Tensor = sum((piece * part).sum() for piece, part in zip(self.pieces, noise.split(sizes), strict=True))
        return total


def _noise(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4107, generator=generator) * 0.01


class _Drifting:
    """The loop of all workers in one process."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models, self.steps = models, [0] * len(models)

    def compute(self, rank: int) -> None:
        self.models[rank](_noise(rank, self.steps[rank])).backward()
        self.steps[rank] += 1

    def guard(self, rank: int) -> None: ...

    def stepped(self, rank: int) -> None: ...


def _coded() -> list[tuple[str, Algorithm]]:
    return [(p, a) for p in _PAYLOADS for a in (CoCoDSGD(1, payload=p), CoCoDSGD(4, payload=p, fragments=2))]


def coded_in_one_process(rank: int, num_workers: int) -> list[Tensor]:
    """What worker ``rank`` has to hold, by algorithm; before workers are connected, when models may be bare."""
    found = []
    for _, algorithm in _coded():
        models = [_Drift() for _ in range(num_workers)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in models]
        lockstep = Lockstep(models, optimizers, [algorithm] * num_workers, [1.0] * num_workers)
        loop = _Drifting(models)
        while min(loop.steps) < _CODED_STEPS:
            lockstep.advance(loop, [_CODED_STEPS] * num_workers)
        found.append(_flat(models[rank]))
    return found


def codecs(place: Place) -> Finding:
    """Real workers against workers of one process, which code on the CPU: on CPUs to the bit."""
    worst: dict[str, float] = {}
    for (payload, algorithm), expected in zip(_coded(), place.coded, strict=True):
        model, _ = _wrapped(place, _Drift().to(place.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with attach(model, optimizer, algorithm) as sync:
            for step in range(_CODED_STEPS):
                optimizer.zero_grad()
                model(_noise(place.rank, step).to(place.device)).backward()
                optimizer.step()
            found = _flat(model)
            sync.detach()
        # Where a device adds up in another order, a value next to a threshold may be coded the other way.
        slack = 0.0 if place.device.type == "cpu" else 1e-5 * float(expected.abs().max())
        is_other = ~((found - expected).abs() <= slack)
        worst[payload] = max(worst.get(payload, 0.0), float(is_other.double().mean()))
    limit = 0.0 if place.device.type == "cpu" else 0.01
    everybodys = exchange_reports(worst, dist.group.WORLD, place.device)
    shares = {payload: max(each[payload] for each in everybodys) for payload in _PAYLOADS}
    bad = [payload for payload, share in shares.items() if not share <= limit]
    text = f"{', '.join(_PAYLOADS)}: as in one process{', to the bit' if limit == 0 else ''}"
    if bad:
        text = f"{', '.join(bad)}: other values than in one process, up to {max(shares.values()):.1%} of them"
    return Finding(text, not bad, values={"shares": shares, "limit": limit})


def resumed(place: Place) -> Finding:
    """A run that is stopped in the middle of a round and goes on ends with the bits of one that is not."""
    folder = place.scratch / "checkpoints"
    algorithm = CoCoDSGD(4, payload="int8")
    batches = _batches(place, torch.float32)[place.rank]

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Sync]:
        model, optimizer = _wrapped(place, _model(place, torch.float32))
        return model, optimizer, attach(model, optimizer, algorithm)

    model, optimizer, sync = begin()
    _train(place, model, optimizer, batches[:6])
    saved = Checkpoints(folder, sync).save(6)
    _train(place, model, optimizer, batches[6:])
    whole = _flat(model)
    sync.detach()
    if saved is None:
        return Finding("the checkpoint could not be written", is_right=False)
    model, optimizer, sync = begin()
    resumption = Checkpoints(folder, sync).resume()
    assert resumption is not None
    _train(place, model, optimizer, batches[resumption.position :])
    same = torch.equal(_flat(model), whole)
    sync.detach()
    return Finding(f"from a checkpoint in the middle of a round: {'equal bits' if same else 'other bits'}", same)


def overlap(place: Place) -> Finding:
    """Whether a transfer lies beside computing."""
    found = measure_overlap(place.device, place.rank, place.num_workers, place.folder / "trace.json")
    # Others may use the CPUs, and workers that wait for each other hide less.
    least = 0.2 if place.device.type == "cpu" else 0.5
    return Finding(found.text, found.hidden_share >= least, values={**found.values, "least_hidden_share": least})


def killed(place: Place) -> Finding:
    """The last worker kills itself; the others never come back from here, and their watchdog says why."""
    model, optimizer = _wrapped(place, _model(place, torch.float32))
    sync = attach(model, optimizer, CoCoDSGD(4))
    sync.watch(frozen_seconds=30)
    batches = _batches(place, torch.float32)[place.rank]
    _train(place, model, optimizer, batches)
    if place.rank == place.num_workers - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        _train(place, model, optimizer, batches)
        if place.device.type != "cpu":  # its host must come to know
            torch.accelerator.synchronize(place.device)


CHECKS = (
    Check("exact", exactness),
    Check("ddp", like_ddp),
    Check("codecs", codecs),
    Check("nodes", nodes),
    Check("resume", resumed),
    Check("overlap", overlap),
)
