"""Settings that nobody would give, by the thousand: each is one line and exit code 2, or is a run that can start.

``COCOD_TEST_CASES=2000 pytest tests/test_settings.py`` tries more of them.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cocod_accel import cli
from cocod_accel.config.loading import flattened, load_training_config
from cocod_accel.config.settings import Config
from cocod_accel.tasks import build_model, build_optimizer, build_task
from cocod_accel.trainer.process import seed_everything
from cocod_accel.trainer.work import Work

CASES = int(os.environ.get("COCOD_TEST_CASES", "40"))
#: Small, so that what is accepted can be begun.
BASE = ["task.name=synthetic", "task.args={num_train: 64, num_test: 8}", "model.name=mlp", "cluster.device=cpu"]

KEYS = [*flattened(asdict(Config())), "algorithm.outer.rate", "algorithm.outer.momentum", "algorithm.outer.nesterov"]
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS if "." in key})

NUMBERS = st.sampled_from(
    ["0", "-1", "1", "2", "3", "7", "100", "1e6", "1e308", "-1e308", "1e-320", "9" * 30, "9" * 400, "18446744073709551616",
     "9223372036854775808", "4294967296", "100000", "0.5", "1.0", "1e400", "nan", ".nan", "inf", "-.inf", "0x10", "1_0"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["", "null", "true", "no", "''", "a", "auto", "measure", "nope", "cocod", "mlp", "synthetic", "..:x", ":", "a:", ":b",
     "os:getcwd", "math:pi", "builtins:len", "tests.own_code:make_model", "tests.own_code:nothing", ".:.", "a b", "a/b",
     "../x", ".", "..", "x" * 300, "é" * 200, "???", "${", "${seed}", "${nothing}", "${oc.env:NOTHING_LIKE_IT}", "${oc.x:1}",
     "topk:0.1", "topk:", "qsgd:9", "int8", "${seed:1}", "\x00", "\x1b[2J", "a\nb", "- a", "a: b", "!!python/name:os.system",
     "&a", "*a", "%", "@", "`", "[", "{", "]", "2026-01-01", "\ud800", "/dev/zero", "/dev/null", "LICENSE", "tests"]
)  # fmt: skip
PLAIN = NUMBERS | WORDS
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(WORDS | NUMBERS, inner), max_size=2).map(
            lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items) + "}"
        )
    ),
    max_leaves=5,
)
TAILS = st.sampled_from(["", "", "", "", "", "", "[0]", ".0", ".a", "[a]", "[", ".", "[0].a", "..a", "[-1]"])
OVERRIDES = st.tuples(st.sampled_from(KEYS * 4 + SECTIONS + ["", "x", "task.args.size", "model.args.width"]), TAILS, NESTED)


@settings(max_examples=CASES)
@given(st.lists(OVERRIDES.map(lambda parts: f"{parts[0]}{parts[1]}={parts[2]}"), min_size=1, max_size=3))
@example(["schedule.decay_epochs[0]=1"])
@example(["evaluation.targets.0=0.5"])
@example(["evaluation.targets={}"])
@example(["logging.trackers={a: 1}"])
@example(["schedule.decay_epochs=[[1]]"])
@example(["task.name=..:x"])
@example(["model.name=..:x"])
@example([f"name={'x' * 300}"])
@example(["seed=18446744073709551616"])
@example(["cluster.speeds=[1e308,1e308]"])
@example(["model.name=nope"])
@example(["batch_size=64"])
@example(["cluster.num_workers=100000"])
@example(["schedule.epochs=1000000000000"])
@example(["task.args={num_train: 1000000000000}"])
def test_a_setting_is_refused_in_one_line_or_can_be_begun(overrides: list[str]) -> None:
    before = sorted(os.listdir())
    code, out, err = ran(["train", *BASE, *overrides, "--dry-run"])
    assert sorted(os.listdir()) == before
    if code == 0:
        assert out.startswith("accelerate launch")
        assert not err
        begun(overrides)
    else:
        assert code == 2, (code, out, err)
        assert not out
        assert err.startswith("error: ")
        assert err.endswith("\n")
        assert len(err.splitlines()) == 1
        assert len(err) < 2000


def ran(arguments: list[str]) -> tuple[int, str, str]:
    """A command in this process; whatever it raises, this raises."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as error:  # of argparse
            code = int(error.code or 0)
            err = io.StringIO(f"error: {err.getvalue().splitlines()[-1]}\n")
    return code, out.getvalue(), err.getvalue()


def begun(overrides: list[str]) -> None:
    """Whatever every worker does with a configuration before it trains."""
    config = load_training_config([*BASE, *overrides])
    assert math.isfinite(config.optimizer.learning_rate)
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_everything(config.seed + config.cluster.num_workers)
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    task = build_task(config)
    for rank in range(config.cluster.num_workers):
        Work.of(config, task.num_train, rank)
    build_optimizer(config, build_model(config, task))
    assert len(os.fsencode(config.run_name)) <= 255


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, "a"]) | st.text(max_size=3), inner),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "given.yaml"


@settings(max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from([*KEYS, *SECTIONS]), value=TREES)
def test_so_is_what_a_file_holds(file: Path, key: str, value: Any) -> None:
    tree = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8", errors="surrogatepass")
    code, _, err = ran(["train", *BASE, str(file), "--dry-run"])
    assert code in (0, 2)
    assert len(err.splitlines()) == (code == 2), err
