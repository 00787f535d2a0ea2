"""A stopped run continues as if it had never stopped; what cannot be continued from is said, and nothing is lost."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, Checkpoints, CoCoDSGD, attach
from cocod_accel.checkpoint import safetree as packing
from cocod_accel.checkpoint.files import CheckpointError, checkpoints_in
from cocod_accel.checkpoint.merge import merged
from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.report import read_summary
from cocod_accel.tasks import build_model, build_task
from cocod_accel.trainer.export import model_digest
from cocod_accel.trainer.resume_policy import Place, find_place
from cocod_accel.trainer.trainer import Trainer
from tests import loops, resume
from tests.resume import Case, arguments, stop_and_go_on, worker
from tests.workers import run_outcomes, run_workers

# ---------------------------------------------------------------------------------------- the same bits

SAMPLE = [
    Case("cocod", True, "sgd", 12, True),  # first step of a round of 3, an average in flight
    Case("cocod", False, "adam", 16, False),  # in the middle of a round
    Case("cocod", True, "adam", resume.EVALUATION, True),
    Case("local", True, "sgd", 13, True),
    Case("ssgd", True, "adam", 11, False),  # the end of an epoch
    Case("pipe", False, "sgd", 5, True),  # a gradient in flight
    Case("asynlocal", False, "adam", 14, True),
    Case("ssgd", True, "sgd", 8, False, num_workers=3),  # three: the order of a sum matters
    Case("cocod", True, "sgd", 7, True, num_workers=3),
    Case("cocod", True, "sgd", 13, True, num_workers=4, workers_per_replica=2),  # two nodes
    Case("cocod", True, "sgd", 12, True, has_anchor=True, payload="ternary", delay=2),  # merged one step later
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_stopped_run_goes_on_bit_for_bit(case: Case, tmp_path: Path) -> None:
    """The whole cover: python -m tests.resume."""
    stop_and_go_on(case, tmp_path, "run")


def test_the_cover_is_pairwise() -> None:
    assert len(resume.cover()) == 20 * len(ALGORITHMS)


CASE = Case("cocod", True, "sgd", 12, False)


def signalled(rank: int, given: list[str], number: int, step: int) -> int:
    """Worker 1 gets a signal while it computes a step."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    set_rate = Trainer._set_learning_rate

    def signal_once(self: Trainer, epoch: float) -> None:
        if rank == 1 and self.step == step:
            os.kill(os.getpid(), number)
        set_rate(self, epoch)

    Trainer._set_learning_rate = signal_once  # type: ignore[method-assign]
    return worker(rank, given)


def test_sigterm_in_the_middle_of_a_step_saves_a_checkpoint_that_resumes_bitwise(tmp_path: Path) -> None:
    undisturbed = resume.baseline(CASE)
    given = arguments(CASE, tmp_path, "run")
    assert run_workers(2, signalled, given, signal.SIGTERM, 13, fresh=True) == [143, 143]
    assert run_workers(2, worker, given, fresh=True) == [0, 0]
    assert resume.record(tmp_path / "run") == resume.record(undisturbed)
    assert resume.traces(tmp_path / "run") == resume.traces(undisturbed)


def test_sigusr1_saves_and_goes_on(tmp_path: Path) -> None:
    undisturbed = resume.baseline(CASE)
    given = arguments(CASE, tmp_path, "run", "checkpoint.keep=9")
    assert run_workers(2, signalled, given, signal.SIGUSR1, 12, fresh=True) == [0, 0]
    # Asked for during step 13 of a round that ends after 14; known to all when that round's average lands, after 17.
    names = [path.name for path in checkpoints_in(tmp_path / "run" / "checkpoints")]
    assert names == ["step_0000000017", "step_0000000000"]
    assert resume.record(tmp_path / "run") == resume.record(undisturbed)


