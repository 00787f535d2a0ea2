"""A DeepSpeed engine at ZeRO stage 0, beside the same training with DDP; and the settings that are refused."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, Checkpoints, CoCoDSGD, Sync, attach
from cocod_accel.config.strict import ConfigError
from cocod_accel.report import read_summary
from cocod_accel.sync.deepspeed import check_settings, prepare_for_cpu
from cocod_accel.trainer import process as runtime
from tests import loops
from tests.test_faults import end, start, workers_of
from tests.test_trainer import ROOT, TINY, command
from tests.workers import run_outcomes, run_workers

# Not imported here: that changes the environment and prints.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
STEPS = 50


@dataclass(frozen=True)
class Mode:
    accumulated: int = 1
    clipping: float = 0.0
    autocast: bool = False
    #: The engine is made by accelerate, which steps it in ``accelerator.backward``.
    prepared: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if self.autocast else {}
        return {"gradient_accumulation_steps": self.accumulated, "gradient_clipping": self.clipping, **autocast}


MODES = {
    "float32": Mode(),
    "bf16 autocast": Mode(autocast=True),
    "accumulation and clipping": Mode(accumulated=2, clipping=0.1),
    "through accelerate": Mode(prepared=True),
    "through accelerate, accumulation and clipping": Mode(accumulated=2, clipping=0.1, prepared=True),
}


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}, "gradient_clipping": 0.0,
        "steps_per_print": None, **settings,
    }  # fmt: skip


def make_engine(rank: int, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    import deepspeed

    os.environ.update(LOCAL_RANK=str(rank), LOCAL_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    prepare_for_cpu()
    model = loops.make_model(torch.float32)
    optimizer = loops.OPTIMIZERS["momentum"](model)
    config = configuration(settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine, optimizer


def make_accelerator(rank: int, mode: Mode) -> Any:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true")
    prepare_for_cpu()
    from accelerate.accelerator import Accelerator
    from accelerate.utils.dataclasses import DeepSpeedPlugin, InitProcessGroupKwargs

    plugin = DeepSpeedPlugin(hf_ds_config=configuration(mode.settings))
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=mode.accumulated,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    assert accelerator.num_processes == 2
    return accelerator


def weight_of(name: str, rank: int) -> float:
    return 1.0 if name == "asynlocal" else [2.0, 3.0][rank]


def with_engine(rank: int, name: str, mode: Mode) -> Any:
    engine, optimizer = make_engine(rank, **mode.settings)
    sync = attach(engine, optimizer, loops.make_algorithm(name, 3), weight=weight_of(name, rank))
    for step in range(STEPS * mode.accumulated):
        engine.backward(loops.loss_of(engine, *loops.make_batch(rank, step, dtype=torch.float32)))
        engine.step()
    found = outcome(sync, engine.module)
    assert engine.enable_backward_allreduce is True, "detach() puts the engine's all-reduce back"
    assert engine.gradient_clipping() == mode.clipping
    return found


def with_accelerate(accelerator: Any, rank: int, name: str, mode: Mode) -> Any:
    model = loops.make_model(torch.float32)
    model, optimizer = accelerator.prepare(model, loops.OPTIMIZERS["momentum"](model))
    sync = attach(model, optimizer, loops.make_algorithm(name, 3), weight=weight_of(name, rank))
    for step in range(STEPS * mode.accumulated):
        with accelerator.accumulate(model):
            accelerator.backward(loops.loss_of(model, *loops.make_batch(rank, step, dtype=torch.float32)))
            optimizer.step()
            optimizer.zero_grad()
    found = outcome(sync, model.module)
    accelerator.free_memory()
    return found


def with_ddp(rank: int, name: str, mode: Mode) -> Any:
    model = DistributedDataParallel(loops.make_model(torch.float32))
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, loops.make_algorithm(name, 3), weight=weight_of(name, rank))
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(mode.accumulated):
            with model.no_sync() if part + 1 < mode.accumulated else contextlib.nullcontext():
                x, y = loops.make_batch(rank, step * mode.accumulated + part, dtype=torch.float32)
                with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast):
                    out = model(x)
                (torch.nn.functional.mse_loss(out, y) / mode.accumulated).backward()
        if mode.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), mode.clipping)
        optimizer.step()
    return outcome(sync, model)


def outcome(sync: Sync, model: torch.nn.Module) -> Any:
    stats, local = sync.stats(), loops.snapshot(model)
    sync.finish()
    sync.detach()
    return local, loops.snapshot(model), stats.rounds, stats.bytes


def all_algorithms(rank: int, mode: Mode) -> dict[str, Any]:
    """Every algorithm with an engine and with DDP."""
    if mode.prepared:
        accelerator = make_accelerator(rank, mode)
        engines = {name: with_accelerate(accelerator, rank, name, mode) for name in ALGORITHMS}
    else:
        engines = {name: with_engine(rank, name, mode) for name in ALGORITHMS}
    return {name: (engines[name], with_ddp(rank, name, mode)) for name in ALGORITHMS}


@functools.cache
def results(mode_name: str) -> list[dict[str, Any]]:
    return run_workers(2, all_algorithms, MODES[mode_name], seconds=110, fresh=True)


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("mode_name", list(MODES))
def test_an_engine_trains_like_ddp(mode_name: str, name: str) -> None:
    for worker in results(mode_name):
        (local, final, *counts), (expected_local, expected_final, *expected_counts) = worker[name]
        assert counts == expected_counts
        for ours, theirs in zip([*local, *final], [*expected_local, *expected_final], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}


REFUSED = [
    (zero(2), "zero_optimization.stage=2: no worker holds a whole optimizer state"),
    (zero(1), "zero_optimization.stage=1"),
    (zero(3), "zero_optimization.stage=3"),
    ({"bf16": {"enabled": True}}, "bf16.enabled=true: the engine trains copies of the parameters"),
]


def refused(rank: int, settings: dict[str, Any]) -> None:
    engine, optimizer = make_engine(rank, **settings)
    attach(engine, engine.optimizer if "stage" in str(settings) else optimizer, CoCoDSGD(period=3))


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message.split(":")[0] for _, message in REFUSED])
def test_settings_that_cannot_work_are_refused_on_all_workers(settings: dict[str, Any], message: str) -> None:
    for found in run_outcomes(2, refused, settings, seconds=110, fresh=True):
        assert found.error is not None
        assert found.error[0] == "ValueError"
        assert message in found.error[1]
        assert "\n" not in found.error[1]


def test_deepspeeds_own_fp16_is_refused() -> None:
    """Not through an engine: DeepSpeed makes none with fp16 on CPUs."""
    with pytest.raises(ValueError, match=r"fp16\.enabled=true: .*torch_autocast"):
        check_settings(stage=0, fp16=True, bf16=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must be a JSON object"),
        ('{"bf16": true}', "bf16=True: must be a JSON object"),
        ('{"zero_optimization": {"stage": "x"}}', "zero_optimization.stage='x': must be a number; use 0"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        runtime._check_deepspeed_file(str(file))
    assert "\n" not in str(caught.value)


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
    whole = run_workers(2, stopped_and_resumed, str(tmp_path / "whole"), 10, seconds=110, fresh=True)
    run_workers(2, stopped_and_resumed, str(tmp_path / "parts"), 7, seconds=110, fresh=True)
    again = run_workers(2, stopped_and_resumed, str(tmp_path / "parts"), 10, seconds=110, fresh=True)
    for (_, steps, expected), (first, other_steps, found) in zip(whole, again, strict=True):
        assert (first, steps, other_steps) == (5, 10, 10)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# ------------------------------------------------------------------------------------ the trainer, as launched

SMALL = [
    "task.name=fashion_small", "model.name=small_resnet", "task.train_limit=1200", "task.test_limit=500",
    "batch_size=32", "schedule.epochs=3", "checkpoint.every_steps=5", "algorithm.period=[[0, 1], [1, 3]]",
]  # fmt: skip
LAUNCH = "configs/accelerate/deepspeed_cpu_2.yaml"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_launched_run_is_killed_goes_on_and_equals_ddp_bit_for_bit(tmp_path: Path) -> None:
    """The embedded default with DDP; then with DeepSpeed from the accelerate configuration alone, and killed on the way."""
    plain = command("cocod", "train", "configs/quickstart.yaml", *TINY, *SMALL, f"output={tmp_path}", "name=ddp")
    assert plain.returncode == 0, plain.stderr
    process = start(tmp_path, *SMALL, "--accelerate-config", LAUNCH)
    try:
        deadline = time.monotonic() + 90
        while not list((tmp_path / "run" / "checkpoints").glob("step_*1?")):  # after step 10, in the second round
            assert time.monotonic() < deadline, "no checkpoint was written"
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(workers_of(tmp_path)[1], signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        end(process, tmp_path)
    assert process.returncode not in (0, None)
    assert not (tmp_path / "run" / "summary.json").is_file()
    process = start(tmp_path, *SMALL, "--accelerate-config", LAUNCH)
    try:
        _, err = process.communicate(timeout=100)
    finally:
        end(process, tmp_path)
    assert process.returncode == 0, err
    expected, found = read_summary(tmp_path / "ddp"), read_summary(tmp_path / "run")
    for key in ("model_digest", "final_accuracy", "steps", "rounds", "comm_bytes"):
        assert found[key] == expected[key], key


@pytest.mark.timeout(150)
def test_the_deepspeed_launcher_starts_the_trainer(tmp_path: Path) -> None:
    settings = ["configs/quickstart.yaml", *TINY, f"output={tmp_path}", "logging.trackers=[]"]
    done = command(
        "deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "--module", "cocod_accel.train", *settings,
        "--deepspeed_config", "configs/deepspeed/stage0_bf16.json", "name=bf16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_summary(tmp_path / "bf16")["best_accuracy"] > 0.5


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 2}}, "DeepSpeed: zero_optimization.stage=2: no worker holds a whole optimizer state"),
    ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4: the trainer steps after every batch"),
    ({"train_micro_batch_size_per_gpu": 5}, "train_micro_batch_size_per_gpu=5: differs from batch_size=8"),
]


# One through the real launcher; the others differ in the line alone.
@pytest.mark.parametrize(
    ("settings", "message"),
    [BAD[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in BAD[1:])],
    ids=[next(iter(settings)) for settings, _ in BAD],
)
def test_what_the_trainer_cannot_do_is_one_line(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {**configuration({}), "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", **settings}
    (tmp_path / "deepspeed.json").write_text(json.dumps(config))
    launch = (ROOT / LAUNCH).read_text().replace("configs/deepspeed/stage0.json", str(tmp_path / "deepspeed.json"))
    (tmp_path / "launch.yaml").write_text(launch)
    arguments = ["configs/quickstart.yaml", *TINY, f"output={tmp_path}", "name=run"]
    done = command("cocod", "train", *arguments, "--accelerate-config", str(tmp_path / "launch.yaml"))
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(said) == 1, done.stderr
    assert message in said[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
