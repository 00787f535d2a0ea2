"""What a real loop already does, under every algorithm: two real workers beside the serial reference, step by step.

``docs/features.md`` is this matrix as a table; its test compares the two. A feature's workers run all five algorithms in one
start, because starting is what takes the time; each cell then judges its own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cocod_accel import ALGORITHMS, PipeSGD, attach
from tests import loops, reference
from tests.workers import run_outcomes, run_workers

STEPS, PERIOD = 7, 2
#: asynlocal: each worker its own period, four rounds.
OWN_PERIODS, OWN_STEPS = [1, 2], [4, 8]
WEIGHTS = [2.0, 3.0]
#: Steps at which worker 1 overflows.
OVERFLOWS = {1, 4, 5}

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Optimizers = list[torch.optim.Optimizer]
#: What a loop keeps from step to step.
Kept = dict[str, Any]


# ------------------------------------------------------------------------------------------------- models


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class LowRank(nn.Module):
    """A frozen layer and a trainable correction of rank 2, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.base = nn.Linear(6, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Branching(nn.Module):
    """Which layer is used depends on the batch, so on the worker and the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.trunk, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.left if float(x.detach().sum()) > 0 else self.right
        out: Tensor = branch(torch.tanh(self.trunk(x)))
        return out


class Checkpointed(nn.Module):
    """Activations are computed again in the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = loops.make_model()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner(x)  # type: ignore[no-any-return]
        x = x.requires_grad_() if self.use_reentrant else x  # the older way needs an input with a gradient
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return out


def autocast_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x.float())
    return nn.functional.mse_loss(out.float(), y.float())


# --------------------------------------------------------------------------------------------- optimizers


def momentum(model: nn.Module) -> Optimizers:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.SGD(trainable, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True)]


def plain(model: nn.Module) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def two_optimizers(model: Any) -> Optimizers:
    return [torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9), torch.optim.Adam(model[2].parameters(), lr=0.01)]


def clipped(model: nn.Module) -> Optimizers:
    def clip_first(*_: Any) -> None:
        clip(model)

    (optimizer,) = momentum(model)
    optimizer.register_step_pre_hook(clip_first)
    return [optimizer]


def clip(model: nn.Module) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))


def rate(step: int) -> float:
    return 1 / (1 + step)