def test_minutes_are_asked_for_and_old_checkpoints_go(tmp_path: Path) -> None:
    undisturbed = resume.baseline(CASE)
    given = arguments(CASE, tmp_path, "run", "checkpoint.every_minutes=1e-9", "checkpoint.keep=3")
    assert run_workers(2, worker, given, fresh=True) == [0, 0]
    assert len(checkpoints_in(tmp_path / "run" / "checkpoints")) == 3
    assert resume.record(tmp_path / "run") == resume.record(undisturbed)


def test_the_last_model_is_exported_for_load_state_dict() -> None:
    run = resume.baseline(CASE)
    config = load_config([str(run / "config.yaml")])
    model = build_model(config, build_task(config))
    model.load_state_dict(load_file(run / "model.safetensors"))
    assert model_digest(model.state_dict()) == read_summary(run)["model_digest"]


# --------------------------------------------------------------------------------- other workers, other runs


def half_done(tmp_path: Path, *more: str, point: int = 12) -> list[str]:
    """A run that was left after a checkpoint in its second epoch; the arguments to go on with."""
    given = arguments(CASE, tmp_path, "run", f"checkpoint.every_steps={point}", "checkpoint.keep=2", *more)
    run_outcomes(2, worker, given, ("leave", point), fresh=True)
    assert (tmp_path / "run" / "checkpoints" / f"step_{point:010d}").is_dir()
    return given


@pytest.mark.parametrize("num_workers", [1, 3])
def test_another_number_of_workers_goes_on_from_the_weighted_mean(num_workers: int, tmp_path: Path) -> None:
    given = half_done(tmp_path)
    speeds = json.dumps([1.0] * num_workers)
    more = [f"cluster.num_workers={num_workers}", f"cluster.speeds={speeds}"]
    assert run_workers(num_workers, worker, [*given, *more], fresh=True) == [0] * num_workers
    summary = read_summary(tmp_path / "run")
    assert summary["num_workers"] == num_workers
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["kind"] == "eval"] == [1, 2, 3]
    plans = [row["batches"] for row in rows if row["kind"] == "plan"]
    assert plans == [[6, 12], [6] * num_workers]
    assert summary["final_accuracy"] > 0.9


def test_new_checkpoints_of_other_workers_are_the_ones_gone_on_from(tmp_path: Path) -> None:
    """Fewer steps an epoch than before must not make the old checkpoints look newer."""
    given = half_done(tmp_path)
    more = ["cluster.num_workers=4", "cluster.speeds=[1, 1, 1, 1]", "checkpoint.keep=1"]
    run_outcomes(4, worker, [*given, *more, "checkpoint.every_steps=2"], ("leave", 10), seconds=100, fresh=True)
    (newest,) = checkpoints_in(tmp_path / "run" / "checkpoints")
    assert int(newest.name.removeprefix("step_")) > 12
    assert len(list(newest.glob("worker_*"))) == 4
    assert run_workers(4, worker, [*given, *more], fresh=True) == [0] * 4


def test_going_on_at_the_end_of_an_epoch_with_replanning(tmp_path: Path) -> None:
    more = ["cluster.replan_epochs=1", "cluster.speeds=[1, 1]", "checkpoint.every_steps=16"]
    given = half_done(tmp_path, *more, point=16)  # 200 // 12 steps an epoch
    assert run_workers(2, worker, given, fresh=True) == [0, 0]


def test_another_optimizer_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    half_done(tmp_path)
    given = arguments(CASE, tmp_path, "other", f"checkpoint.resume={tmp_path / 'run'}", "optimizer.name=adam")
    assert run_workers(2, worker, given, fresh=True) == [2, 2]
    assert "was saved with SGD, but this run has Adam" in resume.said(tmp_path)


def test_other_speeds_are_planned_anew(tmp_path: Path) -> None:
    given = half_done(tmp_path)
    assert run_workers(2, worker, [*given, "cluster.speeds=[2, 1]"], fresh=True) == [0, 0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["batches"] for row in rows if row["kind"] == "plan"] == [[6, 12], [12, 6]]


