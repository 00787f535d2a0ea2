"""The paper's grid: its cells, resumption, figures computed by hand, and the real command on the embedded default."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cocod_accel import cli
from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.plan.learned import learned
from cocod_accel.reproduce import learning
from cocod_accel.reproduce.cell import append, run
from cocod_accel.reproduce.grid import CONFIGS, MODELS, PAYLOAD_BYTES, Cell, cells, scale_of
from cocod_accel.reproduce.intervals import Interval, student_t95
from cocod_accel.reproduce.running import done_rows, fingerprint, missing, read_rows
from cocod_accel.reproduce.tables import (
    Grid,
    common_loss,
    difference,
    iterations_table,
    length_table,
    report,
    skew_table,
    steps_to,
    time_claims,
)
from cocod_accel.simulator.cluster import load_cluster
from cocod_accel.simulator.simulate import configured
from cocod_accel.tasks import build_model, task_facts
from cocod_accel.trainer.work import Work
from tests.test_trainer import command


@pytest.mark.parametrize("scale", ["smoke", "small", "full"])
def test_every_cell_is_a_configuration_that_can_be_planned(scale: str) -> None:
    found = cells(scale_of(scale))
    assert len({cell.name for cell in found}) == len(found)
    for cell in (cell for cell in found if cell.seed == 1 or cell.part == "scaling"):  # other seeds differ in nothing else
        config = configured(cell.on(), list(cell.arguments))
        assert config.seed == cell.seed
        assert config.algorithm.name == cell.variant.removesuffix("_ps")
        if scale == "small" and cell.learns:
            Work.of(config, task_facts(config).num_train, 0)


def test_the_full_grid_is_the_papers() -> None:
    """Section 5: batches, rates, schedule and period of both environments."""
    full = {cell.name: cell for cell in cells(scale_of("full"))}
    for name, batches, rate in (
        ("heterogeneous-resnet18-cocod-n16-seed0", [32] * 8 + [64] * 8, 0.24),
        ("heterogeneous-vgg16-ssgd-n16-seed0", [32] * 16, 0.16),
        ("homogeneous-vgg16-local-n16-seed2", [32] * 16, 0.16),
        ("heterogeneous-vgg16-pipe_ps-cifar100-n16-seed1", [32] * 8 + [64] * 8, 0.24),
    ):
        config = load_config(list(full[name].arguments))
        work = Work.of(config, task_facts(config).num_train, 0)
        assert list(work.plan.batches) == batches
        assert work.learning_rate(config, 50.0) == pytest.approx(rate)
        assert work.learning_rate(config, 80.0) == pytest.approx(rate / 10)
        assert config.period_by_epoch == [(0, 1), (10, 5)]
        assert config.schedule.epochs == 120
        assert config.task.name == ("cifar100" if "cifar100" in name else "cifar10")


@pytest.mark.parametrize("model", list(MODELS))
def test_the_virtual_clock_has_the_papers_payload(model: str) -> None:
    config = load_config(["configs/homogeneous_16gpu.yaml", f"configs/tasks/cifar10_{model}.yaml"])
    built = build_model(config, task_facts(config))
    assert sum(p.numel() * 4 for p in built.parameters()) == PAYLOAD_BYTES[model]
    cell = next(cell for cell in cells(scale_of("small")) if cell.model == model)
    cluster = cell.on()
    assert cluster.payload_bytes == PAYLOAD_BYTES[model]
    # A step with this grid's basic batch takes what the paper's takes with 32.
    assert cluster.batch_size == load_config(list(cell.arguments)).batch_size == 16
    assert cluster.step_seconds == load_cluster(CONFIGS / "cluster" / f"{cell.cluster}.yaml").step_seconds


# --------------------------------------------------------------------------------------------------- figures


def cell(part: str, variant: str, seed: int = 0, setting: str = "", model: str = "resnet18", n: int = 16) -> Cell:
    return Cell(part, model, variant, setting, n, seed, (), "paper")


def row(accuracy: float, seconds: float = 1.0, evaluations: Any = (), samples: float = 100.0) -> dict[str, Any]:
    times = {"train_seconds": seconds, "samples_per_second": samples / seconds}
    return {"best_accuracy": accuracy, **times, "evaluations": list(evaluations)}


def grid_of(*pairs: tuple[Cell, dict[str, Any]]) -> Grid:
    return Grid([c for c, _ in pairs], {c.name: r for c, r in pairs})


def test_paired_intervals_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, standard deviation 1, t(2) = 4.303.
    interval = Interval.of({0: 11.0, 1: 12.0, 2: 13.0, 7: 99.0}, {0: 10.0, 1: 10.0, 2: 10.0})
    assert interval is not None
    assert (interval.mean, interval.n) == (2.0, 3)
    assert interval.high - interval.mean == pytest.approx(4.303 / math.sqrt(3), rel=1e-4)
    assert interval.verdict == "excludes a loss of more than 1.5 points"
    assert Interval(-1.0, -2.0, 0.0, 3).verdict == "undecided"
    assert Interval(-3.0, -4.0, -2.0, 3).verdict == "a loss of more than 1.5 points"
    assert Interval.of({0: 1.0}, {0: 2.0}) is None


#: Two-sided 95% quantiles as tables of Student's t print them, by degrees of freedom.
STUDENT = {
    1: 12.7062, 2: 4.3027, 9: 2.2622, 10: 2.2281, 11: 2.2010, 15: 2.1314, 20: 2.0860, 25: 2.0595, 29: 2.0452, 30: 2.0423,
    31: 2.0395, 32: 2.0369, 35: 2.0301, 40: 2.0211, 50: 2.0086, 60: 2.0003, 80: 1.9901, 100: 1.9840, 120: 1.9799,
    1000: 1.9623, 10**9: 1.9600,
}  # fmt: skip


@pytest.mark.parametrize("degrees", STUDENT)
def test_quantiles_are_those_of_students_t(degrees: int) -> None:
    assert student_t95(degrees) == pytest.approx(STUDENT[degrees], abs=6e-5)


def test_quantiles_fall_with_every_seed() -> None:
    found = [student_t95(degrees) for degrees in range(1, 400)]
    assert all(later < earlier for earlier, later in pairwise(found))
    assert found[-1] > 1.96


@pytest.mark.parametrize(("seeds", "quantile"), [(2, 12.7062), (10, 2.2622), (11, 2.2281), (12, 2.2010), (41, 2.0211)])
def test_an_interval_is_as_wide_as_its_seeds_allow(seeds: int, quantile: float) -> None:
    ours = {seed: float(seed % 2) for seed in range(seeds)}
    interval = Interval.of(ours, dict.fromkeys(range(seeds), 0.0))
    assert interval is not None
    deviation = statistics.stdev(ours.values()) / math.sqrt(seeds)
    assert interval.high - interval.mean == pytest.approx(quantile * deviation, rel=1e-4)
    assert interval.mean - interval.low == pytest.approx(quantile * deviation, rel=1e-4)


def test_an_order_that_is_not_the_papers_is_said() -> None:
    times = {"ssgd": 4.0, "pipe": 3.0, "local": 2.0, "cocod": 1.0}
    grid = grid_of(*((cell("homogeneous", name), row(0.5, seconds)) for name, seconds in times.items()))
    assert time_claims(grid, "homogeneous", "resnet18")[0].endswith("as in the paper")
    grid = grid_of(*((cell("homogeneous", name), row(0.5, 5 - seconds)) for name, seconds in times.items()))
    assert "NOT the paper's" in time_claims(grid, "homogeneous", "resnet18")[0]
    grid = grid_of(*((cell("heterogeneous", name), row(0.5, s)) for name, s in (("ssgd", 2.0), ("ssgd_ps", 3.0))))
    assert "does NOT help S-SGD" in time_claims(grid, "heterogeneous", "resnet18")[0]


def test_fewer_samples_are_no_speed() -> None:
    """AsynLocal-SGD has epochs of whole rounds: done sooner with half of the samples, it is slower."""
    times = {"ssgd": 4.0, "ssgd_ps": 3.0, "pipe": 3.0, "pipe_ps": 2.5, "cocod": 2.0}
    pairs = [(cell("heterogeneous", name), row(0.5, seconds)) for name, seconds in times.items()]
    asynlocal = cell("heterogeneous", "asynlocal")
    grid = grid_of(*pairs, (asynlocal, row(0.5, 1.5, samples=50.0)))
    assert time_claims(grid, "heterogeneous", "resnet18")[-1] == "small_resnet: fastest is CoCoD-SGD, as in the paper"
    grid = grid_of(*pairs, (asynlocal, row(0.5, 1.5)))
    assert time_claims(grid, "heterogeneous", "resnet18")[-1].endswith("AsynLocal-SGD, NOT the paper's CoCoD-SGD")


def test_a_run_that_diverged_is_no_accuracy() -> None:
    grid = grid_of(
        (cell("skew", "ssgd", 0, "alpha=0.1"), row(0.6)),
        (cell("skew", "cocod", 0, "alpha=0.1 k=5"), row(0.5)),
        (cell("skew", "cocod", 1, "alpha=0.1 k=5"), {"failed": "worker 3: the loss is not finite"}),
        (cell("skew", "cocod", 0, "alpha=0.1 k=24"), {"failed": "worker 3: the loss is not finite"}),
    )
    line = skew_table(grid).splitlines()[-1]
    assert line.split() == ["alpha=0.1", "2", "60.00", "50.00", "(1", "of", "2", "diverged)", "diverged"]
    assert "4 of 4 cells" in report(grid)
    good = {seed: row(0.5 + seed / 100) for seed in range(3)}
    assert difference({**good, 2: {"failed": "worker 3"}}, good) == "no interval, 1 of 6 runs diverged"
    assert difference(good, good) == "+0.00 points (95% +0.00 to +0.00, n=3): excludes a loss of more than 1.5 points"


def test_shards_alike_have_a_paired_interval_and_skewed_ones_have_none() -> None:
    accuracies = {
        ("ssgd", ""): (0.60, 0.61, 0.62),
        ("cocod", " k=5"): (0.59, 0.60, 0.61),
        ("cocod", " k=24"): (0.50, 0.53, 0.51),
    }
    grid = grid_of(
        *(
            (cell("skew", variant, seed, f"alpha={alpha}{k}"), row(accuracy))
            for alpha in ("inf", "0.1")
            for (variant, k), found in accuracies.items()
            for seed, accuracy in enumerate(found)
        )
    )
    lines = [line for line in skew_table(grid).splitlines() if "paired by seed" in line]
    assert [line.split(":")[0] for line in lines] == ["alpha=inf, k=5", "alpha=inf, k=24"]
    assert "-1.00 points (95% -1.00 to -1.00, n=3): excludes a loss of more than 1.5 points" in lines[0]
    assert lines[1].endswith("a loss of more than 1.5 points")
    assert "excludes" not in lines[1]


def test_shorter_runs_stand_beside_those_of_table_1() -> None:
    accuracies = {"epochs=10": (0.50, 0.40), "epochs=20": (0.55, 0.54), "": (0.60, 0.61)}
    grid = grid_of(
        *(
            (cell("length" if setting else "homogeneous", variant, seed, setting), row(accuracy + seed / 100))
            for setting, pair in accuracies.items()
            for variant, accuracy in zip(("ssgd", "cocod"), pair, strict=True)
            for seed in range(3)
        )
    )
    lines = [line.split(maxsplit=2) for line in length_table(grid).splitlines()[2:5]]
    assert [line[:2] for line in lines] == [["small_resnet", "10"], ["small_resnet", "20"], ["small_resnet", "table"]]
    differences = ["-10.00 points (95% -10.00 to -10.00, n=3)", "-1.00 points", "+1.00 points"]
    for line, apart in zip(lines, differences, strict=True):
        assert apart in line[2]


def test_steps_to_a_loss_that_all_reach() -> None:
    def curve(*losses: float) -> list[list[float]]:
        return [[i + 1, 10 * (i + 1), 0.5, 1.0, 0.1, 1.0, loss] for i, loss in enumerate(losses)]

    slow, fast = row(0.5, 1.0, curve(2.0, 1.504, 1.6)), row(0.5, 1.0, curve(1.7, 1.3, 1.2))
    grid = grid_of((cell("iterations", "ssgd", n=1), slow), (cell("iterations", "ssgd", n=2), fast))
    assert common_loss(grid) == 1.81  # 1.2 times the higher of both lowest, rounded up
    assert (steps_to(slow, 1.51), steps_to(fast, 1.51)) == (20, 20)
    assert steps_to(fast, 1.7) == 10


def test_linear_is_by_the_speed_of_all_workers() -> None:
    """Two workers, one of them twice as fast, are three of the slow one."""

    def curve(steps: int) -> dict[str, Any]:
        return row(0.5, 1.0, [[1, steps, 0.5, 1.0, 0.1, 1.0, 1.0]])

    grid = grid_of(
        (cell("iterations", "cocod", n=1), curve(90)),
        (cell("iterations", "cocod", n=2), curve(60)),
        (cell("iterations", "cocod", setting="mixed", n=2), curve(36)),
    )
    assert [line.split()[-3:] for line in iterations_table(grid).splitlines()[2:]] == [
        ["90", "1.00x", "100%"],
        ["60", "1.50x", "75%"],
        ["90", "1.00x", "100%"],
        ["36", "2.50x", "83%"],
    ]


def test_the_page_shows_what_the_rows_in_the_repository_say() -> None:
    """And they are of the grid as it is: a change of its size makes them rows of another."""
    grid = cells(scale_of("small"))
    rows = read_rows([Path("docs/reproduction/small.jsonl")])
    assert [cell.name for cell in missing(grid, rows)] == []
    page = Path("docs/reproduction.md").read_text()
    _, *tables = report(Grid(grid, done_rows(grid, rows))).split("\n\n")
    assert len(tables) == 6
    for table in tables:
        assert table.split("\n", 1)[1] in page


def test_of_what_every_method_learns_too_and_plan_expects_just_that() -> None:
    """Not all of these cells have been run. To renew learned.json, copy what `cocod reproduce --only learning` writes."""
    grid = cells(scale_of("small"), ["learning"])
    known = Grid(grid, done_rows(grid, read_rows([Path("docs/reproduction/learning.jsonl")])))
    _, *tables = report(known).split("\n\n")
    [table] = tables
    assert table.split("\n", 1)[1] in Path("docs/reproduction.md").read_text()
    assert learning.learned(known) == learned()
    # Without the runs with 64 workers nothing can be said of so many.
    rest = {name: row for name, row in known.rows.items() if "-n64-" not in name}
    assert learning.learned(Grid(grid, rest)) is None


# --------------------------------------------------------------------------------------------------- running


def test_a_cell_with_a_row_of_the_same_settings_is_done(tmp_path: Path) -> None:
    todo = cells(scale_of("smoke"), ["homogeneous"])
    rows = [{"name": c.name, "made_with": fingerprint(c)} for c in todo[:3]]
    rows[2]["made_with"] += " other"
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"name": "cut off')
    assert missing(todo, read_rows([file, tmp_path / "none.jsonl"])) == todo[2:]
    # A row of other settings hides none, whichever comes last; what was cut off takes none with it.
    append(file, json.dumps({"name": todo[2].name, "made_with": fingerprint(todo[2])}))
    append(file, json.dumps({"name": todo[0].name, "made_with": "another"}))
    assert missing(todo, read_rows([file])) == todo[3:]


def test_what_is_no_row_is_said(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"no": "row"}\n')
    with pytest.raises(ConfigError, match="line 1 is not the row"):
        read_rows([file])


def test_overrides_make_other_rows_unless_they_change_nothing() -> None:
    one = cells(scale_of("smoke"), ["homogeneous"])[0]
    assert fingerprint(one, ("task.data_dir=elsewhere", "logging.every_steps=7")) == fingerprint(one)
    others = [fingerprint(one, (override,)) for override in ("schedule.epochs=3", "seed=7", "batch_size=8")]
    assert len({*others, fingerprint(one)}) == 4
    # The paper's step is one of whatever batch is basic.
    assert one.on(("batch_size=8",)).batch_size == 8


def test_a_cell_whose_settings_were_edited_meanwhile_is_not_run(tmp_path: Path) -> None:
    one = cells(scale_of("smoke"), ["scaling"])[0]
    with pytest.raises(ConfigError, match="edited while the grid ran"):
        run(one, tmp_path, [], "another")
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_smoke_grid_runs_goes_on_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "smoke"
    options = ["--scale", "smoke", "--only", "homogeneous,iterations,scaling", "--out", str(out)]
    planned = command("cocod", "reproduce", *options, "--dry-run", seconds=60)
    assert planned.returncode == 0, planned.stderr
    total = int(planned.stdout.split()[-6])
    done = command("cocod", "reproduce", *options, seconds=240)
    assert done.returncode == 0, done.stderr
    assert f"{total} of {total} cells; seconds are virtual" in done.stdout
    assert "Table 1: equal workers" in done.stdout
    assert "small_resnet: time order " in done.stdout
    for name in ("tables.txt", "iterations.png", "homogeneous-resnet18/report.html", "scaling-vgg16/report.html"):
        assert (out / name).is_file(), name
    # Nothing is run again; and rows alone, elsewhere, give the same tables and figures.
    again = command(
        "cocod", "reproduce", *options, "--rows", str(out / "rows.jsonl"), "--out", str(tmp_path / "b"), seconds=100
    )
    assert again.returncode == 0, again.stderr
    assert "to run" not in again.stdout
    assert (tmp_path / "b" / "tables.txt").read_text() == (out / "tables.txt").read_text()
    for name in ("results.csv", "runs.csv"):
        first, second = ((folder / "homogeneous-vgg16" / name).read_text() for folder in (out, tmp_path / "b"))
        assert first.splitlines()[0] == second.splitlines()[0]
        assert len(first.splitlines()) == len(second.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_part_of_the_grid_runs_goes_on_and_draws(tmp_path: Path) -> None:
    """One part with a figure of its own, cut short; ``make test-slow`` runs the parts of the tables."""
    out = tmp_path / "smoke"
    options = ["--scale", "smoke", "--only", "iterations", "schedule.epochs=1", "task.test_limit=40"]
    total = len(cells(scale_of("smoke"), ["iterations"]))
    done = command("cocod", "reproduce", *options, "--out", str(out), seconds=200)
    assert done.returncode == 0, done.stderr
    assert f"{total} of {total} cells; seconds are virtual" in done.stdout
    assert (out / "iterations.png").is_file()
    # Nothing is run again; and rows alone, elsewhere, give the same tables and figures.
    code = cli.main(["reproduce", *options, "--rows", str(out / "rows.jsonl"), "--out", str(tmp_path / "b")])
    assert code == 0
    assert not (tmp_path / "b" / "rows.jsonl").exists()
    assert (tmp_path / "b" / "tables.txt").read_text() == (out / "tables.txt").read_text()


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = (
        (["--scale", "huge"], "--scale=huge"),
        (["--only", "nothing"], "--only=nothing"),
        (["--jobs", "0", "--scale", "smoke"], "--jobs=0: must be at least 1"),
        (["--rows", str(tmp_path / "no.jsonl")], "no such file"),
        (["--scale", "full"], "needs 16 GPUs"),
        (["--scale", "smoke", "--only", "iterations", "--only-tables", "--out", str(tmp_path / "o")], "has no row of these"),
        (["configs/quickstart.yaml"], "not a key=value override"),
        (["task.data_dir=nowhere", "--only", "length", "--out", str(tmp_path / "p")], "task.data_dir=nowhere"),
    )
    for arguments, said in cases:
        assert cli.main(["reproduce", *arguments]) == 2, arguments
        message = capsys.readouterr().err
        assert said in message
        assert len(message.strip().splitlines()) == 1, message
    done = command("cocod", "reproduce", "--scale", "huge", seconds=60)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)


def test_the_full_grid_prints_its_commands() -> None:
    done = command("cocod", "reproduce", "--scale", "full", "--only", "homogeneous", "--dry-run", seconds=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 48  # two data sets, two models, four algorithms, three seeds
    assert all("accelerate launch" in line and "cocod_accel.train" in line for line in lines)


def test_the_mixed_cells_of_the_full_grid_slow_half_of_the_gpus_down(capsys: pytest.CaptureFixture[str]) -> None:
    """With every algorithm: that a worker is slowed down on a device is shown in test_ahead."""
    assert cli.main(["reproduce", "--scale", "full", "--only", "heterogeneous", "--dry-run"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 72  # two data sets, two models, six variants, three seeds
    slowed = f"emulate.slowdown=[{','.join(['2'] * 8 + ['1'] * 8)}]"
    assert all("configs/accelerate/gpu_8.yaml" in line and slowed in line for line in lines)
