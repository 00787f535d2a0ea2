"""Every mistake: one line with what was given and what to do, on every worker, and nobody hangs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import SSGD, AsynLocalSGD, CoCoDSGD, LocalSGD, attach
from tests import loops
from tests.workers import Outcome, run_outcomes

Case = Callable[[int], None]


def ddp(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model or loops.make_model(torch.float32), **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def bare_module(rank: int) -> None:
    model = loops.make_model()
    attach(model, sgd(model), CoCoDSGD(5))


def bare_on_one(rank: int) -> None:
    wrapped = ddp()
    model: nn.Module = wrapped.module if rank == 1 else wrapped
    attach(model, sgd(model), CoCoDSGD(5))


def second_attach(rank: int) -> None:
    model = ddp()
    optimizer = sgd(model)
    attach(model, optimizer, CoCoDSGD(5))
    attach(model, optimizer, CoCoDSGD(5))


def hook_taken(rank: int) -> None:
    model = ddp()
    model.register_comm_hook(None, fp16_compress_hook)
    attach(model, sgd(model), CoCoDSGD(5))


def other_algorithm(rank: int) -> None:
    model = ddp()
    attach(model, sgd(model), CoCoDSGD(5) if rank == 0 else LocalSGD(5))


def other_period(rank: int) -> None:
    model = ddp()
    attach(model, sgd(model), CoCoDSGD(5 + rank))


def other_schedule(rank: int) -> None:
    model = ddp()
    attach(model, sgd(model), CoCoDSGD([(0, 1), (100 + rank, 5)]))


def other_trainable(rank: int) -> None:
    # Same shapes, so DDP's own check is content; but worker 1 would send another payload.
    model = ddp()
    if rank == 1:
        next(iter(model.parameters())).requires_grad_(False)
    attach(model, sgd(model), CoCoDSGD(5))


def other_frozen_values(rank: int) -> None:
    model = loops.make_model(torch.float32)
    first = next(iter(model.parameters())).requires_grad_(False)
    wrapped = ddp(model)
    with torch.no_grad():
        first.add_(rank)
    attach(wrapped, sgd(wrapped), CoCoDSGD(5))


def bad_weight_on_one(rank: int) -> None:
    model = ddp()
    attach(model, sgd(model), CoCoDSGD(5), weight=[32, 0][rank])


def nan_weight(rank: int) -> None:
    model = ddp()
    attach(model, sgd(model), CoCoDSGD(5), weight=math.nan)


def huge_weights(rank: int) -> None:
    model = ddp()
    attach(model, sgd(model), CoCoDSGD(5), weight=1e308)


def endless_weight(rank: int) -> None:
    model = ddp()
    attach(model, sgd(model), CoCoDSGD(5), weight=10**400)


def unequal_asynlocal(rank: int) -> None:
    model = ddp()
    attach(model, sgd(model), AsynLocalSGD(5 + rank), weight=1 + rank)


def fsdp_one(rank: int) -> None:
    model = FullyShardedDataParallel(loops.make_model(torch.float32), device_id=torch.device("cpu"))
    attach(model, sgd(model), CoCoDSGD(5))


def fsdp_two(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    model = loops.make_model(torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    attach(model, sgd(model), CoCoDSGD(5))


def zero_optimizer(rank: int) -> None:
    model = ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    attach(model, optimizer, CoCoDSGD(5))


def foreign_parameters(rank: int) -> None:
    attach(ddp(), sgd(nn.Linear(2, 7)), CoCoDSGD(5))


def sparse_gradients(rank: int) -> None:
    model = ddp(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)))
    attach(model, sgd(model), CoCoDSGD(5))


def an_algorithm_class(rank: int) -> None:
    model = ddp()
    attach(model, sgd(model), CoCoDSGD)  # type: ignore[arg-type]


def an_algorithm_name(rank: int) -> None:
    model = ddp()
    attach(model, sgd(model), "cocod")  # type: ignore[arg-type]


def no_optimizer(rank: int) -> None:
    attach(ddp(), [], CoCoDSGD(5))


def not_an_optimizer(rank: int) -> None:
    model = ddp()
    attach(model, model.parameters(), CoCoDSGD(5))


def not_a_model(rank: int) -> None:
    model = ddp()
    attach("resnet18", sgd(model), CoCoDSGD(5))  # type: ignore[arg-type]


CASES: list[tuple[Case, str, str]] = [
    (bare_module, "TypeError", "a bare Sequential while 2 processes run; wrap it first: accelerator.prepare(model)"),
    (bare_on_one, "TypeError", "a bare Sequential while 2 processes run"),
    (second_attach, "RuntimeError", "attached to this model already; call sync.detach() first"),
    (hook_taken, "RuntimeError", "already has a communication hook"),
    (other_algorithm, "ValueError", "workers differ in algorithm: rank 0 has cocod, rank 1 has local; pass the same"),
    (other_period, "ValueError", "workers differ in period: rank 0 has 5, rank 1 has 6; pass the same"),
    (other_schedule, "ValueError", "workers differ in period: rank 0 has [[0, 1], [100, 5]], rank 1 has"),
    (other_trainable, "ValueError", "workers differ in their models: rank 1 has other parameters"),
    (other_frozen_values, "ValueError", "workers differ in frozen parameters, which are never sent: rank 1"),
    (bad_weight_on_one, "ValueError", "weight=0 is not positive and finite; pass this worker's batch size"),
    (nan_weight, "ValueError", "weight=nan is not positive and finite"),
    (huge_weights, "ValueError", "weight=1e+308 is not positive and finite; pass this worker's batch size"),
    (endless_weight, "ValueError", "weight=10**308 or more is not positive and finite; pass this worker's batch size"),
    (unequal_asynlocal, "ValueError", "AsynLocalSGD averages with equal weights, got [1.0, 2.0]; pass the same weight"),
    (fsdp_one, "TypeError", "the model is a FullyShardedDataParallel: it shards flat parameters"),
    (fsdp_two, "ValueError", "the model is sharded over all 2 workers, so none can step alone"),
    (zero_optimizer, "TypeError", "the optimizer is a ZeroRedundancyOptimizer: its state is sharded"),
    (
        foreign_parameters,
        "ValueError",
        "the optimizer holds 2 parameter(s) the model does not, the first of shape (7, 2)",
    ),
    (sparse_gradients, "ValueError", "0 has sparse gradients, which are not averaged; use sparse=False"),
    (an_algorithm_class, "TypeError", "is not an algorithm; pass CoCoDSGD(...)"),
    (an_algorithm_name, "TypeError", "algorithm='cocod' is not an algorithm; pass e.g. CoCoDSGD(period=5)"),
    (no_optimizer, "ValueError", "optimizer=[] is empty"),
    (not_an_optimizer, "TypeError", "optimizer is a generator; pass a torch.optim.Optimizer"),
    (not_a_model, "TypeError", "model is a str, not a torch.nn.Module"),
]


@pytest.mark.parametrize(("case", "kind", "message"), CASES, ids=[case.__name__ for case, _, _ in CASES])
def test_a_mistake_is_one_clear_line_on_every_worker(case: Case, kind: str, message: str) -> None:
    outcomes: list[Outcome] = run_outcomes(2, case, seconds=30)
    for outcome in outcomes:
        assert outcome.error is not None, f"rank {outcome.rank} attached"
        assert outcome.error[0] == kind, outcome.error[2]
        assert message in outcome.error[1]
        assert "\n" not in outcome.error[1]


def usable_after_a_mistake(rank: int) -> bool:
    model = ddp()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="weight"):
        attach(model, optimizer, CoCoDSGD(5), weight=[1, -1][rank])
    sync = attach(model, optimizer, CoCoDSGD(5))
    sync.finish()
    sync.detach()
    return dist.is_initialized()


def test_sync_batch_norm_is_refused_where_steps_are_local() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4))  # DDP takes it on GPUs only
    with pytest.raises(ValueError, match="1 is a SyncBatchNorm, which communicates in every forward; use BatchNorm"):
        attach(model, sgd(model), CoCoDSGD(5))
    attach(model, sgd(model), SSGD()).detach()


def test_after_a_refused_attach_the_model_can_be_attached() -> None:
    from tests.workers import run_workers

    assert run_workers(2, usable_after_a_mistake) == [True, True]


@pytest.mark.parametrize("kind", [CoCoDSGD, LocalSGD, AsynLocalSGD])
@pytest.mark.parametrize("period", [0, -3, 2.5, "5", None, True, [], [(5, 1)]])
def test_an_impossible_period_never_becomes_an_algorithm(kind: Any, period: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="period="):
        kind(period=period)
