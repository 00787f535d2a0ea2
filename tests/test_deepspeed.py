"""A DeepSpeed engine at ZeRO stage 0, beside the same training with DDP; and the settings that are refused."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, Checkpoints, CoCoDSGD, Sync, attach
from tests import loops
from tests.workers import run_outcomes, run_workers

pytest.importorskip("deepspeed")
STEPS = 50


def make_engine(rank: int, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu")
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for more than a minute
    model = loops.make_model(torch.float32)
    optimizer = loops.OPTIMIZERS["momentum"](model)
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}, "gradient_clipping": 0.0,
        "steps_per_print": None, **settings,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine, optimizer


def weight_of(name: str, rank: int) -> float:
    return 1.0 if name == "asynlocal" else [2.0, 3.0][rank]


def with_engine(rank: int, name: str, accumulated: int, clipping: float) -> Any:
    engine, optimizer = make_engine(rank, gradient_accumulation_steps=accumulated, gradient_clipping=clipping)
    sync = attach(engine, optimizer, loops.make_algorithm(name, 3), weight=weight_of(name, rank))
    for step in range(STEPS * accumulated):
        engine.backward(loops.loss_of(engine, *loops.make_batch(rank, step, dtype=torch.float32)))
        engine.step()
    return outcome(sync, engine.module), engine.enable_backward_allreduce, engine.gradient_clipping()


def with_ddp(rank: int, name: str, accumulated: int, clipping: float) -> Any:
    model = DistributedDataParallel(loops.make_model(torch.float32))
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, loops.make_algorithm(name, 3), weight=weight_of(name, rank))
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulated):
            with model.no_sync() if part + 1 < accumulated else contextlib.nullcontext():
                batch = loops.make_batch(rank, step * accumulated + part, dtype=torch.float32)
                (loops.loss_of(model, *batch) / accumulated).backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
    return outcome(sync, model)


def outcome(sync: Sync, model: torch.nn.Module) -> Any:
    stats, local = sync.stats(), loops.snapshot(model)
    sync.finish()
    sync.detach()
    return local, loops.snapshot(model), stats.rounds, stats.bytes


@pytest.mark.parametrize(
    ("name", "accumulated", "clipping"), [("cocod", 1, 0.0), ("ssgd", 1, 0.0), *((name, 2, 0.1) for name in ALGORITHMS)]
)
def test_an_engine_trains_like_ddp(name: str, accumulated: int, clipping: float) -> None:
    engines = run_workers(2, with_engine, name, accumulated, clipping, seconds=110)
    plain = run_workers(2, with_ddp, name, accumulated, clipping)
    for ((local, final, *counts), reduces, kept), (expected_local, expected_final, *expected_counts) in zip(
        engines, plain, strict=True
    ):
        assert counts == expected_counts
        assert reduces is True, "detach() puts the engine's all-reduce back"
        assert kept == clipping
        for ours, theirs in zip([*local, *final], [*expected_local, *expected_final], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}


REFUSED = [
    (zero(2), "zero_optimization.stage=2: no worker holds a whole optimizer state"),
    (zero(1), "zero_optimization.stage=1"),
    ({"bf16": {"enabled": True}}, "bf16.enabled=true: the engine trains copies of the parameters"),
]


def refused(rank: int, settings: dict[str, Any]) -> None:
    engine, optimizer = make_engine(rank, **settings)
    attach(engine, engine.optimizer if "stage" in str(settings) else optimizer, CoCoDSGD(period=3))


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message.split(":")[0] for _, message in REFUSED])
def test_settings_that_cannot_work_are_refused_on_all_workers(settings: dict[str, Any], message: str) -> None:
    for found in run_outcomes(2, refused, settings, seconds=110):
        assert found.error is not None
        assert found.error[0] == "ValueError"
        assert message in found.error[1]
        assert "\n" not in found.error[1]


def stopped_and_resumed(rank: int, folder: str, steps: int) -> Any:
    engine, optimizer = make_engine(rank)
    sync = attach(engine, optimizer, CoCoDSGD(period=3), weight=rank + 1)
    checkpoints = Checkpoints(folder, sync)
    resumed = checkpoints.resume()
    first = 0 if resumed is None else resumed.position
    for step in range(first, steps):
        engine.backward(loops.loss_of(engine, *loops.make_batch(rank, step, dtype=torch.float32)))
        engine.step()
        if step + 1 == 5:
            checkpoints.save(step + 1)
    return first, engine.global_steps, loops.snapshot(engine.module)


def test_an_engine_is_saved_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = run_workers(2, stopped_and_resumed, str(tmp_path / "whole"), 10, seconds=110)
    run_workers(2, stopped_and_resumed, str(tmp_path / "parts"), 7, seconds=110)
    again = run_workers(2, stopped_and_resumed, str(tmp_path / "parts"), 10, seconds=110)
    for (_, steps, expected), (first, other_steps, found) in zip(whole, again, strict=True):
        assert (first, steps, other_steps) == (5, 10, 10)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
