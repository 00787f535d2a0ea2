"""The run folder that the trainer would have left, every row of it marked as simulated.

Two depths. Without learning only time passes, and there is no accuracy. With it, rows of what N workers have really learnt
get the seconds at which they would have learnt it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from cocod_accel.runs.clock import TimeToAccuracy
from cocod_accel.runs.folder import RunFolder
from cocod_accel.simulator.cluster import save_cluster
from cocod_accel.simulator.learning import Learnt
from cocod_accel.simulator.served import ServedTimeline
from cocod_accel.simulator.simulate import Simulated
from cocod_accel.simulator.timeline import Timeline
from cocod_accel.tasks.metrics import first_metric
from cocod_accel.trainer.work import Work

#: What marks every row.
_LABEL = {"simulated": True}


def write(run: Simulated, learning: Iterable[Learnt] | None = None) -> Path:
    """Leave what the trainer leaves, every row marked as simulated; the folder."""
    path = RunFolder.create(run.config)
    folder = RunFolder(path)
    save_cluster(run.cluster, path / "cluster.yaml")
    plan, timeline = run.work.plan, run.timeline
    speeds = {"epoch": 0, "speeds": run.config.speeds, "batches": list(plan.batches), "weights": list(plan.weights)}
    folder.row({"kind": "plan", "step": 0, **speeds, **_LABEL})
    accuracies: list[float] = []
    metric = first_metric(run.config)
    times = TimeToAccuracy(list(run.config.evaluation.targets), metric.better)
    every = run.config.logging.every_steps
    rows = _only_time(timeline.num_steps, every) if learning is None else learning
    epochs = _Epochs(run.work)
    for row in rows:
        values: dict[str, Any] = {"epoch": epochs.at(row.step), **row.values}
        if row.kind == "eval":
            seconds = timeline.train_seconds_after(row.step)
            accuracies.append(float(values[metric.name]))
            times.note(accuracies[-1], seconds)
            values["train_seconds"] = seconds
        else:
            values.update(_counters(run, row.step, epochs.samples_until(row.step)))
        folder.row({"kind": row.kind, "step": row.step, **values, **_LABEL})
    if timeline.sample is not None:
        for rank, spans in timeline.sample.rows.items():
            folder.spans(rank, spans)
    folder.summary(_summary(run, path.name, accuracies, times if learning is not None else None))
    folder.close()
    return path


def _only_time(num_steps: int, every: int) -> Iterable[Learnt]:
    """Where the trainer would have written rows."""
    return (Learnt("train", step, {}) for step in range(every, num_steps + 1, every))


def _counters(run: Simulated, step: int, samples: float) -> dict[str, Any]:
    """Worker 0's, as in the trainer's rows."""
    marks, index = run.timeline.marks, step - 1
    return {
        "train_seconds": marks.seconds[index],
        "samples_per_second": samples / marks.seconds[index],
        "rounds": marks.rounds[index],
        "comm_bytes": marks.sent_bytes[index],
        "comm_exposed_seconds": marks.exposed_seconds[index],
        "comm_hidden_seconds": marks.hidden_seconds[index],
        **_lateness(run.timeline, index),
    }


def _lateness(timeline: Timeline, index: int) -> dict[str, Any]:
    """Worker 0's, where there is a server."""
    if not isinstance(timeline, ServedTimeline):
        return {}
    return dict(zip(("staleness", "largest_staleness", "server_bytes"), timeline.lateness[index], strict=True))


class _Epochs:
    """Where in the epochs a step of worker 0 is."""

    def __init__(self, work: Work) -> None:
        self._own = [work.batch * steps for steps in work.steps]
        self._ends = list(accumulate(work.steps))
        batches = work.plan.batches
        sums = {steps: sum(m * s for m, s in zip(batches, steps, strict=True)) for steps in set(work.all_steps)}
        self._all = [sums[steps] for steps in work.all_steps]
        self._before = [0, *accumulate(self._all)]
        self._batch = work.batch

    def at(self, step: int) -> int:
        """The epoch of a step, both counted from 1."""
        return bisect_left(self._ends, step) + 1

    def samples_until(self, step: int) -> float:
        """Of all workers."""
        index = self.at(step) - 1
        begun = self._ends[index - 1] if index else 0
        return self._before[index] + (step - begun) * self._batch * self._all[index] / self._own[index]


def _late(timeline: Timeline) -> dict[str, Any]:
    """Of all workers, where there is a server."""
    if not isinstance(timeline, ServedTimeline):
        return {}
    return {
        "staleness": timeline.staleness,
        "largest_staleness": timeline.largest_staleness,
        "server_bytes": timeline.server_bytes,
        "server_link_share": timeline.link_share,
    }


def _summary(run: Simulated, name: str, accuracies: list[float], times: TimeToAccuracy | None) -> dict[str, Any]:
    """As the trainer's; what nobody learnt is null."""
    config, timeline = run.config, run.timeline
    fleet = timeline.fleet
    metric = first_metric(config)
    reached = {} if times is None else times.seconds
    return {
        "name": name,
        "algorithm": config.algorithm.name,
        "task": config.task.name,
        "model": config.model.name,
        "seed": config.seed,
        "num_workers": run.cluster.num_workers,
        "workers_per_replica": config.cluster.workers_per_replica,
        "proportional": config.cluster.proportional,
        "batches": list(run.work.plan.batches),
        "clock": config.clock,
        "emulated": config.emulated,
        "steps": timeline.num_steps,
        "epochs": run.work.num_epochs,
        "rounds": timeline.rounds,
        **metric.summary(
            accuracies[-1] if accuracies else None,
            max(accuracies, key=metric.score, default=None),
            {target: reached.get(target) for target in config.evaluation.targets},
        ),
        "train_seconds": timeline.train_seconds,
        "comm_bytes": fleet.sent_bytes,
        "comm_exposed_seconds": float(fleet.exposed_seconds.max()),
        "comm_hidden_seconds": float(fleet.hidden_seconds.max()),
        "samples_per_second": run.samples_per_second,
        "speedup_over_one_worker": run.speedup,
        **_late(timeline),
    }
