"""Comparisons: figures equal to those computed by hand, configurations never mixed, bad input named."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocod_accel import cli
from cocod_accel.report.curves import interpolated, mean_points, points, scaling
from cocod_accel.report.figures import draw_figures
from cocod_accel.report.groups import Comparison, compare, compared, grouped, labels
from cocod_accel.report.tables import cells, markdown, results_csv, runs_csv, terminal, verdicts
from cocod_accel.report.trace import trace
from cocod_accel.runs.reading import Run, find_runs, read_rows, read_run, text_config, time_to_target
from cocod_accel.runs.spans import Span, length, merged, overlap, read_spans, shares, sublanes, window
from tests.run_folders import write_run

SSGD, COCOD = "algorithm.name=ssgd", "algorithm.name=cocod"


def comparison_of(root: Path, target: float | None = None, baseline: str | None = None) -> Comparison:
    return compare([read_run(folder) for folder in find_runs(root)], target, baseline)


def row_of(comparison: Comparison, label: str) -> dict[str, str]:
    header, *rows = cells(comparison)
    return next(dict(zip(header, row, strict=True)) for row in rows if row[0] == label)


# ------------------------------------------------------------------------------- figures computed by hand


@pytest.fixture
def fixture(tmp_path: Path) -> Path:
    """S-SGD at 4, 5 and 6 s an epoch, CoCoD-SGD at 2, 2.5 and 3 s; 80 % is reached after 3 and after 2 epochs."""
    for seed, seconds in ((1, 4.0), (2, 5.0), (3, 6.0)):
        accuracies = [0.6, 0.79, 0.80, 0.82 + 0.01 * seed]
        write_run(tmp_path, f"ssgd-{seed}", accuracies, seconds, [SSGD, f"seed={seed}"], exposed_seconds=2.0)
        accuracies = [0.6, 0.80, 0.81, 0.80]
        write_run(tmp_path, f"cocod-{seed}", accuracies, seconds / 2, [COCOD, f"seed={seed}"], exposed_seconds=0.1)
    return tmp_path


def test_time_to_target_speedup_and_spread_are_those_computed_by_hand(fixture: Path) -> None:
    comparison = comparison_of(fixture, 0.8)
    cocod, ssgd = comparison.groups  # the first to reach the target comes first
    assert (cocod.label, ssgd.label) == ("cocod", "ssgd")
    # S-SGD: 12, 15 and 18 s; CoCoD-SGD: 4, 5 and 6 s. Sample standard deviations 3 and 1.
    assert ssgd.times == [12.0, 15.0, 18.0]
    assert ssgd.time is not None
    assert cocod.time is not None
    assert (ssgd.time.mean, ssgd.time.spread, ssgd.time.n) == (15.0, 3.0, 3)
    assert (cocod.time.mean, cocod.time.spread) == (5.0, 1.0)
    assert (cocod.speedup, ssgd.speedup) == (3.0, 1.0)
    # Training: 16, 20, 24 s; best: 0.83, 0.84, 0.85, spread 0.01.
    assert (ssgd.stats["train_seconds"].mean, ssgd.stats["train_seconds"].spread) == (20.0, 4.0)
    assert ssgd.stats["best_accuracy"].mean == pytest.approx(0.84)
    assert ssgd.stats["best_accuracy"].spread == pytest.approx(0.01)
    row = row_of(comparison, "cocod")
    assert row == {
        "run": "cocod", "n": "3", "workers": "2", "s to 80%": "5.0 ±1.0", "speedup": "3.00x", "best %": "81.00",
        "final %": "80.00", "training s": "10.0 ±2.0", "samples/s": "100", "MB sent": "0.0", "exposed s": "0.1",
        "hidden s": "0.5",
    }  # fmt: skip
    assert verdicts(comparison) == [
        "cocod reaches 80% first, after 5.0 ±1.0 s: 3.00 times as fast as ssgd; final accuracy 80.00%, ssgd's 84.00 ±1.00%",
        "waiting for communication: 1% of its training time, 10% of ssgd's",
    ]


def test_a_target_just_missed_is_not_reached_and_nothing_is_interpolated(fixture: Path) -> None:
    run = read_run(fixture / "ssgd-1")
    assert time_to_target(run, 0.79) == 8.0
    assert time_to_target(run, 0.7900001) == 12.0
    assert time_to_target(run, 0.831) is None


def test_a_run_that_never_reaches_the_target_says_so(fixture: Path) -> None:
    comparison = comparison_of(fixture, 0.845)  # S-SGD: seed 3 alone; CoCoD-SGD: nobody
    assert row_of(comparison, "ssgd")["s to 84.5%"] == "1 of 3"
    assert row_of(comparison, "cocod")["s to 84.5%"] == "never"
    assert row_of(comparison, "cocod")["speedup"] == row_of(comparison, "ssgd")["speedup"] == "-"
    assert verdicts(comparison) == ["no configuration reaches 84.5% in all its runs"]


def test_without_a_target_the_highest_that_all_reached_is_taken(fixture: Path) -> None:
    assert comparison_of(fixture).target == 0.8  # of 0.7, 0.75, 0.8 and 0.85
    (fixture / "low").mkdir()
    write_run(fixture / "low", "low", [0.1, 0.2], overrides=[SSGD, "seed=9"])
    assert comparison_of(fixture).target == 0.85, "none is common: the highest that any reached"
    assert comparison_of(fixture / "low").target is None
    assert "no run reached any of its targets" in terminal(comparison_of(fixture / "low"))


def test_without_rows_the_summary_is_asked(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "old", [0.5, 0.8])
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder)
    assert time_to_target(run, 0.75) == 4.0
    assert time_to_target(run, 0.85) is None
    seconds = time_to_target(run, 0.6)
    assert seconds is not None
    assert math.isnan(seconds), "reached, but the summary has no such target"
    assert row_of(compare([run], 0.6), "cocod")["s to 60%"] == "?"


def test_the_baseline_may_be_an_algorithm_or_a_row(fixture: Path) -> None:
    assert [g.speedup for g in comparison_of(fixture, 0.8, "cocod").groups] == [1.0, pytest.approx(1 / 3)]
    write_run(fixture, "ssgd-slow", [0.6, 0.8], 30.0, [SSGD, "batch_size=8"])
    by_row = comparison_of(fixture, 0.8, "ssgd batch_size=8")
    assert by_row.of("cocod").speedup == 12.0  # type: ignore[union-attr]
    # By algorithm: the one that differs in fewest keys. Against batch_size=32 it is algorithm.name alone.
    by_algorithm = comparison_of(fixture, 0.8)
    assert by_algorithm.of("cocod").baseline == "ssgd batch_size=32"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"--baseline=sgd: matches no run; choose from .*ssgd"):
        comparison_of(fixture, 0.8, "sgd")


def test_markdown_and_csv_equal_the_table(fixture: Path) -> None:
    write_run(fixture, "never", [0.1, 0.2], overrides=["algorithm.name=pipe", "seed=7"])
    comparison = comparison_of(fixture, 0.8)
    header, *rows = cells(comparison)
    lines = [line for line in markdown(comparison).splitlines() if line.startswith("|")]
    parsed = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [parsed[0], *parsed[2:]] == [header, *rows]
    table = terminal(comparison).splitlines()
    assert [re.split(r"\s{2,}", line) for line in (table[0], *table[2 : 2 + len(rows)])] == [header, *rows]
    found = list(csv.DictReader(io.StringIO(results_csv(comparison))))
    for line, row in zip(found, rows, strict=True):
        shown = dict(zip(header, row, strict=True))
        assert line["run"] == shown["run"]
        assert f"{100 * float(line['best_accuracy']):.2f}" == shown["best %"].split(" ")[0]
        assert f"{float(line['train_seconds']):.1f}" == shown["training s"].split(" ")[0]
        time, speedup = line["seconds_to_target"], line["speedup"]
        assert (f"{float(time):.1f}" if time else "never") == shown["s to 80%"].split(" ")[0]
        assert (f"{float(speedup):.2f}x" if speedup else "-") == shown["speedup"]
    runs = list(csv.DictReader(io.StringIO(runs_csv(comparison))))
    assert {(row["name"], row["seconds_to_target"]) for row in runs} >= {
        ("ssgd-1", "12.0"),
        ("cocod-3", "6.0"),
        ("never", ""),
    }


# ---------------------------------------------------------------------------- seeds and configurations


def test_different_configurations_are_never_mixed_and_are_told_apart(tmp_path: Path) -> None:
    for seed in (1, 2):
        for period in (2, 5):
            write_run(tmp_path, f"p{period}-s{seed}", overrides=[f"algorithm.period={period}", f"seed={seed}"])
    write_run(tmp_path, "elsewhere", overrides=["algorithm.period=5", "seed=3", "logging.group=x", "checkpoint.keep=5"])
    comparison = comparison_of(tmp_path)
    assert {group.label: len(group.runs) for group in comparison.groups} == {"cocod period=2": 2, "cocod period=5": 3}
    assert "configurations also differ in algorithm.period" in comparison.notes


def test_emulated_runs_are_labelled_and_not_measured_against_real_ones(tmp_path: Path) -> None:
    write_run(tmp_path, "real", overrides=[SSGD])
    write_run(tmp_path, "slow", overrides=[SSGD, "emulate.slowdown=[1, 2]"])
    write_run(tmp_path, "cocod", overrides=[COCOD, "emulate.slowdown=[1, 2]"], seconds_per_epoch=1.0)
    write_run(tmp_path, "plan", overrides=[COCOD], summary={"clock": "simulated", "emulated": "16 workers"})
    comparison = comparison_of(tmp_path)
    assert {group.label for group in comparison.groups} == {
        "ssgd", "ssgd slowdown=[1, 2] [emulated]", "cocod slowdown=[1, 2] [emulated]",
        "cocod [simulated]",
    }  # fmt: skip
    emulated = comparison.of("cocod slowdown=[1, 2] [emulated]")
    assert emulated is not None
    assert emulated.baseline == "ssgd slowdown=[1, 2] [emulated]"
    simulated = comparison.of("cocod [simulated]")
    assert simulated is not None
    assert simulated.baseline is None
    slow = "cocod slowdown=[1, 2] [emulated], ssgd slowdown=[1, 2] [emulated]"
    assert f"emulated (slowdown [1, 2]): {slow}" in comparison.notes
    assert "simulated (16 workers): cocod [simulated]" in comparison.notes


def test_an_unfinished_run_stands_alone(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path, f"done-{seed}", [0.5, 0.8, 0.9], overrides=[f"seed={seed}"])
    folder = write_run(tmp_path, "killed", [0.5, 0.8, 0.4], overrides=["seed=3"], finished=False)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:40])  # torn in the middle of a row
    comparison = comparison_of(tmp_path, 0.8)
    whole, killed = comparison.groups
    assert (whole.label, len(whole.runs)) == ("cocod", 2)
    assert killed.label == "cocod (unfinished)"
    assert killed.stats["best_accuracy"].mean == 0.8
    assert killed.times == [4.0]
    assert "killed: a row was half-written and left out" in comparison.notes
    assert any("killed was evaluated after epoch 2 of 3" in note for note in comparison.notes)


def run_with(number: int, config: dict[str, str]) -> Run:
    summary = {"best_accuracy": 0.5, "final_accuracy": 0.5, "train_seconds": 1.0, "samples_per_second": 1.0}
    summary |= {"comm_bytes": 1, "comm_exposed_seconds": 0.0, "comm_hidden_seconds": 0.0}
    return Run(f"run{number}", Path(f"run{number}"), text_config(config), (), summary)


CONFIGS = st.fixed_dictionaries(
    {
        "algorithm.name": st.sampled_from(["ssgd", "cocod"]),
        "algorithm.period": st.sampled_from(
            ["1", "5", "[[0, 1], [1, 5], [2, 6], [3, 7]]", "[[0, 1], [1, 5], [2, 6], [3, 8]]"]
        ),
        "cluster.proportional": st.sampled_from(["True", "False"]),
        "cluster.num_workers": st.sampled_from(["2", "4"]),
        "seed": st.integers(0, 3).map(str),
        "name": st.sampled_from(["a", "b"]),
        "logging.group": st.sampled_from(["None", "x"]),
    }
)


@given(st.lists(CONFIGS, min_size=1, max_size=12))
def test_a_group_holds_one_configuration_and_a_configuration_one_group(configs: list[dict[str, str]]) -> None:
    runs = [run_with(number, config) for number, config in enumerate(configs)]
    groups = grouped(runs)
    assert sorted(run.name for group in groups for run in group.runs) == sorted(run.name for run in runs)
    found = [{tuple(sorted(compared(run).items())) for run in group.runs} for group in groups]
    assert all(len(those) == 1 for those in found)
    assert len(set.union(*found)) == len(groups)
    names = labels(groups)
    assert len(set(names)) == len(names)
    for key in ("algorithm.period", "cluster.num_workers", "algorithm.name"):
        assert all(len({run.config[key] for run in group.runs}) == 1 for group in groups)


# ---------------------------------------------------------------------------------------------- bad input


def test_bad_runs_are_named_and_the_good_ones_shown(
    fixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    started = write_run(bad, "started", [], finished=False, overrides=["schedule.epochs=4"])
    (started / "metrics.jsonl").write_text("")
    early = write_run(bad, "early", [0.5, 0.6], finished=False)
    (early / "metrics.jsonl").write_text((early / "metrics.jsonl").read_text().splitlines()[1] + "\n")
    torn = write_run(bad, "torn", [0.5, 0.6])
    (torn / "summary.json").write_text('{"name": "to')
    other = write_run(bad, "other", [0.5, 0.6])
    (other / "summary.json").write_text('{"name": "other", "perplexity": 12.0}')
    bare = write_run(bad, "bare", [0.5, 0.6])
    (bare / "config.yaml").unlink()
    (bad / "nothing").mkdir()
    code = cli.main(
        ["compare", str(fixture / "ssgd-1"), str(bad), str(bad / "nothing"), str(bad / "gone"), str(fixture / "ssgd-1")]
    )
    out, err = capsys.readouterr()
    assert code == 0
    assert out.splitlines()[2].split()[:2] == ["ssgd", "1"], "a run given twice counts once"
    named = [line.removeprefix("skipped: ").split(": ")[0].removesuffix("/summary.json") for line in err.splitlines()]
    expected = [bad / name for name in ("bare", "early", "other", "started", "torn", "nothing", "gone")]
    assert named == [str(path) for path in expected]
    for path, why in zip(expected, err.splitlines(), strict=True):
        reason = {
            "bare": "has no config.yaml",
            "early": "has no evaluation yet",
            "other": "has no best_accuracy, so it has no metric in common",
            "started": "is an empty run",
            "torn": "is not valid JSON",
            "nothing": "is not a run folder and contains none",
            "gone": "no such folder",
        }[path.name]
        assert reason in why


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["{}"], "error: {}: is not a run folder and contains none; give run folders of cocod train"),
        (["{}/a"], "error: {}/a: no such folder; give run folders of cocod train, or a folder that contains them"),
        ([], "error: RUN: none given; name run folders, or a folder that contains them"),
    ],
)
def test_nothing_to_compare_is_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *(argument.format(tmp_path) for argument in arguments)]) == 2
    assert capsys.readouterr().err == line.format(tmp_path) + "\n"


def test_bad_options_are_one_line(fixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(fixture), "--target", "85"]) == 2
    assert capsys.readouterr().err == "error: --target=85: must be a share in (0, 1], e.g. 0.85\n"
    (fixture / "file").write_text("")
    assert cli.main(["compare", str(fixture), "--out", str(fixture / "file" / "x")]) == 2
    assert capsys.readouterr().err.startswith(f"error: --out={fixture / 'file' / 'x'}: cannot be created (")


def test_rows_that_are_none_are_counted(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b'{"a": 1}\n[1]\n\xff\xfe\n{"a": 2}\n{"a": ')
    assert read_rows(tmp_path / "rows") == ([{"a": 1}, {"a": 2}], 3)


# ------------------------------------------------------------------------------------- curves and figures


def test_curves_are_means_over_seeds_with_bytes_interpolated(fixture: Path) -> None:
    group = comparison_of(fixture).groups[0]
    mean = mean_points(group)
    assert [point.epoch for point in mean] == [1, 2, 3, 4]
    assert [point.seconds for point in mean] == [2.5, 5.0, 7.5, 10.0]
    assert mean[1].num_bytes == 20_000
    assert mean[0].train_loss == 1.0
    assert [point.seconds for point in points(group.runs[0])] == [2.0, 4.0, 6.0, 8.0]
    assert interpolated(15.0, [(0.0, 0.0), (10.0, 100.0), (20.0, 300.0)]) == 200.0
    assert interpolated(25.0, [(0.0, 0.0), (10.0, 100.0)]) == 100.0


def test_speedup_over_workers_is_seconds_an_epoch_against_one_worker(tmp_path: Path) -> None:
    for workers, ssgd, cocod in ((2, 6.0, 5.0), (4, 4.0, 2.5)):
        write_run(tmp_path, f"ssgd-{workers}", [0.8, 0.8], ssgd, [SSGD, f"cluster.num_workers={workers}"])
        write_run(tmp_path, f"cocod-{workers}", [0.8, 0.8], cocod, [COCOD, f"cluster.num_workers={workers}"])
    assert scaling(comparison_of(tmp_path).groups) is not None
    write_run(tmp_path, "one", [0.8, 0.8], 10.0, [SSGD, "cluster.num_workers=1"])
    found = scaling(comparison_of(tmp_path).groups)
    assert found is not None
    assert found.reference == "ssgd on 1 worker"
    assert found.series == {
        "cocod": [(1, 1.0), (2, 2.0), (4, 4.0)],
        "ssgd": [(1, 1.0), (2, pytest.approx(10 / 6)), (4, 2.5)],
    }


def test_speedup_over_workers_keeps_tasks_models_and_clocks_apart(tmp_path: Path) -> None:
    for workers in (1, 2):
        write_run(tmp_path, f"a-{workers}", [0.8, 0.8], 10.0 / workers, [SSGD, f"cluster.num_workers={workers}"])
    write_run(tmp_path, "other model", [0.8, 0.8], 1.0, [COCOD, "cluster.num_workers=4", "model.name=mlp"])
    write_run(tmp_path, "emulated", [0.8, 0.8], 1.0, [COCOD, "emulate.slowdown=[1, 2]"])
    found = scaling(comparison_of(tmp_path).groups)
    assert found is not None
    assert found.series == {"ssgd": [(1, 1.0), (2, 2.0)]}


def test_the_table_alone_needs_no_matplotlib(fixture: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"from cocod_accel import cli; sys.exit(cli.main(['compare', {str(fixture)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "add --out DIR" in done.stdout


def test_out_holds_tables_figures_and_the_page(fixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(fixture, "one", [0.8, 0.8], 10.0, [SSGD, "cluster.num_workers=1", "seed=5"])
    assert cli.main(["compare", str(fixture), "--out", str(tmp_path / "out" / "deep")]) == 0
    assert "12 files in" in capsys.readouterr().out
    out = tmp_path / "out" / "deep"
    figures = ("loss_over_epochs", "accuracy_over_time", "speedup_over_workers", "timeline")
    for name in figures:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        words = " ".join(ElementTree.parse(out / f"{name}.svg").getroot().itertext())
        for word in {
            "loss_over_epochs": ("epoch", "training loss (cross-entropy)", "ssgd 2 workers, n=3"),
            "accuracy_over_time": ("training time (s)", "test accuracy", "target 80%"),
            "speedup_over_workers": ("number of workers", "time speedup, ssgd on 1 worker = 1"),
            "timeline": ("milliseconds", "worker 1", "waiting for communication"),
        }[name]:
            assert word in words
    comparison = comparison_of(fixture)
    assert (out / "results.md").read_text() == markdown(comparison)
    assert (out / "results.csv").read_text() == results_csv(comparison)


# -------------------------------------------------------------------------------------------------- spans


def test_shares_of_a_worker_are_those_computed_by_hand(tmp_path: Path) -> None:
    (one, two) = shares(read_spans(write_run(tmp_path, "run")))
    # 20 steps of 0.1 s, each with a wait of 0.02 s at the end of a transfer of 0.03 s.
    assert (one.rank, two.rank) == (0, 1)
    assert one.compute_seconds == pytest.approx(20 * 0.08)
    assert one.wait_seconds == pytest.approx(20 * 0.02)
    assert one.communicate_seconds == pytest.approx(20 * 0.03)
    assert one.hidden_seconds == pytest.approx(20 * 0.01)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (min(p), max(p))), max_size=8))
def test_intervals_measure_their_points(intervals: list[tuple[int, int]]) -> None:
    as_floats = [(float(a), float(b)) for a, b in intervals]
    points_in = {i for a, b in intervals for i in range(a, b)}
    assert length(merged(as_floats)) == len(points_in)
    assert overlap(merged(as_floats), [(5.0, 12.0), (20.0, 22.0)]) == len(points_in & ({*range(5, 12)} | {20, 21}))


def test_a_window_avoids_the_breaks_between_epochs() -> None:
    steps = [Span(0, i, "compute", i * 0.1, (i + 1) * 0.1) for i in range(50)]
    steps += [Span(0, i, "compute", 3.0 + i * 0.1, 3.0 + (i + 1) * 0.1) for i in range(50, 100)]  # 3 s of evaluation
    begin = window(steps, 1.0)
    assert begin + 1.0 <= 5.0 + 1e-6 or begin >= 8.0 - 1e-6


def test_a_trace_has_one_process_a_run_and_events_that_nest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_run(tmp_path, name) for name in ("a", "b")]
    assert cli.main(["trace", str(folders[0])]) == 0
    assert "120 spans in" in capsys.readouterr().out
    assert len(json.loads((folders[0] / "trace.json").read_text())["traceEvents"]) == 120 + 1 + 2 * 2 * 2
    assert cli.main(["trace", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: --out: required for 2 runs, which go into one file")
    assert cli.main(["trace", *map(str, folders), "--out", str(tmp_path / "both.json")]) == 0
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["a", "b"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {1, 2}
    assert all(event["dur"] >= 0 and isinstance(event["args"]["step"], int) for event in complete)
    first = next(event for event in complete if event["cat"] == "wait")
    assert (first["ts"], first["dur"]) == (pytest.approx(180_000), pytest.approx(20_000))  # step 1 is 0.1 to 0.2 s


def test_transfers_at_the_same_time_get_lanes_of_their_own() -> None:
    spans = [Span(0, i, "communicate", start, end) for i, (start, end) in enumerate([(0, 3), (1, 2), (2, 4), (3, 5)])]
    assert sublanes(spans) == [0, 1, 1, 0]
    events = [event for event in trace({"run": spans})["traceEvents"] if event["ph"] == "X"]
    assert [event["tid"] for event in events] == [1, 2, 2, 1]


def test_a_run_without_spans_has_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, "run")
    for file in folder.glob("spans/*"):
        file.unlink()
    assert cli.main(["trace", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("error: run: has no spans; logging.spans=true records them")


def test_ticks_of_accuracy_say_what_they_are(fixture: Path) -> None:
    """72.5 % is not 73 %."""
    axes = draw_figures(comparison_of(fixture, 0.8), None, {})["accuracy_over_time"].axes[0]
    axes.set_yticks([0.7, 0.725, 0.75])
    axes.set_ylim(0.7, 0.75)
    labels = [axes.yaxis.get_major_formatter()(value) for value in (0.7, 0.725, 0.75)]
    assert [float(label.rstrip("%")) for label in labels] == pytest.approx([70.0, 72.5, 75.0])
