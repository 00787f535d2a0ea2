"""A checkpoint may hold anything, under hashes that fit: it is resumed from, or refused in one line with nothing changed.

``COCOD_TEST_CASES=2000 pytest tests/test_damaged_checkpoints.py`` tries more.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import re
import shutil
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cocod_accel.checkpoint import safetree as packing
from cocod_accel.checkpoint.files import CheckpointError, checkpoints_in, worker_file
from cocod_accel.comm.agreement import bytes_of
from cocod_accel.config.loading import load_training_config
from cocod_accel.tasks import build_model, build_task
from cocod_accel.trainer import process as runtime
from cocod_accel.trainer.resume_policy import Place
from cocod_accel.trainer.trainer import Trainer
from tests import resume
from tests.resume import Case, arguments
from tests.test_resume import Bomb
from tests.test_settings import CASES
from tests.trees import ODD, a_place, damaged_text, replaced
from tests.workers import run_outcomes, run_workers

ODD_HERE = [
    *ODD, torch.zeros(0), torch.zeros(3, 3), torch.tensor(-1), torch.tensor(2**62), torch.tensor(True),
    torch.full((2,), float("nan")), torch.zeros(1, 1, 1, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8),
    [torch.zeros(2)],
]  # fmt: skip


def seal(checkpoint: Path) -> None:
    """Hashes that fit, whatever the files hold."""
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    for name in manifest["files"]:
        path = checkpoint / name
        manifest["files"][name] = {"bytes": path.stat().st_size, "blake2b": packing.digest(path)}
    (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))


#: One rule each: where in which worker's state, what stands there, and what is said about it.
DIRECTED: list[tuple[int, tuple[Any, ...], Any, str]] = [
    (0, ("model", "0.weight"), torch.zeros(1), r"is for a different model: 0.weight has shape \(1,\)"),
    (1, ("optimizers", 0, "param_groups", 0, "momentum"), "much", r"param_groups\[0\].momentum is a str$"),
    (1, ("optimizers", 0, "state", 0, "momentum_buffer"), torch.zeros(2, 2), r"state\[0\].momentum_buffer is \(2, 2\)"),
    (1, ("custom",), [None], r"holds 1 registered objects \(custom\), but 0 are registered here$"),
    (1, ("kinds", 0), "x" * 100_000, r"was saved with x{400,500}\.\.\.$"),
    (1, ("position", "epoch"), 2, r"its workers differ in position.epoch$"),
    (1, ("position", "step"), 13, r"its workers differ in position.step$"),
    (0, ("position", "index"), 10**6, r"position.index=1000000 is after the end of its epoch$"),
    (1, ("sync", "rounds"), 10**6, r"its workers are in different rounds: \["),
    (0, ("sync", "attempts"), -1, r"sync.attempts is not a count$"),
    (1, ("sync", "averages", "parts", 0, "in_flight", 0), torch.zeros(1), r"has \[1\] elements, this model"),
    (0, ("random", "python"), [1, 2, 3], r"random is no state of random numbers"),
]


def damage(checkpoint: Path, how: str, seed: int, mark: Path) -> str:
    """What was done to a checkpoint of two workers, in words."""
    chance = random.Random(seed)
    if how == "directed":
        rank, place, value, _ = DIRECTED[seed]
        path = checkpoint / worker_file(rank)
        tree = replaced(packing.read(path), place, value)
        path.unlink()
        packing.write(path, tree)
        seal(checkpoint)
        return f"{path.name} {place}"
    if how == "bomb":
        (checkpoint / "optimizer.bin").write_bytes(pickle.dumps(Bomb(str(mark))))
        seal(checkpoint)
        return "a bomb"
    if how == "manifest":
        tree = json.loads((checkpoint / "checkpoint.json").read_text())
        place, value = a_place(tree, chance), chance.choice(ODD)
        is_gone = bool(place) and chance.random() < 0.3
        (checkpoint / "checkpoint.json").write_text(json.dumps(replaced(tree, place, value, deleted=is_gone)))
        return f"manifest {place}: {'gone' if is_gone else str(value)[:40]}"
    if how == "file":
        others = sorted(path for path in checkpoint.iterdir() if not path.name.startswith(("worker", "checkpoint")))
        if not others:
            return "no other files"
        path = chance.choice(others)
        path.write_bytes(chance.choice([pickle.dumps(Bomb(str(mark))), b"", b"x" * 100, pickle.dumps({"a": 1})]))
        seal(checkpoint)
        return f"file {path.name}"
    path = checkpoint / f"worker_{chance.randrange(2)}.safetensors"
    if how == "header":
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = damaged_text(data[8 : 8 + size].decode(), chance).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
        seal(checkpoint)
        return f"header of {path.name}"
    tree = packing.read(path)
    said = []
    for _ in range(chance.choice([1, 1, 1, 3])):
        place, value = a_place(tree, chance), chance.choice(ODD_HERE)
        if chance.random() < 0.3:
            place = ("position", *a_place(tree["position"], chance)) if chance.random() < 0.5 else place
            value = alike(at(tree, place), chance)
        kind = chance.choice(["value", "value", "value", "gone", "renamed"]) if place else "value"
        renamed = chance.choice(["", "x", 3, "lr", "epoch"]) if kind == "renamed" else None
        tree = replaced(tree, place, value, deleted=kind == "gone", renamed=renamed)
        if not isinstance(tree, dict) or "position" not in tree:
            break
        said.append(f"{path.name} {place}: {kind} {str(value)[:40] if kind == 'value' else renamed}")
    path.unlink()  # its tensors are still mapped
    packing.write(path, tree)
    seal(checkpoint)
    return "; ".join(said)


def at(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def alike(value: Any, chance: random.Random) -> Any:
    """Another value of the same kind."""
    if isinstance(value, torch.Tensor):
        return chance.choice([torch.zeros_like(value), torch.full_like(value, 1), value.flatten(), value[..., None]])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice([0, 1, 2, value + 1, abs(value - 1), 1000 * value, 10**6, 2**31, 2**62])
    if isinstance(value, float):
        return chance.choice([0.0, 1.0, -value, 2 * value, 1e-300, 1e300, math.nan, math.inf])
    if isinstance(value, str):
        return chance.choice(["", value + "x", "ssgd", "across", "int8"])
    if isinstance(value, list | tuple):
        return chance.choice([[*value, *value], value[:1], list(reversed(value))])
    return value


def here(trainer: Trainer, folder: Path) -> dict[str, str]:
    """All that a checkpoint could have changed in a worker."""
    path = folder / f"here_{trainer.worker.rank}"
    path.mkdir(exist_ok=True)
    trainer.checkpoints._checkpoints._position = [str(vars(trainer.at)), trainer.worker.losses]
    trainer.checkpoints._checkpoints.write_worker(path)
    tree = packing.read(path / f"worker_{trainer.worker.rank}.safetensors")
    return {key: str(plain(value)) for key, value in tree.items()}


def plain(tree: Any) -> Any:
    """The same without tensors."""
    if isinstance(tree, torch.Tensor):
        return [str(tree.dtype), tuple(tree.shape), hashlib.blake2b(bytes_of(tree)).hexdigest()]
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(value) for value in tree] if isinstance(tree, list | tuple) else tree


def attempts(
    rank: int, given_here: list[str], whole: Path, work: Path, cases: int, is_first: bool
) -> tuple[list[str], dict[str, int]]:
    """Two workers that resume from one damaged checkpoint after the other: what went wrong, and how it ended otherwise."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    config = load_training_config(given_here)
    runtime.seed_everything(config.seed)
    task = build_task(config)
    model = build_model(config, task)
    wrong: list[str] = []
    ends: Counter[str] = Counter()
    mark, scratch = work / "mark", work / f"scratch_{rank}"
    scratch.mkdir()
    with runtime.start(config, given_here) as accelerator:
        trainer = Trainer(config, task, model, accelerator, Place(work / "run", is_continued=True))

        def attempt(how: str, seed: int, expected: str | None) -> None:
            checkpoint = work / "run" / "checkpoints" / "step_0000000012"
            if rank == 0:
                shutil.rmtree(checkpoint, ignore_errors=True)
                shutil.copytree(whole, checkpoint)
                damage(checkpoint, how, seed, mark)
            dist.barrier()
            shutil.copytree(whole, scratch / "copy")
            what = f"{how} {seed}: {damage(scratch / 'copy', how, seed, mark)}"
            shutil.rmtree(scratch / "copy")
            before, said = here(trainer, scratch), ""
            try:
                trainer.checkpoints.begin()
                use(trainer)
            except CheckpointError as error:
                said = str(error)
                if "\n" in said or len(said) > 2000:
                    wrong.append(f"{what}: not one line: {said[:3000]!r}")
                after = here(trainer, scratch)
                changed = [key for key in before if after[key] != before[key]]
                if changed:
                    wrong.append(f"{what}: refused, but {', '.join(changed)} changed: {said[:200]}")
            except Exception:
                wrong.append(f"{what}: {traceback.format_exc()[-1500:]}")
            if mark.exists():
                wrong.append(f"{what}: was executed")
            if expected is not None and re.search(expected, said) is None:
                wrong.append(f"{what}: {expected!r} is not in {said[:300]!r}")
            ends["refused" if said else "resumed"] += 1
            ended: list[Any] = [None, None]
            dist.all_gather_object(ended, bool(said))
            if len(set(ended)) > 1:
                wrong.append(f"{what}: not the same on all workers")

        # Both workers draw the same; nothing may be raised, or they would not stay together.
        kinds = st.sampled_from(["tree", "tree", "tree", "tree", "header", "manifest", "file"])
        tried = settings(
            max_examples=cases, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        if is_first:
            for number, (*_, message) in enumerate(DIRECTED):
                attempt("directed", number, message)
            attempt("bomb", 0, r"optimizer.bin cannot be read \(UnpicklingError\)$")
        tried(given(kinds, st.integers(0, 2**32), st.none())(attempt))()
    return wrong, dict(ends)


def use(trainer: Trainer) -> None:
    """What training would do with a position first."""
    worker, epochs = trainer.worker, trainer.config.schedule.epochs
    if epochs is not None and worker.at.epoch < epochs:
        steps = worker.work.steps[worker.at.epoch]
        assert worker.at.index <= steps, "a position after its epoch"
        for inputs, labels in list(worker.batches(worker.at.epoch))[:1]:
            assert len(inputs) == len(labels)
    worker.sync.stats()
    worker.clock.start()
    worker.clock.stop()
    with worker.sync.averaged():
        pass


KINDS = {
    "cocod": Case("cocod", True, "sgd", 12, False),
    "adam, anchor, ternary": Case("cocod", True, "adam", 12, False, has_anchor=True, payload="ternary", delay=2),
    "pipe": Case("pipe", False, "sgd", 12, False),
}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "kind", ["cocod", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "cocod")]
)
def test_a_damaged_checkpoint_is_resumed_from_or_refused_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = KINDS[kind]
    given_here = arguments(case, tmp_path, "run", "checkpoint.every_steps=12")
    run_outcomes(2, resume.worker, given_here, ("leave", 12), seconds=100, fresh=True)
    (newest, *_) = checkpoints_in(tmp_path / "run" / "checkpoints")
    whole = newest.rename(tmp_path / "whole")
    found = run_workers(2, attempts, given_here, whole, tmp_path, CASES, kind == "cocod", seconds=60 + 2 * CASES, fresh=True)
    with capsys.disabled():
        print(f"\n  {kind}: {CASES} damaged checkpoints: {found[0][1]}")
    wrong = sorted({line for lines, _ in found for line in lines})
    assert not wrong, f"{len(wrong)} went wrong\n" + "\n\n".join(wrong[:12])
