"""Loops as other people write them: examples/loops, each run on two real workers, and what it took to attach."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest

from tests.workers import preload, run_workers

ROOT = Path(__file__).parents[1]
LOOPS = ROOT / "examples" / "loops"
#: By script: the package it needs, its arguments ({} is a folder), and the rounds it ends.
SCRIPTS: dict[str, tuple[str, list[str], int]] = {
    "accelerate_short": ("accelerate", [], 8),
    "accelerate_full": ("accelerate", ["{}", "3"], 24),
    "torch_ddp": ("torch", [], 12),
    "torchrun_trainer": ("torch", ["{}", "2"], 8),
    "gpt_style": ("torch", [], 8),
    "hf_trainer": ("transformers", [], 8),
    "lightning_trainer": ("lightning", ["{}"], 8),
    "lightning_fabric": ("lightning", [], 8),
}
preload("examples.loops.common")


def started(rank: int, name: str, arguments: list[str], port: int) -> str:
    """What a script prints, started as torchrun starts it."""
    import torch.distributed as dist

    dist.destroy_process_group()  # the test's own: scripts make theirs
    own = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(own, TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    sys.argv = [name, *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(LOOPS / f"{name}.py"), run_name="__main__")
    assert not dist.is_initialized()
    return said.getvalue()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(name: str, folder: Path, *arguments: str) -> list[str]:
    package, usual, _ = SCRIPTS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    given = [argument.format(folder) for argument in arguments or usual]
    return run_workers(2, started, name, given, free_port(), seconds=110, fresh=True)


def models_of(said: list[str]) -> list[tuple[int, float]]:
    found = [re.search(r"rank (\d): (\d+) rounds, model ([\d.]+)", text) for text in said]
    assert all(found), said
    assert [int(match[1]) for match in found if match] == [0, 1]
    return [(int(match[2]), float(match[3])) for match in found if match]


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_both_workers_end_with_one_model_after_the_rounds_of_their_steps(name: str, tmp_path: Path) -> None:
    said = run(name, tmp_path)
    first, second = models_of(said)
    assert first == second
    assert first[0] == SCRIPTS[name][2]
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", said[0])]
    assert not accuracies or accuracies[-1] > 0.8
    if name == "hf_trainer":
        assert "4 rows with drift" in said[0]
    if name == "accelerate_full":
        assert "of 250" in said[0]


@pytest.mark.parametrize("name", ["accelerate_full", "torchrun_trainer"])
def test_one_that_is_stopped_goes_on_to_the_same_model(name: str, tmp_path: Path) -> None:
    whole = models_of(run(name, tmp_path, str(tmp_path / "whole"), "3"))
    run(name, tmp_path, str(tmp_path / "parts"), "1")
    assert models_of(run(name, tmp_path, str(tmp_path / "parts"), "3")) == whole


def test_the_table_counts_the_lines() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    rows = dict(re.findall(r"^\| .* \| `(\w+)\.py` \| (\d+) \|$", page, re.MULTILINE))
    counted = {name: str((LOOPS / f"{name}.py").read_text().count("  # cocod")) for name in [*SCRIPTS, "ray_train"]}
    assert rows == counted