def test_a_merged_state_is_the_weighted_mean_and_the_largest_counter(tmp_path: Path) -> None:
    for rank in range(2):
        tree = {
            "model": {"w": torch.full((2,), float(rank), dtype=torch.bfloat16), "n": torch.tensor(7 + rank)},
            "buffers": {},
            "optimizers": [
                {
                    "state": {0: {"exp_avg": torch.full((2,), 4.0 * rank), "step": torch.tensor(5.0 + rank)}},
                    "param_groups": [{"lr": 0.1, "params": [0]}],
                }
            ],
            "sync": {"attempts": 10 * (rank + 1), "rounds": 2, "in_flight": [torch.zeros(2)]},
            **dict.fromkeys(("custom", "schedulers", "scaler")),
            "position": {"epoch": rank},
        }
        packing.write(tmp_path / f"{rank}", tree)
    tree = merged([tmp_path / "0", tmp_path / "1"], [1.0, 3.0])
    assert tree["model"]["w"].tolist() == [0.75, 0.75]
    assert tree["model"]["w"].dtype == torch.bfloat16
    assert tree["model"]["n"].item() == 8
    state = tree["optimizers"][0]["state"][0]
    assert (state["exp_avg"].tolist(), state["step"].item()) == ([3.0, 3.0], 6.0)
    assert (tree["sync"]["attempts"], tree["position"]) == (20, {"epoch": 0})


def test_a_checkpoint_of_another_run_begins_a_new_folder(tmp_path: Path) -> None:
    half_done(tmp_path)
    given = arguments(CASE, tmp_path, "fork", f"checkpoint.resume={tmp_path / 'run'}", "optimizer.learning_rate=0.01")
    assert run_workers(2, worker, given, fresh=True) == [0, 0]
    assert read_summary(tmp_path / "fork")["steps"] == 33
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_changed_configuration_does_not_go_on(tmp_path: Path) -> None:
    given = half_done(tmp_path)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert run_workers(2, worker, [*given, "optimizer.learning_rate=0.01"], fresh=True) == [0, 0]
    assert (tmp_path / "run-2" / "summary.json").is_file()
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    assert run_workers(2, worker, [*given, "checkpoint.resume=never"], fresh=True) == [0, 0]
    assert (tmp_path / "run-3" / "summary.json").is_file()


def test_a_folder_is_gone_on_with_only_by_whom_it_belongs_to(tmp_path: Path) -> None:
    config = load_config([f"output={tmp_path}", "name=run"])
    first = find_place(config, "launcher", is_restart=False)
    assert first == Place(tmp_path / "run")
    # The lock is this process's until it ends, so another start finds the folder in use.
    assert find_place(config, "other", is_restart=False) == Place(tmp_path / "run-2")
    (tmp_path / "run-2" / "summary.json").write_text("{}")
    assert find_place(config, "other", is_restart=True) == Place(tmp_path / "run-2", is_finished=True)
    assert find_place(config, "third", is_restart=True) == Place(tmp_path / "run-3")
    (tmp_path / "run-3" / "metrics.jsonl").write_text("{}")
    assert find_place(config, "third", is_restart=False) == Place(tmp_path / "run-4"), "rows, but nothing to go on from"
    with pytest.raises(ConfigError, match=r"checkpoint\.resume=nowhere: holds no checkpoint"):
        find_place(load_config([f"output={tmp_path}", "checkpoint.resume=nowhere"]), "x", is_restart=False)


# ------------------------------------------------------------------------------------- damaged and malicious


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (lambda c: truncate(c / "worker_1.safetensors"), "worker_1.safetensors is truncated"),
    "changed": (lambda c: flip(c / "worker_0.safetensors"), "worker_0.safetensors has been changed since it was written"),
    "missing": (lambda c: (c / "worker_1.safetensors").unlink(), "worker_1.safetensors is missing"),
    "no list": (lambda c: truncate(c / "checkpoint.json"), "checkpoint.json cannot be read"),
    "a file too many": (lambda c: (c / "custom_checkpoint_0.pkl").touch(), "custom_checkpoint_0.pkl"),
}


