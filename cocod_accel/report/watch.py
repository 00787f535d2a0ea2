"""The progress of a run in the terminal, from its folder alone.

Worker 0 writes rows every few steps; all workers write spans at the end of every epoch. Whether a process still uses
the folder is read from the kernel's list of locks: taking the lock would make a run that wants to resume find its
folder in use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from cocod_accel.config.settings import ACCURACY
from cocod_accel.config.strict import printable
from cocod_accel.runs.reading import Run, checked, is_number, read_parts
from cocod_accel.runs.spans import COMPUTE, Span, read_spans, shares

#: A run with no process on this machine counts as stopped after this long without a row. It may be restarting, or be on
#: another machine that shares the folder.
_QUIET_SECONDS = 15.0
_BAR = 30

EXIT_STOPPED = 1


@dataclass(frozen=True)
class Snapshot:
    """The progress of a run."""

    name: str
    epochs: int
    step: int = 0
    #: Epochs completed, with the fraction of the current one if known.
    done_epochs: float = 0.0
    num_steps: int | None = None
    #: What ``accuracy`` is.
    metric: str = ACCURACY
    accuracy: float | None = None
    best_accuracy: float | None = None
    loss: float | None = None
    train_seconds: float | None = None
    #: Each worker's seconds waiting for communication and computing (waits included), as far as written.
    waits: Mapping[int, tuple[float, float]] | None = None
    #: Seconds that worker 0 has waited for communication, as of its last row.
    waited: float | None = None
    #: Until training ends, evaluations included.
    left_seconds: float | None = None
    clock: str = "real"


def snapshot(run: Run, spans: list[Span], row_age_seconds: float = 0.0) -> Snapshot:
    """The progress that the rows and spans of a run show."""
    rows = [row for row in run.rows if is_number(row.get("step"))]
    if not rows:
        return Snapshot(run.name, run.epochs)
    evaluations, training = run.evaluations, run.training
    step = int(rows[-1]["step"])
    seconds = next((float(r["train_seconds"]) for r in reversed(rows) if is_number(r.get("train_seconds"))), None)
    counted = [row for row in evaluations if is_number(row.get("step")) and is_number(row.get("epoch")) and row["epoch"] > 0]
    per_epoch = counted[-1]["step"] / counted[-1]["epoch"] if counted and counted[-1]["step"] > 0 else None
    num_steps = run.steps if run.steps or per_epoch is None else round(per_epoch * run.epochs)
    started = max((int(row["epoch"]) - 1 for row in training if is_number(row.get("epoch"))), default=0)
    done = started if per_epoch is None else min(step / per_epoch, run.epochs)
    left = None
    if num_steps is not None and seconds is not None and step > 0:
        left = max(seconds / step * (num_steps - step) * _overhead(spans, rows) - row_age_seconds, 0.0)
    accuracies = [float(row["accuracy"]) for row in evaluations]
    best = max(accuracies, key=run.score, default=None)
    return Snapshot(
        name=run.name,
        epochs=run.epochs,
        step=step,
        done_epochs=done,
        num_steps=num_steps,
        accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=best,
        metric=run.metric,
        loss=next((float(row["loss"]) for row in reversed(training) if is_number(row.get("loss"))), None),
        train_seconds=seconds,
        waits=_waits(spans),
        waited=next(
            (float(r["comm_exposed_seconds"]) for r in reversed(training) if is_number(r.get("comm_exposed_seconds"))), None
        ),
        left_seconds=left,
        clock=run.clock,
    )


def _overhead(spans: list[Span], rows: list[Mapping[str, object]]) -> float:
    """Elapsed seconds per second of training: evaluations and checkpoints take time too. Spans count from the start."""
    steps = [span for span in spans if span.rank == 0 and span.name == COMPUTE]
    if not steps:
        return 1.0
    last = steps[-1]
    at = [float(str(r["train_seconds"])) for r in rows if r["step"] == last.step and is_number(r.get("train_seconds"))]
    return max(last.end / at[-1], 1.0) if at and at[-1] > 0 else 1.0


def _waits(spans: list[Span]) -> dict[int, tuple[float, float]]:
    found = shares(spans)
    return {share.rank: (share.wait_seconds, share.compute_seconds + share.wait_seconds) for share in found}


# ------------------------------------------------------------------------------------------------ in words


def lines(now: Snapshot) -> list[str]:
    """The snapshot as a terminal shows it."""
    share = min(max(now.done_epochs / now.epochs, 0.0), 1.0)
    bar = "#" * round(_BAR * share) + "." * (_BAR - round(_BAR * share))
    steps = f"step {now.step}" + (f" of {now.num_steps}" if now.num_steps is not None else "")
    left = "known after the first evaluation" if now.left_seconds is None else f"about {duration(now.left_seconds)}"
    width = max(10, len(now.metric))

    def line(name: str, text: str) -> str:
        return f"{name:<{width}} {text}"

    said = [
        f"{now.name}{'' if now.clock == 'real' else f' ({now.clock})'}",
        f"[{bar}] {share:4.0%}  epoch {min(math.floor(now.done_epochs) + 1, now.epochs)} of {now.epochs}, {steps}",
        line("time left", left),
        line(now.metric, f"{_shown(now.metric, now.accuracy)} (best {_shown(now.metric, now.best_accuracy)})"),
        line("loss", "-" if now.loss is None else f"{now.loss:.4f}"),
        line("training", "-" if now.train_seconds is None else duration(now.train_seconds)),
    ]
    if now.waited is not None:
        share_of = f" ({now.waited / now.train_seconds:.0%} of training)" if now.train_seconds else ""
        said.append(line("waiting", f"{now.waited:.1f} s for communication{share_of}, worker 0"))
    for rank, (waited, stepped) in (now.waits or {}).items():
        part = f" ({waited / stepped:.0%} of its steps)" if stepped else ""
        said.append(line(f"worker {rank}", f"waited {waited:.1f} s for communication{part}"))
    if not now.waits:
        said.append("each worker's waiting: known after the first epoch")
    return said


def _shown(metric: str, value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}" if metric == ACCURACY else f"{value:.4f}"


def duration(seconds: float) -> str:
    """``12.3 s``, ``4 min 05 s``, ``2 h 07 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


