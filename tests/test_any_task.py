"""Losses, metrics and batches of one's own, and metrics that are better the lower they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cocod_accel.config.loading import load_config
from cocod_accel.report.figures import draw_figures
from cocod_accel.report.groups import compare
from cocod_accel.report.page import render
from cocod_accel.report.tables import results_csv, terminal
from cocod_accel.report.watch import lines, snapshot
from cocod_accel.runs.clock import TimeToAccuracy
from cocod_accel.runs.reading import read_parts, read_run, time_to_target
from cocod_accel.simulator.learning import Learning
from cocod_accel.tasks.structure import num_samples, pieces
from tests import resume
from tests.run_folders import write_run
from tests.workers import run_workers

HERE = "tests.test_any_task"
LINES = [
    f"task.name={HERE}:make_lines", f"model.name={HERE}:Line", "task.loss=model", f"task.metrics=[{HERE}:miss,loss]",
    "batch_size=5", "schedule.epochs=null", "schedule.steps=12", "evaluation.every_steps=4", "logging.trackers=[]",
    "schedule.decay_epochs=[]", "optimizer.accumulate=2", "logging.every_steps=4", "evaluation.targets=[0.5, 0.01]",
    "evaluation.batch_size=7", "optimizer.learning_rate=0.1",
]  # fmt: skip


class Lines(torch.utils.data.Dataset[Any]):
    """Samples that are mappings, one of their values a mapping."""

    def __init__(self, size: int) -> None:
        self.x = torch.linspace(-1, 1, size)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index : index + 1], "more": {"y": 3 * self.x[index] + 1}}


def make_lines() -> tuple[Lines, Lines]:
    return Lines(40), Lines(23)


class Line(nn.Module):
    """Returns its loss, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> dict[str, Tensor]:
        said = self.line(x)[:, 0]
        return {"said": said, "loss": (said - more["y"]).square().mean()}


def miss(outputs: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
    found: Tensor = (outputs["said"] - batch["more"]["y"]).abs()
    return found


miss.better = "lower"  # type: ignore[attr-defined]


def test_mappings_a_loss_and_metrics_of_ones_own(tmp_path: Path) -> None:
    """Two processes and the simulator agree; what is reported is the mean over the whole test set, written out here."""
    case = resume.Case("local", False, "sgd", 0, False)
    given = [*resume.arguments(case, tmp_path, "run"), *LINES, "algorithm.period=4"]
    given = [argument for argument in given if not argument.startswith(("task.args", "task.augment", "cluster.speeds"))]
    assert run_workers(2, resume.worker, given, fresh=True) == [0, 0], resume.said(tmp_path)
    rows, _ = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()], None
    evaluated = [row for row in rows if row["kind"] == "eval"]
    learning = Learning(load_config(given))
    learnt = [row for row in learning.rows() if row.kind == "eval"]
    assert [(row["step"], row["miss"], row["test_loss"]) for row in evaluated] == [
        (row.step, row.values["miss"], row.values["test_loss"]) for row in learnt
    ]
    test = Lines(23)
    with torch.no_grad():
        wrong = learning.model.line(test.x[:, None])[:, 0] - (3 * test.x + 1)  # type: ignore[operator]
    assert evaluated[-1]["miss"] == pytest.approx(wrong.abs().mean().item(), rel=1e-5)
    assert evaluated[-1]["test_loss"] == pytest.approx(wrong.square().mean().item(), rel=1e-5)
    assert {(row["metric"], row["better"]) for row in evaluated} == {("miss", "lower")}
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["best_miss"] == min(row["miss"] for row in evaluated)
    assert summary["final_miss"] == evaluated[-1]["miss"]
    first = next((row["train_seconds"] for row in evaluated if row["miss"] <= 0.5), None)
    assert summary["time_to_miss"] == {"0.5": first, "0.01": None}
    assert not any("accuracy" in key for key in summary)


def test_pieces_of_any_batch() -> None:
    batch = {"x": torch.arange(5), "more": [torch.arange(10).view(5, 2), torch.tensor(3.0)]}
    assert num_samples(batch) == 5
    parts = pieces(batch, 3)
    assert [(piece["x"].tolist(), share) for piece, share in parts] == [([0, 1], 0.4), ([2, 3], 0.4), ([4], 0.2)]
    assert parts[1][0]["more"][0].tolist() == [[4, 5], [6, 7]]
    assert parts[2][0]["more"][1] == 3.0


def test_the_time_to_a_target_from_above() -> None:
    times = TimeToAccuracy([2.0, 1.0], better="lower")
    for seconds, value in enumerate((2.5, 2.0, 1.5, 1.9)):
        times.note(value, float(seconds))
    assert times.seconds == {2.0: 1.0, 1.0: None}


