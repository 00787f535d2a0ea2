"""A folder of runs may hold anything: what no run has written is left out with one line, and all others are compared.

``COCOD_TEST_CASES=4000 pytest tests/test_odd_runs.py`` tries 2,000.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cocod_accel import cli
from cocod_accel.runs.reading import read_run, time_to_target
from tests.run_folders import write_run
from tests.test_settings import CASES, ran
from tests.trees import ODD, a_place, damaged_text, replaced

# ------------------------------------------------------------------------------------------ whatever it holds


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run, and one to be damaged, kept aside."""
    root = tmp_path_factory.mktemp("odd")
    write_run(root / "runs", "good", overrides=["algorithm.name=ssgd"])
    write_run(root, "whole", [0.5, 0.7, 0.8], overrides=["cluster.num_workers=1"])
    return root


FILES = ["summary.json", "metrics.jsonl", "config.yaml", "spans/rank_0.jsonl"]


def parsed(path: Path) -> Any:
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def written(path: Path, tree: Any) -> str:
    if path.suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in (tree if isinstance(tree, list) else [tree]))
    return json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree, allow_unicode=True)


def damage(folder: Path, name: str, how: str, chance: random.Random) -> None:
    """Something about one file of a run is odd."""
    path = folder / name
    if how == "text":
        path.write_text(damaged_text(path.read_text(), chance))
        return
    tree = parsed(path)
    for _ in range(chance.choice([1, 1, 2, 5])):
        place = a_place(tree, chance)
        if how == "deleted" and place:
            tree = replaced(tree, place, None, deleted=True)
        elif how == "renamed" and place:
            tree = replaced(tree, place, None, renamed=chance.choice(["", "x", "kind", "step", "accuracy"]))
        else:
            tree = replaced(tree, place, chance.choice(ODD))
    path.write_text(written(path, tree), encoding="utf-8", errors="surrogatepass")


@settings(max_examples=CASES // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*FILES, *FILES[:3]]),
    how=st.sampled_from(["text", "value", "value", "value", "deleted", "renamed"]),
    seed=st.integers(0, 2**32),
    is_drawn=st.integers(0, 19).map(lambda number: number == 0),
    has_summary=st.booleans(),
)
def test_an_odd_run_is_compared_or_left_out_with_one_line(
    runs: Path, name: str, how: str, seed: int, is_drawn: bool, has_summary: bool
) -> None:
    odd = runs / "runs" / "odd"
    shutil.rmtree(odd, ignore_errors=True)
    shutil.copytree(runs / "whole", odd)
    damage(odd, name, how, random.Random(seed))
    if not has_summary:
        (odd / "summary.json").unlink()
    out = runs / "out"
    code, said, err = ran(["compare", str(runs / "runs"), *(["--out", str(out)] if is_drawn else [])])
    assert code == 0, err
    assert "ssgd" in said
    lines = err.splitlines()
    assert len(lines) <= 1, err
    assert all(line.startswith(f"skipped: {odd}") and len(line) < 1000 for line in lines), err
    assert len(said) < 20_000
    if is_drawn:
        assert (out / "report.html").stat().st_size < 2_000_000
    for command in (["watch", str(odd), "--once"], ["trace", str(odd), "--out", str(runs / "trace.json")]):
        code, said, err = ran(command)
        assert code in (0, 1, 2), command
        assert len(err.splitlines()) == (code == 2), (command, err)
        assert not err or err.startswith("error: ")
        assert len(err) + len(said) < 5000


# ------------------------------------------------------------------------------------------ what it may be


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 33)


def expanding(path: Path) -> None:
    """A billion laughs: YAML that is short, and has no end once it is read."""
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path.write_text("\n".join(["a0: &a0 [ha]", *levels]))


