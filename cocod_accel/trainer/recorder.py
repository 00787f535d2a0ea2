"""What a run tells: rows, spans, trackers, the progress bar, lines on the terminal, and the summary.

Rows, trackers and lines are worker 0's; spans are written by every worker.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from tqdm import tqdm

from cocod_accel.comm.device import Moment
from cocod_accel.runs.folder import RunFolder
from cocod_accel.sync.auto import Decision
from cocod_accel.trainer.export import model_digest
from cocod_accel.trainer.trackers import Trackers
from cocod_accel.trainer.worker import Worker

#: Without a terminal, and so without a bar, nothing is said for no longer than this, as far as steps are logged.
_QUIET_SECONDS = 10.0


#: How the names of such figures begin.
_COMMUNICATION = ("comm_", "drift", "rounds", "staleness", "largest_staleness", "server_bytes")


class Recorder:
    """Writes what one worker knows of a run. It reads the worker and changes nothing of it."""

    def __init__(self, worker: Worker, folder: RunFolder) -> None:
        self.worker, self.folder, self.config = worker, folder, worker.config
        self.trackers = Trackers(worker.accelerator, self.config, folder.path)
        # The mark of rows and lines of an emulated run; kept, because a row is made in every step.
        self._label: dict[str, Any] = {} if self.config.emulated is None else {"emulated": True}
        self._note = " (emulated)" if self._label else ""
        #: (step, name, start, end); a device comes to its own later.
        self._spans: list[tuple[int, str, Moment, Moment]] = []
        self._bar: Any = None
        self._said = time.monotonic()

    # ---- the terminal

    def start_bar(self) -> None:
        """Show a progress bar from where the run is, on a terminal."""
        worker = self.worker
        hidden = not (worker.is_main and sys.stderr.isatty())
        done = sum(worker.work.steps[: worker.at.epoch]) + worker.at.index
        total = sum(worker.work.steps)
        self._bar = tqdm(total=total, initial=done, disable=hidden, unit="step", leave=False, dynamic_ncols=True)

    def say(self, line: str) -> None:
        """Print a line, on worker 0."""
        if self.worker.is_main:
            if self._bar is not None:
                self._bar.clear()
            print(f"{line}{self._note}", flush=True)
            self._said = time.monotonic()

    # ---- rows

    def step(self, epoch: int, loss: Tensor, period: int | None) -> None:
        """A row of training metrics; ``period``: the one that ``auto`` has chosen."""
        worker = self.worker
        if not worker.is_main:
            return
        last = loss.item()  # first: a device is then as far as the clock
        stats, seconds = worker.sync.stats(), worker.clock.seconds
        row = {
            "epoch": epoch + 1,
            "loss": last,
            "learning_rate": worker.optimizer.param_groups[0]["lr"],
            "train_seconds": seconds,
            "samples_per_second": worker.at.all_samples / seconds,
            "rounds": stats.rounds,
            "comm_bytes": stats.bytes,
            "comm_exposed_seconds": stats.exposed_seconds,
            "comm_hidden_seconds": stats.hidden_seconds,
            "drift": stats.drift,
            **self._served(stats.staleness, stats.largest_staleness, stats.server_bytes),
            **({} if period is None else {"period": period}),
        }
        self._write("train", row)
        share = row["comm_exposed_seconds"] / row["train_seconds"]
        speed = f"{row['samples_per_second']:.0f} samples/s"
        self._bar.set_description(f"epoch {row['epoch']} loss {row['loss']:.3f} {speed} {share:.0%} waiting", False)
        if self._bar.disable and time.monotonic() - self._said > _QUIET_SECONDS:
            steps = f"step {worker.step} of {sum(worker.work.steps)}"
            self.say(f"epoch {row['epoch']:3d}/{worker.work.num_epochs}  {steps}  loss {row['loss']:.4f}  {speed}")

    def _served(self, staleness: float, largest: float, server_bytes: float) -> dict[str, float]:
        """What is known only where there is a server."""
        if not self.worker.work.algorithm.is_served:
            return {}
        return {"staleness": staleness, "largest_staleness": int(largest), "server_bytes": int(server_bytes)}

    def evaluation(self, row: dict[str, Any]) -> None:
        if not self.worker.is_main:
            return
        self._write("eval", row)
        name = self.worker.metric.name
        if self._bar.disable:
            self.say(
                f"{self._where(row['epoch'])}  {name} {row[name]:.4f}  "
                f"train loss {row['train_loss']:.4f}  {row['train_seconds']:.1f} s training"
            )
        self._bar.set_postfix({name: f"{row[name]:.4f}"}, refresh=False)

    def _where(self, epoch: float) -> str:
        """Where an evaluation is, in words."""
        if isinstance(epoch, int):
            return f"epoch {epoch:3d}/{self.worker.work.num_epochs}"
        return f"step {self.worker.step} of {sum(self.worker.work.steps)}"

    def plan(self, epoch: int, speeds: Sequence[float]) -> None:
        """Who takes which batch from ``epoch`` on, counted from 0."""
        plan = self.worker.work.plan
        row = {"epoch": epoch, "speeds": list(speeds), "batches": list(plan.batches), "weights": list(plan.weights)}
        self._row("plan", row)

    def period(self, decision: Decision) -> None:
        """The period from here on."""
        self._row("period", {"epoch": self.worker.at.epoch, **vars(decision)})
        self.say(f"epoch {self.worker.at.epoch + 1}: {decision}")

    def _write(self, kind: str, row: dict[str, Any]) -> None:
        """To the run folder and to the trackers."""
        self._row(kind, row)
        values = {f"{'comm/' if k.startswith(_COMMUNICATION) else kind + '/'}{k}": v for k, v in row.items()}
        self.trackers.log({**values, "train_seconds": row["train_seconds"], **self._label}, step=self.worker.step)

    def _row(self, kind: str, row: dict[str, Any]) -> None:
        if self.worker.is_main:
            self.folder.row({"kind": kind, "step": self.worker.step, **row, **self._label})

    # ---- spans

    def now(self) -> Moment | None:
        """When this worker's device comes by here, if spans are kept."""
        return Moment(self.worker.accelerator.device) if self.config.logging.spans else None

    def computed(self, start: Moment | None) -> None:
        """A step is done that began at ``start``, which is what :meth:`now` said."""
        end = self.now()
        if start is not None and end is not None:
            self._spans.append((self.worker.step, "compute", start, end))
        self._bar.update()

    def span(self, name: str, start: float, end: float) -> None:
        """What this worker did from when to when, in ``time.perf_counter`` seconds."""
        if self.config.logging.spans:
            self._spans.append((self.worker.step, name, Moment(seconds=start), Moment(seconds=end)))

    def write_spans(self) -> None:
        worker = self.worker
        for name, start, end in worker.sync.control.take_spans():
            self.span(name, start, end)
        spans, self._spans = self._spans, []
        origin, rows = worker.clock.origin, []
        for step, name, first, last in spans:
            row = {"rank": worker.rank, "step": step, "name": name}
            rows.append({**row, "start": first.seconds - origin, "end": last.seconds - origin, **self._label})
        self.folder.spans(worker.rank, rows)

    # ---- the end

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Close everything; None: the run was stopped before its end."""
        self.trackers.finish(summary or {})
        self.write_spans()
        self.folder.close()

    def close_bar(self) -> None:
        self._bar.close()

    def summary(self) -> dict[str, Any]:
        """What users compare. Collective: the slowest worker's seconds, and proof that all models are equal."""
        worker, config = self.worker, self.config
        stats, subject = worker.sync.stats(), worker.sync.subject
        digest = model_digest(subject.module.state_dict() if subject.shards is None else subject.shards.held())
        figures = [worker.clock.seconds, stats.bytes, stats.exposed_seconds, stats.hidden_seconds, worker.at.samples]
        late = [stats.staleness, stats.largest_staleness, stats.server_bytes]
        rows = worker.gather([*figures, float(digest), *map(float, late)])
        # Of a model that a node shares out, shards are equal place by place.
        node = worker.sync.nodes[0] if subject.shards is not None else [0]
        if any(row[5] != rows[node[rank % len(node)]][5] for rank, row in enumerate(rows)):
            raise RuntimeError("the workers' models differ after the last average; please report this with the run folder")
        seconds, num_bytes, exposed, hidden = (max(row[i] for row in rows) for i in range(4))
        samples = math.fsum(row[4] for row in rows)
        return {
            "name": self.folder.path.name,
            "algorithm": config.algorithm.name,
            "task": config.task.name,
            "model": config.model.name,
            **({} if worker.task.digest is None else {"data_digest": worker.task.digest}),
            "seed": config.seed,
            "num_workers": len(rows),
            "workers_per_replica": config.cluster.workers_per_replica,
            "proportional": config.cluster.proportional,
            "batches": list(worker.work.plan.batches),
            "clock": config.clock,
            "emulated": config.emulated,
            "steps": worker.step,
            "epochs": worker.work.num_epochs,
            "rounds": stats.rounds,
            **worker.metric.summary(worker.at.accuracy, worker.metric.score(worker.at.best_accuracy), worker.times.seconds),
            "train_seconds": seconds,
            "comm_bytes": int(num_bytes),
            "comm_exposed_seconds": exposed,
            "comm_hidden_seconds": hidden,
            "samples_per_second": samples / seconds,
            # Of all workers, each of which sends as many gradients.
            **self._served(math.fsum(row[6] for row in rows) / len(rows), *(max(row[i] for row in rows) for i in (7, 8))),
            "model_digest": digest if len(node) == 1 else sum(int(rows[rank][5]) for rank in node) % 2**48,
        }
