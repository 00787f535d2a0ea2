"""The part ``language`` of the grid: which cells are wanted, what its table says, and a cell that really runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cocod_accel import cli
from cocod_accel.reproduce.cell import run
from cocod_accel.reproduce.figures import draw_language
from cocod_accel.reproduce.grid import Cell, cells, scale_of
from cocod_accel.reproduce.language import METHODS, RATES, table, wanted
from cocod_accel.reproduce.running import done_rows, evaluations, fingerprint, folder_of, read_rows
from cocod_accel.reproduce.tables import Grid, report
from cocod_accel.runs.reading import read_run
from cocod_accel.simulator.simulate import configured
from cocod_accel.tasks import build_model, task_facts
from cocod_accel.trainer.work import Work

SMALL = cells(scale_of("small"), ["language"])


def files(root: Path) -> str:
    for folder, text in (("a", "the quick brown fox "), ("b", "0123456789")):
        (root / folder).mkdir(parents=True)
        for number in range(4):
            (root / folder / f"{number}.txt").write_text(text * 40)
    return f"task.args={{files: {root}, length: 16, held_out: 4}}"


def planned(given: str) -> list[tuple[Cell, Any]]:
    return [(cell, configured(cell.on(), [*cell.arguments, given])) for cell in SMALL if cell.seed == 0]


def test_every_cell_can_be_planned_and_is_at_equal_tokens(tmp_path: Path) -> None:
    given = files(tmp_path)
    assert len(SMALL) == 2 * len(METHODS) * len(RATES) * 3
    assert {config.optimizer.learning_rate for _, config in planned(given)} == set(RATES)
    for cell, config in planned(given):
        facts = task_facts(config)
        work = Work.of(config, facts.num_train, 0)
        assert (sum(work.steps), sum(work.plan.batches)) == (1500, 16)
        assert work.learning_rate(config, 100 / work.steps[0]) == pytest.approx(config.optimizer.learning_rate, rel=0.01)
        assert config.algorithm.name == cell.variant
    model = build_model(configured(SMALL[0].on(), [*SMALL[0].arguments]), facts)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(400_000, rel=0.1)


def names(found: list[Cell]) -> set[str]:
    return {cell.name.removeprefix("language-gpt-").replace("-n8", "") for cell in found}


def row_of(bits: float, **more: Any) -> dict[str, Any]:
    return {"final_bits_per_byte": bits, "comm_bytes": 1000, **more}


def test_later_seeds_are_wanted_with_the_best_rate_only() -> None:
    ours = [cell for cell in SMALL if cell.variant == "ssgd" and cell.setting.startswith("iid")]
    assert names(wanted(ours, {})) == {f"ssgd-iid-rate{rate:g}-seed0" for rate in RATES}
    done = {f"language-gpt-ssgd-iid-rate{rate:g}-n8-seed0": row_of(bits) for rate, bits in ((0.004, 3.0), (0.008, 2.5))}
    assert {cell.seed for cell in wanted(ours, done)} == {0}, "the third rate has not been run"
    last = "language-gpt-ssgd-iid-rate0.016-n8-seed0"
    with_all = wanted(ours, {**done, last: {"failed": "worker 3: the loss is not finite"}})
    assert names(with_all) - names(wanted(ours, {})) == {"ssgd-iid-rate0.008-seed1", "ssgd-iid-rate0.008-seed2"}
    other = cells(scale_of("smoke"), ["scaling"])[:2]
    assert wanted(other, {}) == other


def test_the_table_is_of_each_methods_best_rate_paired_by_seed() -> None:
    bits = {
        ("ssgd-iid", 0.004): [2.6, 2.7, 2.8], ("ssgd-iid", 0.008): [2.5, 2.6, 2.7],
        ("cocod-k1-ternary-iid", 0.008): [2.51, 2.62, 2.73], ("cocod-k1-ternary-iid", 0.016): [2.9],
        ("diloco-k50-iid", 0.008): [3.0],
    }  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    for (name, rate), values in bits.items():
        for seed, value in enumerate(values):
            sent = 69 if "ternary" in name else 1000
            rows[f"language-gpt-{name}-rate{rate:g}-n8-seed{seed}"] = row_of(value, comm_bytes=sent)
    rows["language-gpt-ssgd-iid-rate0.016-n8-seed0"] = {"failed": "worker 3"}
    text = table(Grid(SMALL, rows))
    lines = [line.split() for line in text.splitlines()]
    assert lines[2] == ["iid", "S-SGD", "2.600", "2.500", "diverged", "3", "2.600", "±0.100", "1.0000"]
    # Differences 0.01, 0.02, 0.03: mean 0.02, standard deviation 0.01, t(2) = 4.303.
    ternary = ["iid", "CoCoD-SGD", "k=1", "ternary", "-", "2.510", "2.900", "3", "2.620", "±0.110", "+0.020"]
    assert lines[3] == [*ternary, "(-0.005", "to", "+0.045)", "0.0690"]
    assert lines[4] == ["iid", "DiLoCo", "k=50", "-", "3.000", "-", "1", "3.000", "+0.500", "1.0000"]
    assert lines[5] == ["iid:", "CoCoD-SGD", "k=1", "ternary", "is", "undecided"]
    assert "A language model" in report(Grid(SMALL, rows))
    assert table(Grid(SMALL, {})) == ""


def test_the_figure_is_of_bits_against_bytes() -> None:
    rows = {
        "language-gpt-ssgd-iid-rate0.008-n8-seed0": row_of(2.5),
        "language-gpt-ssgd-iid-rate0.008-n8-seed1": row_of(2.7),
        "language-gpt-cocod-k1-ternary-iid-rate0.008-n8-seed0": row_of(2.8, comm_bytes=70),
        "language-gpt-cocod-k1-ternary-by-source-rate0.008-n8-seed0": row_of(2.9, comm_bytes=70),
    }
    figure = draw_language(Grid(SMALL, rows))
    assert figure is not None
    [axes] = figure.axes  # dealt by source there is no S-SGD to compare with
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["S-SGD, n=2", "CoCoD-SGD k=1 ternary, n=1"]
    assert axes.get_title(loc="left") == "shards alike"
    assert "lower is better" in axes.get_ylabel()
    points = [np.asarray(line.get_xydata()).tolist() for line in axes.lines if line.get_marker() in ("o", "s")]
    assert points == [[[1.0, pytest.approx(2.6)]], [[0.07, 2.8]]]
    assert draw_language(Grid(SMALL, {})) is None


def test_the_page_shows_what_the_rows_in_the_repository_say() -> None:
    """Of the cells that have been run; data/text is not in the repository, and need not be there."""
    given = ["task.args.files=data/text"]
    done = done_rows(SMALL, read_rows([Path("docs/reproduction/language.jsonl")]), given)
    assert done
    assert len({row["data_digest"] for row in done.values()}) == 1
    assert table(Grid(wanted(SMALL, done), done)) in Path("docs/language.md").read_text()


def test_a_cell_runs_and_its_row_says_what_was_measured(tmp_path: Path) -> None:
    one = next(c for c in cells(scale_of("smoke"), ["language"]) if "ternary-by-source" in c.name)
    given = (files(tmp_path / "text"),)
    out = tmp_path / "out"
    run(one, out, list(given), fingerprint(one, given))
    [row] = read_rows([out / "rows.jsonl"]).values()
    assert (row["metric"], row["better"], row["steps"]) == ("bits_per_byte", "lower", 12)
    assert len(row["data_digest"]) == 32
    curve = evaluations(row)
    assert [e["step"] for e in curve] == [6, 12]
    assert row["final_bits_per_byte"] == curve[-1]["bits_per_byte"]
    assert row["best_bits_per_byte"] == min(e["bits_per_byte"] for e in curve)
    # The folder that rows alone give is read as the run's own.
    before = (out / "runs" / one.name / "summary.json").read_text()
    made = folder_of(one, row, tmp_path / "again", given)
    assert made is not None
    kept = json.loads((made / "summary.json").read_text())
    assert kept["time_to_bits_per_byte"] == pytest.approx(json.loads(before)["time_to_bits_per_byte"], rel=1e-5)
    assert read_run(made).metric == "bits_per_byte"


@pytest.mark.slow
def test_the_command_runs_later_seeds_once_it_knows_the_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--scale", "smoke", "--only", "language", "--out", str(tmp_path / "out"), files(tmp_path / "text")]
    assert cli.main(["reproduce", *given, "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "12 of 12 cells to run" in said
    assert "6 of 18 cells to run" in said
    assert "18 of 18 cells" in said
    assert cli.main(["reproduce", *given, "--dry-run"]) == 0
    assert "0 of 18 cells to run" in capsys.readouterr().out