@pytest.mark.parametrize("what", list(DAMAGE))
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(what: str, tmp_path: Path) -> None:
    undisturbed = resume.baseline(CASE)
    given = half_done(tmp_path)
    damage, message = DAMAGE[what]
    damage(tmp_path / "run" / "checkpoints" / "step_0000000012")
    resume.said(tmp_path)
    assert run_workers(2, worker, given, fresh=True) == [0, 0]
    written = resume.said(tmp_path)
    assert message in written
    assert re.search(r"^resumed from .*step_0000000000 at step 0", written, re.MULTILINE)
    assert resume.record(tmp_path / "run") == resume.record(undisturbed)


def test_if_no_checkpoint_can_be_used_the_run_stops_and_changes_nothing(tmp_path: Path) -> None:
    given = half_done(tmp_path)
    for checkpoint in checkpoints_in(tmp_path / "run" / "checkpoints"):
        truncate(checkpoint / "worker_0.safetensors")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert run_workers(2, worker, given, fresh=True) == [2, 2]
    assert resume.said(tmp_path).count("error: no checkpoint can be used; ") == 1
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_a_malicious_checkpoint_is_never_executed(tmp_path: Path) -> None:
    """Even one with a list that fits: nothing in it is unpickled without restriction."""
    given = half_done(tmp_path)
    proof = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(str(proof)))
    for checkpoint in checkpoints_in(tmp_path / "run" / "checkpoints"):
        manifest = json.loads((checkpoint / "checkpoint.json").read_text())
        torch.save(Bomb(str(proof)), checkpoint / "optimizer.bin")
        for name in manifest["files"]:
            if name.endswith((".bin", ".pkl", ".pt")) and name != "optimizer.bin":
                (checkpoint / name).write_bytes(bomb)
            path = checkpoint / name
            manifest["files"][name] = {"bytes": path.stat().st_size, "blake2b": packing.digest(path)}
        (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))
    assert run_workers(2, worker, given, fresh=True) == [2, 2]
    assert not proof.exists()


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    half_done(tmp_path)
    given = arguments(CASE, tmp_path, "other", f"checkpoint.resume={tmp_path / 'run'}", "model.name=mlp")
    assert run_workers(2, worker, given, fresh=True) == [2, 2]
    assert "is for a different model: " in resume.said(tmp_path)


@pytest.mark.parametrize("way", ["disk", "folder"])
def test_a_checkpoint_that_cannot_be_written_warns_and_training_goes_on(way: str, tmp_path: Path) -> None:
    undisturbed = resume.baseline(CASE)
    given = arguments(CASE, tmp_path, "run", "checkpoint.every_steps=6")
    assert run_workers(2, failing_disk, given, way, fresh=True) == [0, 0]
    warnings = [line for line in resume.said(tmp_path).splitlines() if "could not be written" in line]
    assert len(warnings) == 5
    assert all("No space left" in line or "Not a directory" in line for line in warnings)
    assert "step_0000000000 is kept" in warnings[0]
    assert resume.record(tmp_path / "run") == resume.record(undisturbed)
    assert not list((tmp_path / "run").rglob("*.tmp"))


def failing_disk(rank: int, given: list[str], way: str) -> int:
    """After the first checkpoint, nothing can be written on worker 1 any more; or the folder is in the way."""
    written = packing.write
    count = 0

    def write(path: Path, tree: Any) -> None:
        nonlocal count
        count += 1
        if count > 1 and rank == 1:
            if way == "disk":
                raise OSError(28, "No space left on device")
            raise NotADirectoryError(20, "Not a directory")
        written(path, tree)

    packing.write = write
    return worker(rank, given)