SHAPES = [a_pipe, endless, a_folder, nested, huge, expanding]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_a_run_is_left_out(
    name: str, shape: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "good")
    odd = write_run(tmp_path, "odd", overrides=["algorithm.name=ssgd"])
    (odd / name).unlink()
    shape(odd / name)
    assert cli.main(["compare", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    said, err = capsys.readouterr()
    assert "cocod" in said
    if name.startswith("spans"):  # its figures are compared all the same
        assert not err
        assert "ssgd" in said
    elif err:
        assert err.startswith(f"skipped: {odd}")
        assert err.count("\n") == 1
    else:
        assert name == "metrics.jsonl"
        assert shape in (nested, expanding), "rows that cannot be read are left out"
        assert "cannot be read and left out" in said or "half-written" in said
    assert cli.main(["watch", str(odd), "--once"]) in (0, 1, 2)


def test_a_number_that_is_none_is_left_out(tmp_path: Path) -> None:
    """A list, 10^400: of rows the row, of a summary the run."""
    folder = write_run(tmp_path, "run", [0.5, 0.8])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[1]["loss"], rows[2]["step"] = [1], 10**400
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    assert run.note == "run: 2 rows cannot be read and left out"
    assert len(run.rows) == len(rows) - 2
    for key, value in (("train_seconds", [1]), ("best_accuracy", 10**400), ("comm_bytes", -1), ("clock", "x" * 10_000)):
        bad = write_run(tmp_path, f"bad-{key}", summary={key: value})
        with pytest.raises(ValueError, match=rf"bad-{key}: [^\n]{{1,250}}$"):
            read_run(bad)


# ---------------------------------------------------------------------------------------------- many of them


def test_long_runs_are_thinned_out_and_their_figures_are_not(tmp_path: Path) -> None:
    accuracies = [0.9 * (1 - 0.999**epoch) for epoch in range(1, 3001)]
    folder = write_run(tmp_path, "long", accuracies, rows_per_epoch=1)
    whole, thin = read_run(folder), read_run(folder, 100)
    for kind in ("train", "eval"):
        rows = [[row for row in run.rows if row["kind"] == kind] for run in (whole, thin)]
        assert len(rows[0]) == 3000
        assert 50 <= len(rows[1]) <= 101
        assert rows[1][0] == rows[0][0]
        assert rows[1][-1] == rows[0][-1]
        steps = [row["step"] for row in rows[1][:-1]]
        assert len({later - earlier for earlier, later in pairwise(steps)}) == 1, "evenly"
    for target in (0.1, 0.5, 0.7, 0.85):
        assert time_to_target(thin, target) == time_to_target(whole, target)
    (folder / "summary.json").unlink()
    assert read_run(folder, 100).measures() == read_run(folder).measures()


MEASURE = """
import resource, sys
from cocod_accel import cli
code = cli.main(["compare", *sys.argv[1:]])
print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hundreds_of_long_runs_fit_in_memory_and_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """300 runs of 5,000 rows each: a page of less than 10 MB, in less than 1 GB."""
    many_runs(tmp_path / "runs", 300)
    line = [sys.executable, "-c", MEASURE, str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split("PEAK ")[1])
    size = (tmp_path / "out" / "report.html").stat().st_size
    with capsys.disabled():
        print(f"\n  300 runs of 5,000 rows: a page of {size / 1e6:.1f} MB, {peak / 1e9:.2f} GB")
    assert size < 10e6
    assert peak < 1e9


def many_runs(root: Path, count: int) -> None:
    """Of 60 configurations, five seeds each; 4,000 training rows and 1,000 evaluations."""
    first = write_run(root, "run-0", [0.9 * (1 - 0.995**epoch) for epoch in range(1, 1001)], rows_per_epoch=4)
    config = (first / "config.yaml").read_text()
    for number in range(1, count):
        folder = root / f"run-{number}"
        shutil.copytree(first, folder)
        text = config.replace("seed: 0\n", f"seed: {number % 5}\n")
        text = text.replace("batch_size: 32\n", f"batch_size: {32 + number // 5}\n")
        (folder / "config.yaml").write_text(text)