def scheduled(model: nn.Module) -> Optimizers:
    """A schedule of rates that moves on by two a step: accelerate moves it by the number of processes."""

    def move_on(*_: Any) -> None:
        scheduler.step()
        scheduler.step()

    (optimizer,) = momentum(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    optimizer.register_step_post_hook(move_on)
    return [optimizer]


class Together:
    """Several optimizers as one, for the reference."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.step = lambda: [optimizer.step() for optimizer in optimizers]


# ------------------------------------------------------------------------------------------------ features


def plain_step(model: Any, optimizers: Optimizers, batch: Batch, loss_of: Loss, overflows: bool, kept: Kept) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(model, *batch).backward()
    for optimizer in optimizers:
        optimizer.step()


def clipped_step(model: Any, optimizers: Optimizers, batch: Batch, loss_of: Loss, overflows: bool, kept: Kept) -> None:
    optimizers[0].zero_grad()
    loss_of(model, *batch).backward()
    assert clip(model) > 0.05 or kept["step"] == 0, "the limit must bite"
    optimizers[0].step()


def scaled_step(model: Any, optimizers: Optimizers, batch: Batch, loss_of: Loss, overflows: bool, kept: Kept) -> None:
    scaler = kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2))
    (optimizer,) = optimizers
    loss = loss_of(model, *batch)
    scaler.scale(loss * float("inf") if overflows else loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def scheduled_step(model: Any, optimizers: Optimizers, batch: Batch, loss_of: Loss, overflows: bool, kept: Kept) -> None:
    accelerator = kept["accelerator"]
    (optimizer,) = optimizers
    if "scheduler" not in kept:
        kept["scheduler"] = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, rate))  # type: ignore[attr-defined]
    accelerator.backward(loss_of(model, *batch))
    optimizer.step()
    kept["scheduler"].step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Feature:
    """One thing a loop does, and how the reference does the same."""

    make_model: Callable[[], nn.Module] = loops.make_model
    optimizers: Callable[[Any], Optimizers] = momentum
    #: Of the reference, if it needs other ones.
    reference_optimizers: Callable[[Any], Optimizers] | None = None
    loss_of: Loss = loops.loss_of
    step: Callable[..., None] = plain_step
    ddp: dict[str, Any] = field(default_factory=dict)
    prepared: bool = False
    compiled: str = ""
    tolerance: float = 1e-12
    overflows: bool = False
    #: Algorithms that refuse it, and what they say.
    refused: dict[str, str] = field(default_factory=dict)


FEATURES: dict[str, Feature] = {
    # A last bit that differs may turn the rounding of an activation to 8 bits the other way.
    "bf16 autocast": Feature(lambda: loops.make_model(torch.float32), loss_of=autocast_loss, tolerance=5e-3),
    "fp16 GradScaler, overflow on one worker": Feature(
        step=scaled_step,
        overflows=True,
        refused={"pipe": PipeSGD.refuses_scaler},
    ),
    "gradient clipping": Feature(optimizers=momentum, reference_optimizers=clipped, step=clipped_step),
    "scheduler prepared by accelerate": Feature(reference_optimizers=scheduled, step=scheduled_step, prepared=True),
    "torch.compile before prepare": Feature(prepared=True, compiled="before"),
    "torch.compile after prepare": Feature(prepared=True, compiled="after"),
    "find_unused_parameters": Feature(Branching, plain, ddp={"find_unused_parameters": True}),
    "static_graph": Feature(ddp={"static_graph": True}),
    "gradient_as_bucket_view": Feature(ddp={"gradient_as_bucket_view": True}),
    "activation checkpointing": Feature(lambda: Checkpointed(use_reentrant=False)),
    "activation checkpointing, reentrant": Feature(lambda: Checkpointed(use_reentrant=True)),
    "tied weights": Feature(Tied),
    "frozen parameters (LoRA)": Feature(LowRank),
    "several optimizers": Feature(optimizers=two_optimizers),
}


def steps_of(name: str, rank: int) -> int:
    return OWN_STEPS[rank] if name == "asynlocal" else STEPS


def weight_of(name: str, feature: Feature, rank: int) -> float:
    # Equal weights where the reference's own rounding of them would show.
    return 1.0 if name == "asynlocal" or feature.tolerance > 1e-12 else WEIGHTS[rank]


def one_algorithm(rank: int, feature: Feature, name: str) -> Any:
    model: Any = feature.make_model()
    optimizers: Any = feature.optimizers(model)
    kept: dict[str, Any] = {}
    if feature.prepared:
        from accelerate.accelerator import Accelerator

        accelerator = kept["accelerator"] = Accelerator(cpu=True)
        if feature.compiled == "before":
            model = torch.compile(model, backend="eager")
        model, *optimizers = accelerator.prepare(model, *optimizers)
        if feature.compiled == "after":
            model = torch.compile(model, backend="eager")
    else:
        model = DistributedDataParallel(model, **feature.ddp)
    given = optimizers if len(optimizers) > 1 else optimizers[0]
    period = OWN_PERIODS[rank] if name == "asynlocal" else PERIOD
    sync = attach(model, given, loops.make_algorithm(name, period), weight=weight_of(name, feature, rank))
    trace = []
    for step in range(steps_of(name, rank)):
        kept["step"] = step
        overflows = feature.overflows and rank == 1 and step in OVERFLOWS
        feature.step(model, optimizers, loops.make_batch(rank, step), feature.loss_of, overflows, kept)
        trace.append(loops.snapshot(model))
    stats = sync.stats()
    sync.finish()
    return trace, stats.rounds, stats.bytes, loops.snapshot(model)


def all_algorithms(rank: int, feature_name: str) -> dict[str, Any]:
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # as a launcher does
    found: dict[str, Any] = {}
    for name in ALGORITHMS:
        try:
            found[name] = one_algorithm(rank, FEATURES[feature_name], name)
        except (RuntimeError, ValueError) as error:
            found[name] = error
    return found


@functools.cache
def results(feature_name: str) -> list[dict[str, Any]]:
    return run_workers(2, all_algorithms, feature_name, seconds=110)


def expected_trace(name: str, feature: Feature) -> reference.Trace:
    batches = [[loops.make_batch(i, t) for t in range(steps_of(name, i))] for i in range(2)]
    skipped = [set(), OVERFLOWS if feature.overflows else set()]
    if feature.overflows and name == "ssgd":  # what is infinite on one worker is so on all after the sum
        batches = [[batch for t, batch in enumerate(row) if t not in OVERFLOWS] for row in batches]
    make = feature.reference_optimizers or feature.optimizers

    def make_optimizer(model: nn.Module) -> Any:
        return Together(make(model))

    weights = [weight_of(name, feature, rank) for rank in range(2)]
    periods = OWN_PERIODS if name == "asynlocal" else [PERIOD] * 2
    return reference.run(name, feature.make_model(), make_optimizer, batches, feature.loss_of, weights, periods, skipped)


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("feature_name", list(FEATURES))
def test_it_equals_the_reference(feature_name: str, name: str) -> None:
    feature = FEATURES[feature_name]
    found = [worker[name] for worker in results(feature_name)]
    if name in feature.refused:
        for error in found:
            assert isinstance(error, RuntimeError | ValueError), "it was to be refused"
            assert feature.refused[name] in str(error)
            assert "\n" not in str(error)
        return
    for outcome in found:
        if isinstance(outcome, Exception):
            raise outcome
    expected = expected_trace(name, feature)
    for worker, ((trace, *_), wanted) in enumerate(zip(found, expected, strict=True)):
        rows = list(enumerate(trace))
        if feature.overflows and name == "ssgd":
            rows = [(step, row) for step, row in rows if step not in OVERFLOWS]
        elif feature.overflows and worker == 1:
            # A skip that ends a round is settled at the next forward: its merge shows one row later.
            rows = [(step, row) for step, row in rows if step not in OVERFLOWS]
            wanted = [row for step, row in enumerate(wanted) if step not in OVERFLOWS]
        for (step, row), theirs in zip(rows, wanted, strict=True):
            for a, b in zip(row, theirs, strict=True):
                error = ((a - b).norm() / b.norm()).item()
                assert error <= feature.tolerance, f"worker {worker} differs by {error:.1e} after step {step + 1}"
    assert found[0][1] == found[1][1] > 0, "workers must count the same rounds"
    assert all(torch.equal(a, b) for a, b in zip(found[0][3], found[1][3], strict=True))


def prepared_with_a_scaler(rank: int) -> None:
    from accelerate.accelerator import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    model = loops.make_model()
    attach(model, AcceleratedOptimizer(plain(model)[0], scaler=torch.amp.GradScaler("cpu")), PipeSGD())


def test_pipe_refuses_an_optimizer_that_was_prepared_with_a_scaler() -> None:
    (outcome,) = run_outcomes(1, prepared_with_a_scaler, fresh=True)
    assert outcome.error is not None
    assert outcome.error[:2] == ("ValueError", PipeSGD.refuses_scaler)


def test_pipe_takes_a_scaler_that_is_switched_off() -> None:
    model = loops.make_model()
    (optimizer,) = plain(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with attach(model, optimizer, PipeSGD()) as sync:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loops.loss_of(model, *loops.make_batch(0, step))).backward()
            scaler.step(optimizer)
        assert sync.attempts == 3


def test_the_documented_table_is_this_matrix(request: pytest.FixtureRequest) -> None:
    from tests.feature_table import table

    assert table() in (request.config.rootpath / "docs" / "features.md").read_text(), "run python -m tests.feature_table"


def compiled_by_inductor(rank: int, compiles: bool) -> Any:
    torch.manual_seed(3)
    module: Any = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    model = DistributedDataParallel(torch.compile(module) if compiles else module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = attach(model, optimizer, loops.make_algorithm("cocod", 2), weight=WEIGHTS[rank])
    for step in range(STEPS):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step, dtype=torch.float32)).backward()
        optimizer.step()
    sync.finish()
    return loops.snapshot(model), sync.stats().rounds


@pytest.mark.slow
def test_a_model_compiled_by_inductor_trains_like_the_eager_one() -> None:
    eager, compiled = (run_workers(2, compiled_by_inductor, compiles, seconds=110, fresh=True) for compiles in (False, True))
    for (expected, rounds), (found, rounds_too) in zip(eager, compiled, strict=True):
        assert rounds == rounds_too
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
