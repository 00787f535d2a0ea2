"""The benchmark: contenders that train what they should, figures computed by hand, and the real command on tiny settings."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.links import results
from benchmarks.links.__main__ import main
from benchmarks.links.contenders import CONTENDERS, available
from benchmarks.links.lab import why_not
from benchmarks.links.meeting import Meeting
from benchmarks.links.prediction import LinkFacts, simulated_step
from benchmarks.links.settings import BenchSettings, load_settings
from cocod_accel.config.strict import ConfigError
from tests.test_trainer import command
from tests.workers import run_workers


def train_all(rank: int) -> dict[str, Any]:
    """Ten steps of every contender from the same start, on batches that differ between workers."""
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    found = {}
    for name in available(list(CONTENDERS)):
        kind = CONTENDERS[name]
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        contender = kind(module, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 5)
        for step in range(10):
            generator = torch.Generator().manual_seed(100 * rank + step)
            inputs, labels = torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
            contender.step(inputs, labels)
        own = [p.detach().clone() for p in contender.module.parameters()]
        with contender.averaged():
            mean = [p.detach().clone() for p in contender.module.parameters()]
        contender.drain()
        contender.close()
        found[name] = own, mean
    return found


def test_every_contender_trains_and_is_evaluated_as_the_mean() -> None:
    first, second = run_workers(2, train_all, seconds=110)

    def same(a: Any, b: Any) -> bool:
        return all(torch.allclose(x, y, rtol=0, atol=1e-6) for x, y in zip(a, b, strict=True))

    for name in first:
        (own, mean), (own_too, mean_too) = first[name], second[name]
        assert all(torch.isfinite(value).all() for value in own)
        if name == "none":
            assert not same(own, own_too), "nothing is communicated"
            continue
        assert same(mean, mean_too)
        assert same(mean, [(a + b) / 2 for a, b in zip(own, own_too, strict=True)])
    # Peers and ours do the same where they should: DDP is ssgd, models averaged every five steps are local's.
    assert same(first["ddp"][0], first["ssgd"][0])
    assert same(first["accelerate_local"][1], first["local"][1])
    assert same(first["asynlocal"][0], first["local"][0])
    if "torchft_local" in first:
        assert same(first["torchft_local"][0], first["local"][0])


def repeat_of(repeat: int, *blocks: tuple[str, float]) -> list[dict[str, Any]]:
    common = {"kind": "step", "repeat": repeat, "ratio": 1.0}
    return [
        {
            **common,
            "contender": name.removeprefix("emulated "),
            "clock": "emulated" if name.startswith("emulated") else "lab",
            "place": place,
            "seconds": seconds,
            "link": {"bandwidth_mbit": 8.0, "payload_seconds": 1.2},
        }
        for place, (name, seconds) in enumerate(blocks)
    ]


def reached(contender: str, seed: int, seconds: float | None, ratio: float = 2.0) -> dict[str, Any]:
    return {
        "kind": "accuracy", "contender": contender, "seed": seed, "reached": seconds, "ratio": ratio, "clock": "lab",
    }  # fmt: skip


MEASURED = {
    "kind": "measured", "ratio": 1.0, "clock": "lab", "compute_seconds": 1.0, "link": {"bandwidth_mbit": 8.0},
    "jitter": 0.0, "interference": 0.0,
}  # fmt: skip
ROWS = [
    {**MEASURED, "communicate_seconds": 1.5},
    {**MEASURED, "communicate_seconds": 1.25},
    # In the second repeat the machine becomes half as fast while cocod's block is on the clock.
    *repeat_of(
        0, ("none", 0.9), ("ddp", 3.0), ("none", 1.1), ("cocod", 1.1), ("none", 1.1), ("emulated cocod", 1.155),
        ("none", 0.9),
    ),
    *repeat_of(1, ("none", 1.0), ("ddp", 3.0), ("none", 1.0), ("cocod", 1.65), ("none", 2.0)),
    *repeat_of(2, ("none", 1.0), ("ddp", 3.3), ("none", 1.0), ("cocod", 1.05), ("none", 1.0)),
    reached("ddp", 0, 10.0), reached("ddp", 1, 12.0), reached("ddp", 2, None),
    reached("cocod", 0, 5.0), reached("cocod", 1, 4.0), reached("cocod", 2, 4.0), reached("pipe", 0, None),
]  # fmt: skip


def test_figures_are_ratios_to_the_blocks_beside_them() -> None:
    steps = results.over_limit(ROWS, 1.0)
    assert steps["cocod"] == pytest.approx({0: 1.0, 1: 1.1, 2: 1.05})
    figure = results.ratio_of(steps, "cocod", "none")
    assert figure is not None
    assert (round(figure.median, 6), figure.n) == (1.05, 3)
    ddp = results.ratio_of(steps, "ddp", "cocod")
    assert ddp is not None
    assert ddp.median == pytest.approx(3.0)  # of 3 / 1, 3 / 1.1 and 3.3 / 1.05
    assert results.ratio_of(steps, "pipe", "none") is None


def test_times_to_accuracy_are_compared_seed_by_seed() -> None:
    figure = results.accuracy_speedup(ROWS, 2.0, "ddp", "cocod")
    assert figure is not None
    assert (figure.median, figure.low, figure.high, figure.n) == (2.5, 2.25, 2.75, 2)
    table = results.accuracy_table(ROWS).splitlines()
    assert any(line.split()[:4] == ["torch", "DDP", "2", "of"] for line in table)
    assert any(line.startswith("pipe") and "never" in line and "0 of 1" in line for line in table)


def test_a_link_is_described_by_what_was_found_last_and_by_the_blocks_on_it() -> None:
    _, _, line = results.measured_table(ROWS).splitlines()
    # 1.2 s a payload over limits of 1, 1.1, 1, 1.5, 1 and 1 s; the emulated block is not on it
    assert line.split() == ["r_1", "=", "1", "1.25", "8.0", "1000.0", "1250.0", "1.20", "(1.12-1.20)", "step", "time"]


def test_agreement_and_claims_are_printed() -> None:
    assert any(line.split() == ["cocod", "1.100"] for line in results.agreement_table(ROWS).splitlines())
    text = results.summary(ROWS, BenchSettings())
    assert "cocod's step / the limit, r_1 = 1" in text
    assert "torch DDP's time to accuracy / cocod's, r_1 = 2" in text
    assert "emulated link:" not in text
    assert any(line.split()[:5] == ["cocod", "1.00", "/", "1.05", "-4.8%"] for line in text.splitlines())
    assert "simulated against measured: 4.8% apart in the median, 4.8% at worst, of 1" in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ssgd", 1 + 3), ("pipe", 3), ("local", 1 + 3 / 5), ("cocod", 1 + 0.1 * 3 / 5), ("asynlocal", 1 + 3 / 5)],
)
def test_the_simulator_is_told_of_the_link_alone(name: str, expected: float) -> None:
    facts = LinkFacts(num_workers=2, ratio=3.0, interference=0.1, jitter=0.0)
    assert simulated_step(name, 5, facts, 10) == pytest.approx(expected, rel=2e-3)
    uneven = simulated_step(name, 5, LinkFacts(2, 3.0, 0.1, jitter=0.2), 10)
    assert uneven == pytest.approx(expected, rel=0.1)


def test_any_block_of_whole_rounds_can_be_predicted() -> None:
    facts = LinkFacts(num_workers=2, ratio=7.0, interference=0.0, jitter=0.0)
    assert simulated_step("local", 7, facts, 14) == pytest.approx(2.0, rel=2e-3)


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + '{"kind": "st')
    assert results.read_rows(path) == ROWS[:1]
    path.write_text("")
    with pytest.raises(ValueError, match="contains no rows"):
        results.read_rows(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (["steps.contenders=[ddpp]"], r"steps.contenders=\['ddpp'\]: unknown; choose from none, ddp"),
        (["steps.closer=[cocood]"], r"steps.closer=\['cocood'\]: unknown; choose from none, ddp"),
        (["steps.steps=7"], "steps.steps=7: must be a multiple of the period"),
        (["steps.ratios=[0]"], r"steps.ratios=\[0.0\]: must be positive"),
        (["accuracy.target=80"], r"accuracy.target=80.0: must be a share in \(0, 1\]"),
        (["step.repeats=3"], "step"),
        (["num_workers=1"], "num_workers=1: must be at least 2"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(arguments)
    assert "\n" not in str(caught.value)


def test_what_the_command_cannot_do_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, line in (
        (["steps.steps=7"], "error: steps.steps=7: must be a multiple of the period"),
        (["--only-tables"], f"error: --only-tables: {tmp_path}/rows.jsonl does not exist; run the benchmark first"),
    ):
        assert main([*arguments, "--out", str(tmp_path), "num_workers=2"]) == 2
        assert capsys.readouterr().err == line + "\n"
    (tmp_path / "rows.jsonl").write_text("")
    assert main(["--only-tables", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/rows.jsonl: contains no rows")


def test_tables_are_printed_again_from_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["--only-tables", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith((tmp_path / "tables.txt").read_text())
    assert (tmp_path / "step_time.svg").is_file()


def test_the_configuration_in_the_repository_is_the_default() -> None:
    assert load_settings(["configs/bench/links.yaml"]) == load_settings([])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("place", ["lab", "loopback"])
def test_the_real_command_on_tiny_settings(place: str, tmp_path: Path) -> None:
    if place == "lab" and why_not() is not None:
        pytest.skip(str(why_not()))
    tiny = [
        "steps.ratios=[1.0]", "steps.emulated_ratios=[1.0]", "steps.repeats=1", "steps.steps=5", "steps.batch_size=8",
        "steps.contenders=[ddp,accelerate_local,local,cocod]", "accuracy.ratios=[1.0]", "accuracy.num_seeds=1",
        "accuracy.contenders=[ddp,cocod]", "accuracy.target=0.2",
        "steps.closer_repeats=2",
    ]  # fmt: skip
    prefix = [] if place == "lab" else ["--no-lab"]
    done = command(
        "python", "-m", "benchmarks.links", "configs/bench/links.yaml", *tiny, *prefix, "--out", str(tmp_path), seconds=200
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "step_time.png").stat().st_size > 10_000
    rows = results.read_rows(tmp_path / "rows.jsonl")
    clocks = {row["clock"] for row in rows if row["kind"] == "step"}
    learned = {row["contender"]: row["reached"] for row in rows if row["kind"] == "accuracy"}
    if place == "lab":
        assert clocks == {"lab", "emulated"}
        assert learned.keys() == {"ddp", "cocod"}
        assert "accelerate LocalSGD" in done.stdout
    else:
        assert clocks == {"emulated"}
        assert learned.keys() == {"cocod"}, "only our own can be emulated"
        assert "emulated link" in done.stdout
    by_repeat = results.over_limit(rows, 1.0, "lab" if place == "lab" else "emulated")
    assert {name: sorted(found) for name, found in by_repeat.items() if name in ("cocod", "local")} == {
        "cocod": [0, 1, 2],
        "local": [0],
    }, "cocod is looked at more closely"
    assert all(seconds is not None and seconds > 0 for seconds in learned.values())
    assert json.loads((tmp_path / "machine.json").read_text())["cores"] >= 1


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_the_benchmark_of_periods_on_tiny_settings(tmp_path: Path) -> None:
    tiny = ["--repeats", "1", "--steps", "5", "--seconds", "1", "--no-lab", "--out", str(tmp_path)]
    done = command("python", "-m", "benchmarks.plan", *tiny, seconds=180)
    assert done.returncode == 0, done.stderr
    assert "two workers on an emulated link" in done.stdout
    assert "recommended" in done.stdout
    tried = {row["period"] for row in results.read_rows(tmp_path / "rows.jsonl") if row["kind"] == "period"}
    assert {1, 2, 3, 4} <= tried


def meet(rank: int, path: str) -> list[float]:
    meeting = Meeting(Path(path), rank, 2)
    left = []
    for turn in range(20):
        if turn % 2 == rank:  # each is late half of the time
            busy_until = time.perf_counter() + 0.002
            while time.perf_counter() < busy_until:
                pass
        came = time.perf_counter()
        meeting.wait()
        left += [came, time.perf_counter()]
    return left


def test_nobody_leaves_a_meeting_before_everybody_has_come(tmp_path: Path) -> None:
    Meeting.prepare(tmp_path / "meeting", 2)
    first, second = run_workers(2, meet, str(tmp_path / "meeting"))
    for turn in range(20):
        came = max(first[2 * turn], second[2 * turn])
        assert min(first[2 * turn + 1], second[2 * turn + 1]) >= came