def lower_run(root: Path, name: str, values: list[float], algorithm: str, finished: bool = True, steps: int = 0) -> Path:
    """A folder of a run whose metric is better the lower it is."""
    options = ["task.metrics=[loss]", "evaluation.targets=[2.0, 1.5]", f"algorithm.name={algorithm}"]
    options += ["schedule.epochs=null", f"schedule.steps={steps}", "schedule.decay_epochs=[]"] if steps else []
    run = write_run(root, name, values, overrides=options, finished=finished)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] == "eval":
            row.update(test_loss=row.pop("accuracy"), metric="test_loss", better="lower")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        summary = json.loads((run / "summary.json").read_text())
        for key in ("best_accuracy", "final_accuracy", "time_to_accuracy"):
            summary.pop(key)
        reached = {"2": None, "1.5": None}
        summary |= {"metric": "test_loss", "better": "lower", "best_test_loss": min(values), "time_to_test_loss": reached}
        (run / "summary.json").write_text(json.dumps({**summary, "final_test_loss": values[-1]}))
    return run


def test_runs_are_compared_by_the_lower_value(tmp_path: Path) -> None:
    quick = lower_run(tmp_path, "quick", [2.2, 1.4, 1.6], "cocod")
    slow = lower_run(tmp_path, "slow", [2.5, 2.2, 1.5], "ssgd")
    runs = [read_run(slow), read_run(quick)]
    assert [time_to_target(run, 1.5) for run in runs] == [6.0, 4.0]
    assert runs[1].measures()["best_accuracy"] == 1.4
    comparison = compare(runs)
    assert (comparison.target, comparison.groups[0].first.name) == (1.5, "quick")
    table = terminal(comparison)
    assert "s to test_loss 1.5" in table
    assert "best test_loss" in table
    assert "1.4000" in table
    assert "%" not in table.split("waiting")[0]
    assert "accuracy" not in table
    assert "best_test_loss" in results_csv(comparison).splitlines()[0]


def test_page_and_figures_name_what_is_measured(tmp_path: Path) -> None:
    runs = [lower_run(tmp_path, name, values, name) for name, values in (("cocod", [2.2, 1.4]), ("ssgd", [2.5, 1.5]))]
    comparison = compare([read_run(run) for run in runs])
    figures = draw_figures(comparison, None, {})
    assert set(figures) == {"loss_over_epochs", "test_loss_over_time"}
    [axes] = figures["test_loss_over_time"].axes
    assert axes.get_ylabel() == "test loss"
    assert [text.get_text() for text in axes.texts] == ["target 1.5"]
    figures["test_loss_over_time"].draw_without_rendering()
    assert not any("%" in tick.get_text() for tick in axes.get_yticklabels())
    page = render(comparison, None, {})
    assert "<h3>Test loss</h3>" in page
    assert '"metric":"test loss","is_share":false,"by_steps":false' in page
    assert "first evaluation at or below it" in page
    shown = re.sub(r"(?s)<(script|style).*?</\1>", "", page)
    assert "accuracy" not in shown.replace('id="accuracy"', "")
    assert "1.4000" in shown
    assert "<td>2.2000 <span class=quiet>2.0 s</span></td>" in shown


def test_runs_of_steps_are_drawn_over_steps(tmp_path: Path) -> None:
    runs = [lower_run(tmp_path, name, [2.2, 1.4], name, steps=20) for name in ("cocod", "ssgd")]
    comparison = compare([read_run(run) for run in runs])
    axes = draw_figures(comparison, None, {})["loss_over_steps"].axes[0]
    assert axes.get_xlabel() == "step"
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [10.0, 20.0]
    page = render(comparison, None, {})
    assert '"by_steps":true' in page
    assert "after step" in page


def test_an_unfinished_run_shows_its_best(tmp_path: Path) -> None:
    run = read_parts(lower_run(tmp_path, "run", [2.2, 1.4, 1.6], "cocod", finished=False))
    now = snapshot(run, [])
    assert (now.accuracy, now.best_accuracy) == (1.6, 1.4)
    assert any("test_loss  1.6000 (best 1.4000)" in line for line in lines(now))


def test_different_metrics_are_not_compared(tmp_path: Path) -> None:
    other = write_run(tmp_path, "other", [0.5, 0.8])
    with pytest.raises(ValueError, match=r"measure different things \(accuracy, test_loss\)"):
        compare([read_run(other), read_run(lower_run(tmp_path, "run", [2.2], "cocod"))])