# ---------------------------------------------------------------------------------------------- the folder


def is_locked(folder: Path) -> bool:
    """Whether a process on this machine is using a run folder."""
    try:
        # By inode only: on layered and copy-on-write file systems the kernel's device differs from that of stat().
        mine = f":{(folder / '.lock').stat().st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return any("FLOCK" in words and any(word.endswith(mine) for word in words) for words in locks)
    except OSError:
        return False


def watch(folder: Path, out: TextIO, once: bool, every_seconds: float = 1.0) -> int:
    """Show a run until it ends. Returns 0 if it has finished or is running, 1 if it was stopped or killed."""
    if not every_seconds > 0:
        raise ValueError(f"--every={every_seconds:g}: must be positive")
    shown = 0
    if not once and not folder.exists():
        _replace(out, shown, [f"{folder}: not there yet; waiting for a run to begin (Ctrl-C ends this)"])
        shown = 1
        while not (folder / "config.yaml").is_file():
            time.sleep(every_seconds)
    spans: list[Span] = []
    sizes: list[int] = []
    while True:
        run = read_parts(folder)
        age = row_age(folder)
        if (folder / "summary.json").exists():
            _replace(out, shown, [_ended(checked(read_parts(folder)))])
            return 0
        # There are many spans, written once per epoch.
        before, sizes = sizes, [file.stat().st_size for file in sorted(folder.glob("spans/*.jsonl"))]
        spans = spans if sizes == before else read_spans(folder)
        now = snapshot(run, spans, age)
        if not is_locked(folder) and age > (0 if once else _QUIET_SECONDS):
            _replace(out, shown, [_stopped(now, age)])
            return EXIT_STOPPED
        said = lines(now)
        _replace(out, shown, said)
        shown = len(said)
        if once:
            return 0
        time.sleep(every_seconds)


def row_age(folder: Path) -> float:
    """Seconds since the last row, or since the folder was created."""
    path = folder / "metrics.jsonl"
    return max(time.time() - (path if path.exists() else folder).stat().st_mtime, 0.0)


def _ended(run: Run) -> str:
    summary = run.summary or {}
    learnt = ""
    if summary["best_accuracy"] is not None:
        last, best = (_shown(run.metric, summary[f"{which}_accuracy"]) for which in ("final", "best"))
        learnt = f", {run.metric} {last} (best {best})"
    clock = str(summary.get("clock", "real"))
    time_of = "training" if clock == "real" else f"{clock} training"
    return (
        f"{run.name}: finished{learnt} after {duration(summary['train_seconds'])} of {time_of}; "
        f"waited {summary['comm_exposed_seconds']:.1f} s for communication"
    )


def _stopped(now: Snapshot, age: float) -> str:
    where = f"at step {now.step}, epoch {min(math.floor(now.done_epochs) + 1, now.epochs)} of {now.epochs}"
    return (
        f"{now.name}: is not running on this machine; it was stopped or killed {where}, {duration(age)} ago; "
        "rerun the same cocod train command to resume it"
    )


def _replace(out: TextIO, shown: int, said: list[str]) -> None:
    """Overwrite the previous output: move up, and clear to the end of the screen."""
    out.write((f"\x1b[{shown}A\x1b[J" if shown else "") + "\n".join(map(printable, said)) + "\n")
    out.flush()
