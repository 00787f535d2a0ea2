"""The trainer through the commands users type: real accelerate launch, real wandb files, real signals."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cocod_accel import ALGORITHMS, cli, train
from cocod_accel.checkpoint.files import checkpoints_in
from cocod_accel.comm.device import Moment
from cocod_accel.config.loading import load_config
from cocod_accel.report import read_summary
from cocod_accel.trainer.recorder import Recorder
from tests.blocks import read_blocks
from tests.workers import run_outcomes, run_workers

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TINY = [
    "task.name=synthetic",
    "model.name=mlp",
    "batch_size=8",
    "schedule.epochs=2",
    "schedule.warmup_epochs=1",
    "schedule.decay_epochs=[]",
    "algorithm.period=[[0, 1], [1, 3]]",
    "logging.every_steps=5",
    "cluster.device=cpu",
]
SUMMARY_KEYS = {
    "name",
    "algorithm",
    "num_workers",
    "steps",
    "epochs",
    "best_accuracy",
    "final_accuracy",
    "train_seconds",
    "time_to_accuracy",
    "comm_bytes",
    "comm_exposed_seconds",
    "comm_hidden_seconds",
    "samples_per_second",
}


def command(*arguments: str, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    """Run one of the installed commands in the repository's folder; whatever it started is ended with it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [str(BIN / arguments[0]), *arguments[1:]],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


# ------------------------------------------------------------------------------------- the real commands


def test_cocod_train_prints_and_runs_the_accelerate_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    done = command("cocod", "train", "configs/quickstart.yaml", *TINY, "--workers", "2", f"output={tmp_path}", "name=tiny")
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[0]
    assert line.startswith(
        "accelerate launch --config_file configs/accelerate/cpu_2.yaml --num_processes 2 -m cocod_accel.train"
    )
    run = tmp_path / "tiny"
    summary = read_summary(run)
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["num_workers"], summary["steps"], summary["epochs"]) == (2, 64, 2)
    assert summary["best_accuracy"] > 0.5
    assert load_config([str(run / "config.yaml")]).schedule.epochs == 2
    evaluations = rows_of(run, "eval")
    assert [row["epoch"] for row in evaluations] == [1, 2]
    assert evaluations[0]["train_seconds"] < evaluations[1]["train_seconds"] <= summary["train_seconds"]
    assert len(rows_of(run, "train")) == 12
    for rank in (0, 1):
        spans = [json.loads(line) for line in (run / "spans" / f"rank_{rank}.jsonl").read_text().splitlines()]
        assert {span["name"] for span in spans} == {"compute", "communicate", "wait", "checkpoint"}
        assert all(span.keys() == {"rank", "step", "name", "start", "end"} for span in spans)
        assert all(0 <= span["start"] <= span["end"] for span in spans)
        assert sum(span["name"] == "compute" for span in spans) == 64
    check_wandb(run, summary)
    text = "".join(p.read_text(errors="replace") for p in run.rglob("*") if p.is_file() and p.suffix in (".yaml", ".json"))
    assert "WANDB_API_KEY" not in text


