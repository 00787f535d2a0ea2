"""``algorithm.payload: auto`` and ``algorithm.delay: auto``: the rule, the trainer's choice, and that it is kept."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocod_accel import train
from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.sharding.speeds import Measured
from cocod_accel.simulator.cluster import Cluster, Network
from cocod_accel.simulator.simulate import configured
from cocod_accel.theory import StepTimes
from cocod_accel.theory.hiding import CODES, Choice, choose, choose_period
from cocod_accel.trainer import worker as worker_module
from cocod_accel.trainer.trainer import Trainer
from tests.workers import run_workers

TINY = [
    "task.name=synthetic", "task.args={num_train: 160}", "model.name=mlp", "batch_size=8", "schedule.epochs=2",
    "schedule.warmup_epochs=0", "logging.trackers=[]",
]  # fmt: skip

# -------------------------------------------------------------------------------------------------------- the rule


def link(seconds: float, latency: float = 0.0, compute: float = 1.0) -> Any:
    """Times on a link that carries a float32 model in so many seconds."""
    shares = dict(zip(CODES, (1, 0.5, 0.254, 0.129, 0.066), strict=True))
    return lambda code: StepTimes(compute, latency + seconds * shares[code], interference=0.0)


@pytest.mark.parametrize(
    ("seconds", "latency", "expected"),
    [
        (0.5, 0.0, Choice("fp32", 1, None)),
        (1.5, 0.0, Choice("bf16", 1, None)),
        (3.0, 0.0, Choice("int8", 1, None)),
        (6.0, 0.0, Choice("int4", 1, None)),
        (12.0, 0.0, Choice("ternary", 1, None)),
        (30.0, 0.0, Choice("ternary", 3, None)),  # even the shortest code does not hide in a step
        (0.1, 4.0, Choice("ternary", 5, None)),  # a long latency: long rounds, whatever is sent
    ],
)
def test_send_less_before_sending_less_often(seconds: float, latency: float, expected: Choice) -> None:
    assert choose(link(seconds, latency)) == expected


def test_what_is_given_is_kept() -> None:
    assert choose(link(3.0), payload="fp32") == Choice("fp32", 4, None)
    assert choose(link(3.0), period=5) == Choice("fp32", 5, 4)
    assert choose(link(3.0), period=5, delay=None) == Choice("fp32", 5, None)
    assert choose(link(3.0), period=5, delay=2) == Choice("bf16", 5, 2)  # a transfer has two steps
    assert choose(link(3.0), period=2, payload="fp32") == Choice("fp32", 2, None)  # nothing hides it: as late as can be
    assert choose(link(3.0), delay=2) == Choice("bf16", 2, None)
    assert choose(link(0.5), least=3) == Choice("fp32", 3, 1)  # three fragments, and each is merged at once


@given(st.floats(0.01, 100), st.floats(0, 10), st.none() | st.integers(1, 9), st.integers(1, 4))
def test_a_choice_hides_or_nothing_does(seconds: float, latency: float, period: int | None, least: int) -> None:
    times = link(seconds, latency)
    choice = choose(times, period=period, least=least)
    needed = {code: choose_period(times(code)) for code in CODES}
    delay = choice.period if choice.delay is None else choice.delay
    assert 1 <= delay <= choice.period
    assert choice.period == (period if period is not None else max(least, needed[choice.payload]))
    shortest = least if period is None else period
    hiding = [code for code in CODES if needed[code] <= shortest]
    assert choice.payload == (hiding[0] if hiding else CODES[-1])
    if needed[choice.payload] <= choice.period:
        assert delay == needed[choice.payload] or delay == choice.period == least


def test_a_simulation_chooses_by_the_same_rule() -> None:
    def chosen(mbit: float, latency_us: float = 0.0, *more: str) -> tuple[Any, ...]:
        network = Network(bandwidth_gbit=mbit / 1e3, latency_us=latency_us)
        cluster = Cluster(step_seconds=0.1, network=network)
        given = [*TINY, "algorithm.payload=auto", "algorithm.delay=auto", *more]
        options = configured(cluster, given, "cocod").algorithm
        return options.payload, options.period, options.delay

    assert chosen(1000.0, 0.0, "algorithm.period=auto") == ("fp32", 1, None)
    assert chosen(6.0, 0.0, "algorithm.period=auto")[1:] == (1, None)
    assert chosen(6.0, 0.0, "algorithm.period=auto")[0] in CODES[1:]
    payload, period, _ = chosen(1000.0, 200_000.0, "algorithm.period=auto")
    assert (payload, period > 1) == ("ternary", True)
    assert chosen(1000.0, 0.0, "algorithm.period=6") == ("fp32", 6, 1)
    sixteen = replace(Cluster(step_seconds=0.1, network=Network(latency_us=50_000.0))).resized(16)
    options = configured(
        sixteen, [*TINY, "task.args={num_train: 640}", "algorithm.payload=auto", "algorithm.period=auto"], "cocod"
    )
    assert options.algorithm.period > 10, "sixteen workers on a link with a long latency take longer rounds"


# ----------------------------------------------------------------------------------------------------- the trainer


def chooser(rank: int, arguments: list[str], stop_at: int | None = None) -> tuple[int, str, int | None, str]:
    """Train as launched, with steps that seem to take 100 ms."""
    seen: list[Trainer] = []
    run, set_rate = Trainer.run, Trainer._set_learning_rate

    def noted(self: Trainer) -> Any:
        seen.append(self)
        return run(self)

    def stopping(self: Trainer, epoch: float) -> None:
        if self.step == stop_at and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        set_rate(self, epoch)

    Trainer.run, Trainer._set_learning_rate = noted, stopping  # type: ignore[method-assign]
    vars(worker_module)["measure_speeds"] = lambda *_, **__: Measured((2.0, 1.0), (0.05, 0.1), (10, 10), (0.0, 0.0))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    code = train.main(arguments)
    method = seen[0].sync._driver.method
    return code, method.payload, method.delay, str(seen[0].sync.algorithm)


SLOW = ["emulate.link.bandwidth_mbit=10"]


def test_all_workers_choose_the_same_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    arguments = [*TINY, *SLOW, "algorithm.payload=auto", "algorithm.period=1", f"output={tmp_path}", "name=auto"]
    stopped = run_workers(2, chooser, arguments, 3, fresh=True)
    assert stopped[0] == stopped[1]
    code, payload, delay, _ = stopped[0]
    assert (code, delay) == (143, None)
    assert payload == expected_payload()
    saved = load_config([str(tmp_path / "auto" / "config.yaml")]).algorithm
    assert (saved.payload, saved.delay, saved.period) == (payload, None, 1)
    results = run_workers(2, chooser, [*arguments, "checkpoint.resume=auto"], fresh=True)
    assert results[0] == results[1]
    assert results[0][:3] == (0, payload, None)
    assert not (tmp_path / "auto-2").exists(), "it is the same run"


def expected_payload() -> str:
    """Of the model of TINY on SLOW, in steps of 100 ms with a tenth to spare."""
    from cocod_accel.averaging.coder import coded_bytes
    from cocod_accel.tasks import build_model, build_task

    config = load_config([*TINY])
    size = sum(p.numel() for p in build_model(config, build_task(config)).parameters())
    for code in CODES:
        sent = 4 * size if code == "fp32" else coded_bytes(code, size, 2)
        if 1.1 * 8 * sent / 10e6 <= 0.1:
            return code
    return CODES[-1]


def test_a_delay_is_chosen_for_a_given_period(tmp_path: Path) -> None:
    arguments = [*TINY, "emulate.link.latency_ms=110", "algorithm.delay=auto", "algorithm.period=5", f"output={tmp_path}"]
    for code, payload, delay, _ in run_workers(2, chooser, [*arguments, "name=delay"], fresh=True):
        assert (code, payload, delay) == (0, "fp32", 3)  # 220 ms and a tenth more, in steps of 100 ms


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["algorithm.name=ssgd", "algorithm.payload=auto"], "algorithm.payload=auto: requires local or cocod, not ssgd"),
        (
            ["algorithm.name=asynlocal", "algorithm.payload=auto"],
            "algorithm.payload=auto: requires local or cocod, not asynlocal",
        ),
        (
            ["algorithm.name=local", "algorithm.delay=auto"],
            "algorithm.delay=auto: is not an option of local; set it to null",
        ),
        (["algorithm.delay=soon"], "algorithm.delay='soon' is not an int"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([*TINY, *given])
    assert said in str(refused.value)
