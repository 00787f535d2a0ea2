"""wandb and TensorBoard behind accelerate's trackers. A tracker that fails warns once and never stops training."""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
from pathlib import Path
from typing import Any

from accelerate.accelerator import Accelerator
from accelerate.tracking import TensorBoardTracker, WandBTracker

from cocod_accel.config.loading import flattened
from cocod_accel.config.settings import Config
from cocod_accel.extras import missing
from cocod_accel.tasks.metrics import HIGHER, task_metrics

logger = logging.getLogger(__name__)


class Trackers:
    """The trackers of a run, on the main process; elsewhere there are none."""

    def __init__(self, accelerator: Accelerator, config: Config, folder: Path) -> None:
        self._trackers: list[Any] = []
        if not accelerator.is_main_process:
            return
        for name in config.logging.trackers:
            if name == "wandb" and "disabled" in (config.logging.wandb_mode, os.environ.get("WANDB_MODE")):
                continue  # importing it takes two seconds
            try:
                absent = missing(name, name)
                if absent is not None:
                    raise ModuleNotFoundError(absent)
                self._trackers.append(_make(name, config, folder))
            except Exception as error:
                _warn(name, error)

    def log(self, values: dict[str, Any], step: int) -> None:
        self._each(lambda tracker: tracker.log(values, step=step))

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary and close."""

        def end(tracker: Any) -> None:
            if tracker.name == "wandb":
                # What is still open of the last step would overwrite the summary's training time when it is written.
                tracker.tracker.log({}, commit=True)
                tracker.tracker.summary.update(_plain(reached(summary)))
            tracker.finish()

        self._each(end)
        self._trackers = []

    def _each(self, call: Any) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                _warn(tracker.name, error)


def _make(name: str, config: Config, folder: Path) -> Any:
    tracker: Any
    if name == "wandb":
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        # No host, user, git or command line: a run folder may be given away.
        settings = wandb.Settings(x_disable_meta=True, x_disable_stats=True, disable_git=True, console="off", silent=True)
        # One run of wandb's for one run folder, however often it is resumed.
        known = folder / "wandb_id"
        is_resumed = known.is_file()
        if not is_resumed:
            known.write_text(uuid.uuid4().hex[:12])
        tracker = WandBTracker(
            config.logging.project,
            id=known.read_text().strip(),
            resume="allow" if is_resumed and config.logging.wandb_mode == "online" else None,
            name=folder.name,
            group=config.logging.group or config.task.name.replace(":", "."),
            # Within a group, seeds of one algorithm belong together.
            job_type=f"{config.algorithm.name}{'-ps' if config.cluster.proportional else ''}",
            tags=[
                config.algorithm.name,
                *(["proportional"] if config.cluster.proportional else []),
                config.model.name,
                f"{config.cluster.num_workers} workers",
                *(["emulated"] if config.emulated else []),
            ],
            mode=config.logging.wandb_mode,
            dir=str(folder),
            settings=settings,
        )
        tracker.start()
        # Accuracy is plotted against training time, not against wandb's own step.
        tracker.tracker.define_metric("train_seconds")
        for pattern in ("eval/*", "train/*", "comm/*"):
            tracker.tracker.define_metric(pattern, step_metric="train_seconds")
        # The columns of the runs table: the best of a run, not its last.
        for metric in task_metrics(config):
            best = "max" if metric.better == HIGHER else "min"
            tracker.tracker.define_metric(f"eval/{metric.name}", step_metric="train_seconds", summary=best)
        for name in ("test_loss", "train_loss", "mean_train_loss"):
            tracker.tracker.define_metric(f"eval/{name}", step_metric="train_seconds", summary="min")
    else:
        tracker = TensorBoardTracker("tensorboard", logging_dir=str(folder))
        tracker.start()
    tracker.store_init_configuration(_plain(dataclasses.asdict(config)))
    return tracker


def reached(summary: dict[str, Any]) -> dict[str, Any]:
    """Without the targets that were never reached: a column of numbers sorts, one of numbers and words does not."""
    key = next((key for key in summary if key.startswith("time_to_")), None)
    if key is None:
        return summary
    return {**summary, key: {target: seconds for target, seconds in summary[key].items() if seconds is not None}}


def _plain(tree: dict[str, Any]) -> dict[str, Any]:
    """Keys joined by dots, values that every tracker takes."""
    rows = flattened(tree)
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in rows.items()}


def _warn(name: str, error: Exception) -> None:
    logger.warning(
        "%s is off for this run (%s); the run folder holds everything", name, str(error).split("\n")[0] or type(error)
    )
