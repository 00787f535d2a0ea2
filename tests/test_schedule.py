"""Schedules by steps, clipped gradients and accumulated batches: against arithmetic written out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cocod_accel.config.loading import load_config
from cocod_accel.simulator.learning import Learning
from cocod_accel.tasks import build_model, build_task
from cocod_accel.trainer.process import seed_everything
from cocod_accel.trainer.work import Work
from tests import resume
from tests.workers import run_outcomes, run_workers

TINY = [
    "task.name=synthetic", "task.args={num_train: 64, num_test: 16, size: 4}", "model.name=mlp", "batch_size=8",
    "cluster.num_workers=1", "logging.every_steps=1", "logging.trackers=[]", "schedule.warmup_epochs=0",
]  # fmt: skip
STEPS = [*TINY, "schedule.steps=11", "algorithm.name=local"]


def rates(*options: str) -> list[float]:
    rows = Learning(load_config([*STEPS, "optimizer.learning_rate=0.1", *options])).rows()
    return [row.values["learning_rate"] for row in rows if row.kind == "train"]


def test_the_learning_rate_of_every_step() -> None:
    """Eight steps are an epoch, so the schedule of eleven goes on in a second one."""
    assert rates() == pytest.approx([0.1] * 11)
    warm = [0.1 * (t + 1) / 4 for t in range(3)]
    assert rates("schedule.warmup_steps=3") == pytest.approx([*warm, *[0.1] * 8])
    stable = rates("schedule.decay=wsd", "schedule.decay_share=0.5")
    assert stable == pytest.approx([0.1 * min(1.0, (11 - t) / 5.5) for t in range(11)])
    cosine = rates("schedule.decay=cosine")
    assert cosine == pytest.approx([0.05 * (1 + torch.cos(torch.tensor(torch.pi * t / 11)).item()) for t in range(11)])


def test_evaluations_by_steps_and_one_at_the_end() -> None:
    rows = [row for row in Learning(load_config([*STEPS, "evaluation.every_steps=4"])).rows() if row.kind == "eval"]
    assert [(row.step, row.values["epoch"]) for row in rows] == [(4, 0.5), (8, 1), (11, 1 + 3 / 3)]


def test_periods_count_steps() -> None:
    work = Work.of(load_config([*STEPS, "algorithm.period=[[0, 1], [5, 2]]"]), 64, 0)
    assert [work.algorithm.period.at(step) for step in (0, 4, 5, 9)] == [1, 1, 2, 2]


def test_clipped_and_accumulated_gradients() -> None:
    """One worker, plain SGD, written out: the norm of the whole batch's gradient is what is limited."""
    limit, rate = 0.3, 0.1
    config = load_config(
        [
            *STEPS, f"optimizer.clip_norm={limit}", "optimizer.accumulate=3", f"optimizer.learning_rate={rate}",
            "optimizer.momentum=0", "optimizer.weight_decay=0", "algorithm.name=ssgd",
        ]
    )  # fmt: skip
    learning = Learning(config, threads=1)
    list(learning.rows())
    seed_everything(config.seed)
    task = build_task(config)
    model = build_model(config, task)
    work, supply, num_clipped = Work.of(config, 64, 0), iter(()), 0
    for step in range(11):
        if step % 8 == 0:
            generator: Any = torch.Generator()
            device = torch.device("cpu")
            supply = work.supply(config, task.train, step // 8, device, seed=config.seed, generator=generator)
        batch: Any = next(supply)
        inputs, labels = batch
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.cat([g.flatten() for g in gradients]).norm().item()
        num_clipped += norm > limit
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= rate * min(1.0, limit / norm) * gradient
    assert num_clipped > 0
    for ours, theirs in zip(learning.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_run_by_steps_is_resumed_to_the_bit(tmp_path: Path) -> None:
    """Stopped in the second, shortened epoch, right after an evaluation by steps."""
    case = resume.Case("cocod", False, "sgd", 20, False)
    more = [
        "schedule.epochs=null", "schedule.steps=26", "schedule.decay_epochs=[]", "evaluation.every_steps=10",
        "schedule.decay=cosine", "algorithm.period=3", "optimizer.clip_norm=0.5",
    ]  # fmt: skip
    whole = resume.arguments(case, tmp_path, "whole", *more)
    assert run_workers(2, resume.worker, whole, fresh=True) == [0, 0]
    given = resume.arguments(case, tmp_path, "run", *more, "checkpoint.every_steps=20")
    outcomes = run_outcomes(2, resume.worker, given, ("leave", 20), fresh=True)
    assert all(outcome.error is not None for outcome in outcomes)
    assert run_workers(2, resume.worker, given, fresh=True) == [0, 0]
    assert resume.record(tmp_path / "run") == resume.record(tmp_path / "whole")
    assert list(resume.traces(tmp_path / "run")[0]) == list(range(1, 27))