# ---------------------------------------------------------------------------------------------- the library


def library_loop(rank: int, folder: str, steps: int, prepared: bool) -> Any:
    """A loop of one's own, with accelerate or without; three lines are about checkpoints."""
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.manual_seed(rank)
    model: Any = loops.make_model()
    model = nn.Sequential(model, nn.Dropout(0.1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    accelerator = scheduler = None
    if prepared:
        from accelerate.accelerator import Accelerator

        accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    else:
        model = DistributedDataParallel(model)
    sync = attach(model, optimizer, CoCoDSGD(period=3), weight=rank + 1)
    checkpoints = Checkpoints(folder, sync, accelerator)
    resumed = checkpoints.resume()
    first = 0 if resumed is None else resumed.position["step"]
    for step in range(first, steps):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if step + 1 == 5:
            checkpoints.save({"step": step + 1})
    sync.finish()
    return first, loops.snapshot(model), optimizer.param_groups[0]["lr"]


def with_registered_object(rank: int, folder: str, expected: int) -> int:
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    from accelerate.accelerator import Accelerator

    class Counter:
        value = rank

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    accelerator, counter = Accelerator(cpu=True), Counter()
    accelerator.register_for_checkpointing(counter)
    model: Any = loops.make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoints = Checkpoints(folder, attach(model, optimizer, CoCoDSGD(period=3)), accelerator)
    if checkpoints.resume() is None:
        counter.value = expected + rank
        checkpoints.save()
    return counter.value


def test_registered_objects_are_kept_per_worker_and_never_unpickled(tmp_path: Path) -> None:
    """accelerate itself would unpickle anything for them."""
    folder = str(tmp_path / "c")
    assert run_workers(2, with_registered_object, folder, 7) == [7, 8]
    assert not list(Path(folder).rglob("custom_checkpoint_*"))
    assert run_workers(2, with_registered_object, folder, 0) == [7, 8]


@pytest.mark.parametrize("prepared", [True, False])
def test_three_lines_in_a_loop_of_ones_own(prepared: bool, tmp_path: Path) -> None:
    whole = run_workers(2, library_loop, str(tmp_path / "a"), 10, prepared)
    shutil.rmtree(tmp_path / "a")
    assert [first for first, _, _ in run_workers(2, library_loop, str(tmp_path / "a"), 7, prepared)] == [0, 0]
    again = run_workers(2, library_loop, str(tmp_path / "a"), 10, prepared)
    for (_, expected, rate), (first, found, other_rate) in zip(whole, again, strict=True):
        assert first == 5
        assert rate == other_rate
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_states_of_any_shape_are_packed_and_unpacked(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    tree: dict[Any, Any] = {
        "a": [1, 2.5, None, True, "x", (1, (2,))], 3: {"b": float("inf")}, "t": shared, "view": shared[2:4],
        "half": torch.ones(2, dtype=torch.bfloat16), "scalar": torch.tensor(3), "empty": torch.zeros(0), "twice": shared,
    }  # fmt: skip
    packing.write(tmp_path / "f", tree)
    back = packing.read(tmp_path / "f")
    assert back["a"] == tree["a"]
    assert back[3] == {"b": float("inf")}
    for key in ("t", "view", "half", "scalar", "empty", "twice"):
        assert torch.equal(back[key], tree[key])
        assert back[key].dtype == tree[key].dtype
    with pytest.raises(TypeError, match="object cannot be saved"):
        packing.write(tmp_path / "g", {"a": object()})


def test_keeping_none_is_refused() -> None:
    model = nn.Linear(1, 1)
    with (
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), CoCoDSGD(period=1)) as sync,
        pytest.raises(ValueError, match="keep=0 would delete every checkpoint"),
    ):
        Checkpoints("x", sync, keep=0)
    assert issubclass(CheckpointError, RuntimeError)