def check_wandb(run: Path, summary: dict[str, Any]) -> None:
    """Read the offline file back with wandb's own reader."""
    from wandb.proto import wandb_internal_pb2

    record_type: Any = vars(wandb_internal_pb2)["Record"]

    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    history: list[dict[str, Any]] = []
    ended: dict[str, Any] = {}
    config: dict[str, Any] = {}
    metrics: dict[str, str] = {}
    for payload in leveldb_records(file.read_bytes()[7:]):
        record = record_type()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            history.append({(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item})
        elif kind == "summary":
            ended.update({(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.summary.update})
        elif kind == "config":
            config.update({(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.config.update})
        elif kind == "metric":
            metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    evaluations = [row for row in history if "eval/accuracy" in row]
    expected = [(row["train_seconds"], row["accuracy"]) for row in rows_of(run, "eval")]
    assert [(row["train_seconds"], row["eval/accuracy"]) for row in evaluations] == expected
    assert metrics["eval/*"] == "train_seconds"
    assert ended["final_accuracy"] == summary["final_accuracy"]
    assert "time_to_accuracy.0.7" in ended
    assert config["algorithm.name"] == "cocod"


def leveldb_records(data: bytes) -> list[bytes]:
    """The records of a LevelDB log: blocks of 32 kB, fragments of crc, length and type."""
    records, part, position = [], b"", 7  # wandb's own header of 7 bytes stands in the first block
    data = b"\0" * 7 + data
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(part)
            part = b""
    return records


@pytest.mark.slow
def test_accelerate_launch_and_torchrun_give_the_same_numbers(tmp_path: Path) -> None:
    """On one machine; ``test_multinode`` compares them on two."""
    arguments = ["-m", "cocod_accel.train", "configs/quickstart.yaml", *TINY, "logging.trackers=[]", f"output={tmp_path}"]
    launched = command("accelerate", "launch", "--config_file", "configs/accelerate/cpu_2.yaml", *arguments, "name=a")
    assert launched.returncode == 0, launched.stderr
    torchrun = command("torchrun", "--nproc_per_node", "2", "--standalone", *arguments, "name=b")
    assert torchrun.returncode == 0, torchrun.stderr
    digests = {read_summary(tmp_path / name)["model_digest"] for name in ("a", "b")}
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_homogeneous_profile_runs_as_16_processes_and_ends_with_16_equal_models(tmp_path: Path) -> None:
    overrides = [
        "task.name=synthetic",
        "task.args={num_train: 512, num_test: 64, size: 8}",
        "model.name=mlp",
        "batch_size=4",
        "schedule.epochs=12",
        "schedule.decay_epochs=[11]",
        "logging.trackers=[]",
        "cluster.device=cpu",
        f"output={tmp_path}",
        "name=sixteen",
    ]
    done = command("cocod", "train", "configs/homogeneous_16gpu.yaml", *overrides, seconds=380)
    assert done.returncode == 0, done.stderr
    assert "configs/accelerate/cpu_16.yaml" in done.stdout
    summary = read_summary(tmp_path / "sixteen")  # the trainer refuses to write it if the 16 digests differ
    assert summary["num_workers"] == 16
    assert summary["steps"] == 12 * 8
    assert len(list((tmp_path / "sixteen" / "spans").glob("rank_*.jsonl"))) == 16


def test_workers_that_are_not_there_are_missed(tmp_path: Path) -> None:
    """FACTS of accelerate: --cpu --num_processes 2 starts one process without a word."""
    arguments = ["-m", "cocod_accel.train", "configs/quickstart.yaml", *TINY, f"output={tmp_path / 'runs'}"]
    done = command("accelerate", "launch", "--cpu", "--num_processes", "2", *arguments)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "cluster.num_workers=2: only 1 process was started; run: accelerate launch --config_file" in line
    assert not (tmp_path / "runs").exists()


def test_more_workers_than_meant_are_refused(tmp_path: Path) -> None:
    arguments = ["-m", "cocod_accel.train", "configs/quickstart.yaml", *TINY, f"output={tmp_path / 'runs'}"]
    done = command("torchrun", "--nproc_per_node", "3", "--standalone", *arguments)
    assert done.returncode != 0
    assert "error: cluster.num_workers=2: 3 processes were started; run: accelerate launch" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_bad_key_through_the_real_launch_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    done = command("cocod", "train", "configs/quickstart.yaml", "schedule.epoch=3", f"output={tmp_path / 'runs'}")
    assert done.returncode == 2
    assert done.stderr == "error: override schedule.epoch: unknown key schedule.epoch; did you mean schedule.epochs?\n"
    assert done.stdout == ""


def test_a_loss_that_is_no_number_stops_everybody_and_names_the_step(tmp_path: Path) -> None:
    own = ["task.name=tests.own_code:make_tensors", "model.name=tests.own_code:explode", "algorithm.period=3"]
    done = command(
        "cocod", "train", "configs/quickstart.yaml", *TINY, *own, "batch_size=2", "logging.trackers=[]", f"output={tmp_path}"
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "error: worker 1: the loss is not finite at step 7; lower the learning rate" in errors
    assert "Traceback" not in done.stderr


def test_ctrl_c_is_one_line_and_leaves_nobody(tmp_path: Path) -> None:
    arguments = [
        "configs/quickstart.yaml",
        *TINY,
        "schedule.epochs=5000",
        "logging.trackers=[]",
        f"output={tmp_path}",
        "name=run",
    ]
    process = subprocess.Popen(
        [str(BIN / "cocod"), "train", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").is_file():
            assert time.monotonic() < deadline, "training did not begin"
            assert process.poll() is None
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130
    assert [line for line in err.splitlines() if line.strip()] == [
        "interrupted; the run folder holds everything written so far"
    ]
    marker = f"output={tmp_path}"
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if marker in read_quietly(p)]
    assert not left, f"processes are left: {left}"


def read_quietly(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ------------------------------------------------------------------- the trainer in the test's own workers


def as_launched(rank: int, arguments: list[str]) -> int:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return train.main(arguments)


def strip_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "seconds" not in k and "per_second" not in k} for row in rows]


# What the others would add, tests/test_learning.py sees: a real run equals one in one process, to the bit.
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS])
def test_the_same_seed_gives_the_same_metrics_and_another_seed_does_not(name: str, tmp_path: Path) -> None:
    def run(label: str, seed: int) -> Any:
        arguments = ["configs/quickstart.yaml", *TINY, f"algorithm.name={name}", f"seed={seed}", f"name={label}"]
        arguments += [f"output={tmp_path}", "logging.trackers=[]", "model.name=small_resnet", "task.args={num_train: 128}"]
        assert run_workers(2, as_launched, [str(ROOT / arguments[0]), *arguments[1:]], fresh=True) == [0, 0]
        rows = [json.loads(line) for line in (tmp_path / label / "metrics.jsonl").read_text().splitlines()]
        return strip_times(rows), read_summary(tmp_path / label)["model_digest"]

    first = run("first", 0)
    assert run("second", 0) == first
    other = run("other", 1)
    assert other[0] != first[0]
    assert other[1] != first[1]


@pytest.mark.parametrize("data", ["make_tensors", "make_data"])
def test_a_users_own_model_and_data_need_no_change_here(data: str, tmp_path: Path) -> None:
    arguments = [str(ROOT / "configs/quickstart.yaml"), *TINY, f"task.name=tests.own_code:{data}", "batch_size=3"]
    arguments += ["model.name=tests.own_code:make_model", "model.args={width: 8}", "schedule.epochs=6", f"output={tmp_path}"]
    arguments += ["name=own", "logging.trackers=[]", *(["task.args={count: 60}"] if data == "make_data" else [])]
    assert run_workers(2, as_launched, arguments, fresh=True) == [0, 0]
    assert read_summary(tmp_path / "own")["final_accuracy"] == 1.0


def with_folder_on_path(rank: int, folder: str, arguments: list[str]) -> int:
    sys.path.insert(0, folder)
    return as_launched(rank, arguments)


def test_the_algorithm_of_the_tutorial_is_trained_from_yaml(tmp_path: Path) -> None:
    """With a pull of 1 it is Local-SGD, to the bit; with another it is not."""
    page = (ROOT / "docs" / "tutorials" / "own_algorithm.md").read_text()
    (code,) = [block.text for block in read_blocks(page) if block.title == "pulled.py"]
    (tmp_path / "pulled.py").write_text(code)
    given = [str(ROOT / "configs/quickstart.yaml"), *TINY, f"output={tmp_path}", "logging.trackers=[]", "algorithm.period=3"]
    algorithms = {
        "local": "algorithm: {name: local}",
        "all": "algorithm: {name: 'pulled:PulledSGD', args: {pull: 1.0}}",
        "half": "algorithm: {name: 'pulled:PulledSGD'}",
    }
    digests = {}
    for name, text in algorithms.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        more = [str(tmp_path / f"{name}.yaml"), f"name={name}"]
        assert run_workers(2, with_folder_on_path, str(tmp_path), [*given, *more]) == [0, 0]
        digests[name] = read_summary(tmp_path / name)["model_digest"]
    assert digests["all"] == digests["local"] != digests["half"]
    assert read_summary(tmp_path / "all")["algorithm"] == "pulled:PulledSGD"


def test_proportional_sampling_reaches_the_trainer(tmp_path: Path) -> None:
    arguments = [str(ROOT / "configs/quickstart.yaml"), *TINY, "cluster.speeds=[1, 2]", "cluster.proportional=true"]
    arguments += [f"output={tmp_path}", "name=mixed", "logging.trackers=[]"]
    assert run_workers(2, as_launched, arguments, fresh=True) == [0, 0]
    summary = read_summary(tmp_path / "mixed")
    assert summary["batches"] == [8, 16]
    assert summary["steps"] == 2 * (512 // 24)


def test_asynlocal_takes_steps_by_speed(tmp_path: Path) -> None:
    arguments = [str(ROOT / "configs/quickstart.yaml"), *TINY, "cluster.speeds=[1, 2]", "algorithm.name=asynlocal"]
    arguments += [f"output={tmp_path}", "name=own_steps", "logging.trackers=[]"]
    assert run_workers(2, as_launched, arguments, fresh=True) == [0, 0]
    counts = []
    for rank in (0, 1):
        lines = (tmp_path / "own_steps" / "spans" / f"rank_{rank}.jsonl").read_text().splitlines()
        counts.append(sum(json.loads(line)["name"] == "compute" for line in lines))
    assert counts[1] == 2 * counts[0] > 0


def test_an_earlier_run_of_the_same_name_is_not_touched(tmp_path: Path) -> None:
    arguments = [str(ROOT / "configs/quickstart.yaml"), *TINY, f"output={tmp_path}", "name=twice"]
    for _ in range(2):
        assert run_workers(2, as_launched, arguments, fresh=True) == [0, 0]
    assert read_summary(tmp_path / "twice")["name"] == "twice"
    assert read_summary(tmp_path / "twice-2")["name"] == "twice-2"
    assert os.environ["WANDB_MODE"] == "disabled"
    assert not (tmp_path / "twice" / "wandb").exists()


def test_a_tracker_that_fails_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    arguments = [str(ROOT / "configs/quickstart.yaml"), *TINY, f"output={tmp_path}", "name=tracked"]
    done = command("cocod", "train", *arguments, "logging.trackers=[tensorboard]")
    assert done.returncode == 0, done.stderr
    assert read_summary(tmp_path / "tracked")["final_accuracy"] > 0.5
    if importlib.util.find_spec("tensorboard") is None:
        assert done.stderr.count("tensorboard is off for this run") == 1


def test_an_output_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = [str(ROOT / "configs/quickstart.yaml"), *TINY, f"output={tmp_path / 'file' / 'runs'}", "logging.trackers=[]"]
    outcomes = run_outcomes(2, as_launched, arguments, seconds=60, fresh=True)
    assert outcomes[0].result == 2


def stopped_by_one(rank: int, arguments: list[str]) -> int:
    """Worker 1 alone is asked to stop after its 9th training step."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    noted = Recorder.computed

    def computed(self: Recorder, start: Moment | None) -> None:
        noted(self, start)
        if rank == 1 and self.worker.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    Recorder.computed = computed  # type: ignore[method-assign]
    return train.main(arguments)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_stop_asked_of_one_worker_is_agreed_by_all_at_a_round_end_and_saved(name: str, tmp_path: Path) -> None:
    arguments = [str(ROOT / "configs/quickstart.yaml"), *TINY, f"algorithm.name={name}", "schedule.epochs=50"]
    arguments += [f"output={tmp_path}", "name=stopped", "logging.trackers=[]", "algorithm.period=4"]
    assert run_workers(2, stopped_by_one, arguments, fresh=True) == [143, 143]
    run = tmp_path / "stopped"
    assert not (run / "summary.json").exists(), "it is not finished"
    # Asked at step 9: local averages next at 12; cocod launches then and learns of it at 16; the others ask every 5 steps.
    # streaming_diloco launches at 12, too, and merges a step later.
    stopped = {"local": 12, "asynlocal": 12, "diloco": 12, "cocod": 16, "streaming_diloco": 13, "ssgd": 10, "pipe": 10}[name]
    newest = checkpoints_in(run / "checkpoints")[0]
    assert newest.name == f"step_{stopped:010d}"
    assert len(list(newest.glob("worker_*.safetensors"))) == 2


# --------------------------------------------------------------------------------------------- list, doctor


def test_list_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    for word in ("cocod", "fashion_small", "small_resnet", "homogeneous_16gpu.yaml"):
        assert word in listed
    assert cli.main(["doctor"]) == 0
    assert "accelerate launch --config_file" in capsys.readouterr().out


def test_without_a_terminal_the_first_epoch_is_not_silent(tmp_path: Path) -> None:
    """Every ten seconds, that is; here after every row."""
    arguments = ["configs/quickstart.yaml", *TINY, "cluster.num_workers=1", "logging.trackers=[]", f"output={tmp_path}"]
    code = f"""
import cocod_accel.trainer.recorder as recorder, cocod_accel.train as train
recorder._QUIET_SECONDS = -1.0
train.main({arguments!r})
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    first = next(iter(done.stdout.splitlines()), done.stderr)
    assert re.fullmatch(r"epoch   1/2  step 5 of \d+  loss \d+\.\d{4}  \d+ samples/s", first)
