"""``cluster.speeds: measure``: a short calibration with the run's own model and data, before training.

The speeds it finds stand in the run's ``config.yaml`` in place of ``measure``, so that whoever loads that file keeps the
same shards, and in ``speeds.json`` with what they were found from.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate.accelerator import Accelerator

from cocod_accel.checkpoint.rng import kept_randomness
from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.groups import default_group
from cocod_accel.config.settings import Config
from cocod_accel.runs.tables import aligned
from cocod_accel.sharding.plan import WorkPlan
from cocod_accel.sharding.sampler import seeded_generator
from cocod_accel.sharding.speeds import measure_speeds
from cocod_accel.tasks import Task, build_model, build_optimizer
from cocod_accel.tasks.data import Batch, Images, batches
from cocod_accel.tasks.metrics import floated, task_loss
from cocod_accel.tasks.structure import outputs_and_targets, pieces
from cocod_accel.tasks.text import Sequences
from cocod_accel.trainer.launch import has_core_each
from cocod_accel.trainer.pace import Pace

#: How long steps are timed at most, before training, to choose a period or a payload.
TIMED_SECONDS = 2.0


@dataclass(frozen=True)
class Calibration:
    """What was measured; one entry per worker."""

    speeds: list[float]
    step_seconds: list[float]
    num_steps: list[int]
    #: The batch all workers were measured with.
    batch: int
    devices: list[str]
    #: What was slowed down on purpose; None: nothing was.
    emulated: str | None

    def save(self, folder: Path) -> None:
        (folder / "speeds.json").write_text(json.dumps(asdict(self), indent=2) + "\n")

    def table(self, plan: WorkPlan) -> str:
        """For a terminal: what was measured, and each worker's batch, steps and share."""
        rows = [["worker", "device", "ms/step", "samples/s", "speed", "batch", "steps/epoch", "share"]]
        samples = [batch * steps for batch, steps in zip(plan.batches, plan.steps, strict=True)]
        for rank, (device, seconds, speed) in enumerate(zip(self.devices, self.step_seconds, self.speeds, strict=True)):
            figures = [f"{1e3 * seconds:.2f}", f"{self.batch / seconds:.0f}", f"{speed:.3f}"]
            plans = [str(plan.batches[rank]), str(plan.steps[rank]), f"{samples[rank] / sum(samples):.1%}"]
            rows.append([str(rank), device, *figures, *plans])
        note = "" if self.emulated is None else f"\nemulated: {self.emulated}"
        return aligned(rows) + note


def calibrate(config: Config, task: Task, accelerator: Accelerator) -> Calibration:
    """Measure every worker's speed on a model and batches like those of the run, which is left untouched. Collective."""
    device, batch = accelerator.device, common_batch(config)
    with sample_steps(config, task, accelerator, batch) as run_step:
        measured = measure_speeds(run_step, min_seconds=config.cluster.measure_seconds)
    return Calibration(
        speeds=list(measured.speeds),
        step_seconds=list(measured.step_seconds),
        num_steps=list(measured.num_steps),
        batch=batch,
        devices=exchange_reports(device_name(device), default_group()),
        emulated=config.emulated,
    )


def common_batch(config: Config) -> int:
    """What all workers are measured with."""
    if config.cluster.global_batch is None:
        return config.batch_size
    return max(1, config.cluster.global_batch // config.cluster.num_workers)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextlib.contextmanager
def sample_steps(config: Config, task: Task, accelerator: Accelerator, batch: int) -> Iterator[Callable[[], None]]:
    """A step like those of the run, without communication, on a model of its own; the run is left untouched."""
    rank, device = accelerator.process_index, accelerator.device
    with kept_randomness():
        model = build_model(config, task).to(device)
        optimizer = build_optimizer(config, model)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # the work of a step without changing the model
        busy = device.type == "cpu" and has_core_each()
        pace = Pace(is_on=True, slowdown=config.slowdown(rank, epoch=0), is_busy=busy, device=device)
        supply, loss_function = _endless_batches(config, task, batch, rank, device), task_loss(config)

        def run_step() -> None:
            pace.begin()
            taken = next(supply)
            optimizer.zero_grad()
            for piece, share in pieces(taken, config.optimizer.accumulate):
                with accelerator.autocast():
                    outputs, targets = outputs_and_targets(model, piece)
                    loss = loss_function(floated(outputs), targets)
                (loss * share).backward()
            optimizer.step()
            pace.end()

        yield run_step


def _endless_batches(config: Config, task: Task, batch: int, rank: int, device: torch.device) -> Iterator[Batch]:
    generator = seeded_generator(config.seed, "calibration", rank)
    data = task.train
    if not isinstance(data, Images | Sequences):
        with contextlib.suppress(Exception):  # a user's own data may draw from a generator of its own; some cannot be copied
            data = copy.deepcopy(data)
    whole = task.num_train - task.num_train % batch
    while True:
        indices = torch.randperm(task.num_train, generator=generator)[:whole]
        yield from batches(data, indices, batch, device, generator=generator, loader_workers=config.loader_workers)
