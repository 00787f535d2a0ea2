"""Stop a run somewhere, go on with it, and compare every bit with a run that was never stopped.

    python -m tests.resume          # a pairwise cover: five algorithms, sampling, optimizers, 20 points, two ways to stop

CI runs a sample of it (``tests/test_resume.py``).
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cocod_accel import ALGORITHMS, train
from cocod_accel.comm.device import Moment
from cocod_accel.trainer.export import model_digest
from cocod_accel.trainer.recorder import Recorder
from cocod_accel.trainer.resume import Resumption
from cocod_accel.trainer.trainer import Trainer
from tests.workers import Outcome, run_outcomes, run_workers

ROOT = Path(__file__).parents[1]
COMMON = [
    "task.name=synthetic", "task.args={num_train: 200, num_test: 40, size: 8}", "task.augment=true",
    "model.name=tests.own_code:with_dropout_and_batch_norm", "batch_size=6", "schedule.epochs=3",
    "schedule.warmup_epochs=1", "schedule.decay_epochs=[2]", "algorithm.period=[[0, 1], [1, 3]]", "logging.every_steps=2",
    "logging.trackers=[]", "cluster.device=cpu", "checkpoint.every_epochs=null", "checkpoint.keep=1",
    "cluster.dead_seconds=5",  # nobody is there to say who was killed
]  # fmt: skip
#: Steps after which a checkpoint is written: every position in a round, epoch ends, the change of the period at the first.
POINTS = [1, 2, 3, 5, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 22, 23, 24]
EVALUATION = 0  # the 20th: killed while evaluating


@dataclass(frozen=True)
class Case:
    algorithm: str
    proportional: bool
    optimizer: str
    point: int
    is_kill: bool
    num_workers: int = 2
    workers_per_replica: int = 1
    payload: str = "fp32"
    #: With an outer optimizer and a share of the own progress.
    has_anchor: bool = False
    delay: int | None = None

    @property
    def setting(self) -> list[str]:
        rate = 0.02 if self.optimizer == "sgd" else 0.002
        speeds = f"cluster.speeds={[1, 2, 2, 1][: self.num_workers]}"
        sampling = self.proportional and self.algorithm != "asynlocal"
        options = [f"optimizer.name={self.optimizer}", f"optimizer.learning_rate={rate}"]
        workers = f"cluster.num_workers={self.num_workers}"
        return [
            workers,
            f"cluster.workers_per_replica={self.workers_per_replica}",
            f"algorithm.name={self.algorithm}",
            f"algorithm.payload={self.payload}",
            speeds,
            f"cluster.proportional={str(sampling).lower()}",
            *options,
            *([] if self.delay is None else [f"algorithm.delay={self.delay}"]),
            *(["algorithm.own_share=0.75", "algorithm.outer.momentum=0.5"] if self.has_anchor else []),
        ]


def arguments(case: Case, output: Path, name: str, *more: str) -> list[str]:
    return [*COMMON, *case.setting, f"output={output}", f"name={name}", *more]


def worker(rank: int, given: list[str], stop: tuple[str, int] | None = None) -> int:
    """Train as launched; write this worker's model after every step beside the run; end where ``stop`` says."""
    os.environ.update(
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    output = next(argument.removeprefix("output=") for argument in given if argument.startswith("output="))
    log = os.open(Path(output) / f"said_by_{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    noted, saved, evaluated = Recorder.computed, Resumption.save, Trainer._evaluate

    def computed(self: Recorder, start: Moment | None) -> None:
        noted(self, start)
        with (self.folder.path / f"trace_{rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.worker.step, model_digest(self.worker.module.state_dict())]) + "\n")
        # Two steps after the checkpoint, so that something is lost and must be done again.
        if stop is not None and stop[0] == "kill" and rank == 1 and self.worker.step == stop[1] + 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self: Resumption) -> None:
        saved(self)
        if stop is not None and stop[0] == "leave" and self.worker.step >= stop[1]:
            raise SystemExit(7)

    def evaluate(self: Trainer, epoch: int) -> None:
        if stop is not None and stop[0] == "evaluation" and epoch == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        evaluated(self, epoch)

    Recorder.computed, Resumption.save, Trainer._evaluate = computed, save, evaluate  # type: ignore[method-assign]
    return train.main(given)


def said(output: Path) -> str:
    """What all workers have printed since the last call."""
    logs = sorted(output.glob("said_by_*"))
    text = "".join(log.read_text() for log in logs)
    for log in logs:
        log.unlink()
    return text


def traces(run: Path) -> list[dict[int, int]]:
    """Of every worker: its model after each step; of steps done twice, the later."""
    files = sorted(run.glob("trace_*.jsonl"))
    return [dict(json.loads(line) for line in file.read_text().splitlines()) for file in files]


def record(run: Path) -> tuple[list[Any], dict[str, Any]]:
    """Metric rows and summary without anything that is a time."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if "second" not in k} for row in rows]
    summary = json.loads((run / "summary.json").read_text())
    kept = {k: v for k, v in summary.items() if "second" not in k and k not in ("name", "time_to_accuracy")}
    return rows, {**kept, "reached": [seconds is not None for seconds in summary["time_to_accuracy"].values()]}


@functools.cache
def _baselines() -> Path:
    """Undisturbed runs are made once, whoever asks."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def baseline(case: Case) -> Path:
    output = _baselines()
    n = case.num_workers
    parts = [
        case.algorithm,
        case.proportional,
        case.optimizer,
        n,
        case.workers_per_replica,
        case.payload,
        case.has_anchor,
        case.delay,
    ]
    name = "-".join(["undisturbed", *map(str, parts)])
    if not (output / name / "summary.json").is_file():
        assert run_workers(n, worker, arguments(case, output, name), seconds=100, fresh=True) == [0] * n
    return output / name


def stop_and_go_on(case: Case, output: Path, name: str) -> None:
    """Stop at the case's point and go on: the same bits as the undisturbed run, or an AssertionError."""
    undisturbed = baseline(case)
    run = output / name
    every = f"checkpoint.every_steps={case.point or 7}"
    way = "evaluation" if case.point == EVALUATION else "kill" if case.is_kill else "leave"
    given = arguments(case, output, name, every)
    outcomes: list[Outcome] = run_outcomes(case.num_workers, worker, given, (way, case.point), seconds=100, fresh=True)
    if not (run / "summary.json").is_file():  # the last points are so late that a kill comes after the end
        assert any(outcome.error is not None or outcome.result != 0 for outcome in outcomes)
    assert run_workers(case.num_workers, worker, given, seconds=100, fresh=True) == [0] * case.num_workers
    assert not list(output.glob(f"{name}-2")), "a second folder was begun"
    assert record(run) == record(undisturbed)
    assert traces(run) == traces(undisturbed)
    assert not list(run.rglob("*.tmp"))
    sizes = [len(file.read_text().splitlines()) for file in sorted((run / "spans").glob("*.jsonl"))]
    assert all(sizes)


def cover() -> list[Case]:
    """Every pair of values of any two of the five settings occurs."""
    cases = [
        Case(algorithm, (p + a) % 2 == 0, ("sgd", "adam")[(p // 2 + a) % 2], point, (p // 4 + a // 2) % 2 == 0)
        for p, point in enumerate([*POINTS, EVALUATION])
        for a, algorithm in enumerate(ALGORITHMS)
    ]
    rows = [(c.algorithm, c.proportional, c.optimizer, c.point, c.is_kill) for c in cases]
    for i, j in itertools.combinations(range(5), 2):
        wanted = set(itertools.product({row[i] for row in rows}, {row[j] for row in rows}))
        missing = wanted - {(row[i], row[j]) for row in rows}
        assert not missing, f"not covered: {missing}"
    return cases


def main() -> int:
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(tqdm(cover(), unit="pair")):
            try:
                stop_and_go_on(case, Path(folder), f"case{number}")
            except AssertionError as error:
                failures.append(case)
                tqdm.write(f"{case}: {str(error)[:500]}")
    print(f"{len(cover()) - len(failures)} of {len(cover())} stops and resumptions gave the same bits")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
