"""Which folder a run writes in, and from which checkpoint it starts.

With ``checkpoint.resume: auto`` an unfinished run of the same name and configuration is resumed; a finished run is never
touched. The trainer then does what the :class:`Place` says (:mod:`cocod_accel.trainer.resume`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from cocod_accel.checkpoint.files import MANIFEST, checkpoints_in
from cocod_accel.config.fields import Affects
from cocod_accel.config.loading import flattened, load_config
from cocod_accel.config.settings import Config, may_differ
from cocod_accel.config.strict import ConfigError
from cocod_accel.runs.folder import RunFolder, lock, numbered_folders
from cocod_accel.theory.hiding import AUTO

logger = logging.getLogger(__name__)

#: In a run's own file, ``auto`` of these has become what was chosen.
_CHOSEN = ("algorithm.payload", "algorithm.delay")
#: Holds the name of whoever started the run.
_LAUNCHER = ".launcher"


@dataclass(frozen=True)
class Place:
    """Where a run writes, and where it starts from."""

    path: Path
    #: Resume in a folder that an earlier process has left.
    is_continued: bool = False
    #: A checkpoint of another run to start from.
    start: Path | None = None
    #: The run is finished; this process was only restarted.
    is_finished: bool = False


def find_place(config: Config, launcher: str, is_restart: bool) -> Place:
    """The folder of an unfinished run to resume, or a new one: ``output/name``, ``output/name-2`` and so on.

    ``launcher``: who started this process. If it restarts this process after its run has finished (a worker was lost at the
    very end), nothing is left to do.
    """
    resume = config.checkpoint.resume
    start = None if resume in ("auto", "never") else _start_of(resume)
    try:
        last = _last(config)
        if last is not None and (resume == "auto" or is_restart):
            refuse_links(last)
        if is_restart and last is not None and (last / "summary.json").exists() and _launcher_of(last) == launcher:
            return Place(last, is_finished=True)
        if resume == "auto" or (is_restart and last is not None and _launcher_of(last) == launcher):
            unfinished = _unfinished(config)
            if unfinished is not None:
                (unfinished / _LAUNCHER).write_text(launcher)
                has_checkpoints = bool(checkpoints_in(unfinished / "checkpoints"))
                return Place(unfinished, is_continued=True, start=None if has_checkpoints else start)
        path = RunFolder.create(config)
        (path / _LAUNCHER).write_text(launcher)
        return Place(path, start=start)
    except OSError as error:
        raise ConfigError(f"output={config.output}: cannot create a run folder there ({error.strerror})") from error


def differences(config: Config, path: Path) -> list[str]:
    """What makes the run of another configuration file a different run."""
    try:
        other = flattened(dataclasses.asdict(load_config([str(path)])))
    except ConfigError as error:
        return [str(error)]
    own = flattened(dataclasses.asdict(config))
    compared = [key for key in own if not may_differ(key, Affects.RUN)]
    # The choice of the earlier run is kept.
    compared = [key for key in compared if not (key in _CHOSEN and own[key] == AUTO)]
    return [f"{key} is {own[key]}, was {other.get(key)}" for key in compared if own[key] != other.get(key)]


def _last(config: Config) -> Path | None:
    """The last folder of this name."""
    last = None
    for path in numbered_folders(config):
        if not path.is_dir():
            break
        last = path
    return last


def refuse_links(folder: Path) -> None:
    """Raise if a run folder is or holds a link: going on would write through it, to wherever it points."""
    held = (Path(root) / name for root, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in (folder, *held):
        if path.is_symlink() and not _is_wandbs(path, folder):
            raise ConfigError(
                f"output={folder.parent}: {path} is a symbolic link, through which a resumed run would write; "
                "delete it, or choose another name"
            )


def _is_wandbs(path: Path, folder: Path) -> bool:
    """wandb makes links to its newest run, in a folder of its own."""
    own = folder.resolve() / "wandb"
    return path.parent.resolve() == own and path.resolve().is_relative_to(own)


def _launcher_of(path: Path) -> str | None:
    file = path / _LAUNCHER
    return file.read_text() if file.is_file() else None


def _unfinished(config: Config) -> Path | None:
    """The last folder of this name, if its run can be resumed."""
    last = _last(config)
    if last is None or (last / "summary.json").exists() or not (last / "config.yaml").is_file():
        return None
    different = differences(config, last / "config.yaml")
    if different:
        logger.warning("%s is unfinished, but is a different run (%s); starting a new one", last, different[0])
        return None
    if not checkpoints_in(last / "checkpoints") and (last / "metrics.jsonl").exists():
        return None
    if not lock(last):
        logger.warning("%s is unfinished, but another process is using it; starting a new run", last)
        return None
    return last


def _start_of(given: str) -> Path:
    """What ``checkpoint.resume`` names: a checkpoint, or a run folder that holds some."""
    path = Path(given)
    if (path / MANIFEST).is_file():
        return path
    if not (checkpoints_in(path / "checkpoints") or checkpoints_in(path)):
        raise ConfigError(f"checkpoint.resume={given}: holds no checkpoint; give auto, never, a run folder or a checkpoint")
    return path
