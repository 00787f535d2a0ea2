"""The trainer's entry point: ``accelerate launch ... -m cocod_accel.train A.yaml [B.yaml ...] [key.sub=value ...]``."""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.accelerator import Accelerator
from torch import nn

from cocod_accel.algorithms import ASGD
from cocod_accel.checkpoint.files import CheckpointError
from cocod_accel.comm.agreement import try_together
from cocod_accel.comm.groups import default_group
from cocod_accel.comm.watchdog import Watch, default_store, end_process
from cocod_accel.config.loading import load_config, load_training_config, save_config
from cocod_accel.config.settings import MEASURE, Config
from cocod_accel.config.strict import ConfigError, printable, printable_lines
from cocod_accel.sync.peers import is_lost_peer
from cocod_accel.sync.serve import serve
from cocod_accel.tasks import Task, build_model, build_optimizer, build_task
from cocod_accel.trainer import process as runtime
from cocod_accel.trainer.auto_code import keep_choice
from cocod_accel.trainer.calibration import calibrate
from cocod_accel.trainer.export import OutputError
from cocod_accel.trainer.resume_policy import Place, find_place
from cocod_accel.trainer.steps import NonFiniteLossError
from cocod_accel.trainer.trainer import Trainer
from cocod_accel.trainer.work import Work

EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED = 2, 1, 130, 143


def run(arguments: list[str]) -> int:
    """Check everything that can be checked alone, then connect and train."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to save
    _import_what_optimizers_need()
    arguments = runtime.without_launcher_arguments(arguments)
    config = load_training_config(arguments)
    runtime.seed_everything(config.seed)  # the same model on every worker
    task = build_task(config)
    for rank in range(config.cluster.num_workers):
        Work.of(config, task.num_train, rank)
    model = build_model(config, task)
    if config.link is not None and not runtime.is_one_machine():
        raise ConfigError(f"emulate.link={config.link}: requires workers on one machine, because machines share no clock")
    with runtime.start(config, arguments) as accelerator, _watching(config, accelerator) as watch:
        place = _find_place(config, accelerator.is_main_process)
        if place.is_finished:
            return 0
        if runtime.is_server(config, accelerator):
            return _serve(config, task, model, watch)
        if config.cluster.speeds == MEASURE:
            _find_speeds(config, task, accelerator, place)
        if config.has_auto_code and place.is_continued:
            keep_choice(config, place.path / "config.yaml")
        is_chosen = config.has_auto_code
        trainer = Trainer(config, task, model, accelerator, place, watch)
        if is_chosen and accelerator.is_main_process:
            save_config(config, place.path / "config.yaml")
        # SIGTERM (pre-emption, kill): all workers agree to stop, and save. SIGUSR1: they save and continue.
        signal.signal(signal.SIGTERM, lambda *_: trainer.sync.control.request(stop=True))
        signal.signal(signal.SIGUSR1, lambda *_: trainer.sync.control.request(save=True))
        summary = trainer.run()
        if accelerator.is_main_process:
            print(printable(_last_words(summary, config, place.path, trainer)), flush=True)
    return EXIT_STOPPED if summary is None else 0


def _serve(config: Config, task: Task, model: nn.Module, watch: Watch | None) -> int:
    """The last process, if the algorithm has a server."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the workers stop when they have agreed to, and this one after them
    algorithm = Work.of(config, task.num_train, rank=0).algorithm
    assert isinstance(algorithm, ASGD)
    if watch is not None:
        watch.doing = "serving"
    try:
        serve(model, build_optimizer(config, model), algorithm)
    except (TypeError, ValueError) as error:  # on all processes
        raise ConfigError(f"algorithm.name={config.algorithm.name}: {error}") from error
    return 0


def _import_what_optimizers_need() -> None:
    """The first optimizer imports torch's compiler; looking for garbage meanwhile would take a third of that time."""
    gc.disable()
    try:
        importlib.import_module("torch._dynamo")
    finally:
        gc.enable()
    gc.freeze()  # what was imported is never garbage
    atexit.register(gc.unfreeze)  # until the interpreter ends: what is not freed then, some libraries complain about


class WorkerLostError(RuntimeError):
    """Lost contact with another worker; the message names it."""


@contextmanager
def _watching(config: Config, accelerator: Accelerator) -> Iterator[Watch | None]:
    """End this process if another worker dies or freezes; say which worker made a collective fail."""
    if accelerator.num_processes == 1:
        yield None
        return

    def end(rank: int, what: str) -> None:
        line = printable(_of_the_lost(rank, what, config)) if runtime.speaks_of(rank) else None
        end_process(line, EXIT_FAILED)

    agreed = (ConfigError, CheckpointError, OutputError, KeyboardInterrupt, WorkerLostError)
    with Watch(
        default_store(),
        accelerator.process_index,
        accelerator.num_processes,
        frozen_seconds=config.cluster.frozen_seconds,
        on_fault=end,
        is_agreed=lambda error: isinstance(error, agreed),
    ) as watch:
        try:
            yield watch
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            found = watch.explain(config.cluster.dead_seconds)
            if found is None:
                raise WorkerLostError("error: lost contact with a worker; could not tell which") from error
            if not runtime.speaks_of(found[0]):
                raise WorkerLostError("") from error
            raise WorkerLostError(_of_the_lost(*found, config)) from error


def _of_the_lost(rank: int, what: str, config: Config) -> str:
    who = "" if rank < 0 else f"worker {rank} " if rank < config.cluster.num_workers else "the server "
    return f"error: {who}{what}"


def _find_place(config: Config, is_main: bool) -> Place:
    """The main process chooses; an error is raised on all workers."""

    def find() -> Place | None:
        return find_place(config, runtime.started_by(), runtime.is_restart())

    places, error = try_together(find if is_main else lambda: None, default_group())
    if error is not None or places[0] is None:
        raise ConfigError((error or "").removeprefix("rank 0: "))
    return places[0]


def _find_speeds(config: Config, task: Task, accelerator: Accelerator, place: Place) -> None:
    """The speeds of the run that is resumed, or measured ones."""
    if place.is_continued:
        saved = load_config([str(place.path / "config.yaml")]).cluster.speeds
        if isinstance(saved, list) and len(saved) == config.cluster.num_workers:
            config.cluster.speeds = saved
            return
    calibration = calibrate(config, task, accelerator)
    config.cluster.speeds = calibration.speeds
    plan = Work.of(config, task.num_train, rank=0).plan
    if accelerator.is_main_process:
        print(calibration.table(plan), flush=True)
        calibration.save(place.path)
        save_config(config, place.path / "config.yaml")


def _last_words(summary: dict[str, Any] | None, config: Config, path: Path, trainer: Trainer) -> str:
    if summary is None:
        where = f"stopped at step {trainer.step}"
        if trainer.checkpoints.saved is None:
            return f"{where}; could not write a checkpoint there, the last one is older: {path}"
        how = "the same command resumes" if config.checkpoint.resume == "auto" else "resume with checkpoint.resume=auto"
        return f"{where}; {how} from {trainer.checkpoints.saved}"
    emulated = f" (emulated: {config.emulated})" if config.emulated else ""
    name = trainer.worker.metric.name
    return (
        f"{summary['name']}: {name} {summary[f'final_{name}']:.4f} (best {summary[f'best_{name}']:.4f}) after "
        f"{summary['train_seconds']:.1f} s of training{emulated}; {path}"
    )


class _Printable(logging.Formatter):
    """One line, whatever a folder or a file is called."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def main(arguments: list[str] | None = None) -> int:
    """Run; every expected failure becomes one line and an exit code."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    runtime.end_without_launcher(EXIT_FAILED)
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except (ConfigError, CheckpointError) as error:
        return _say(f"error: {error}", EXIT_BAD_INPUT)
    except NonFiniteLossError as error:
        print(f"error: {printable(error)}", file=sys.stderr, flush=True)  # from whichever worker it is
        return EXIT_FAILED
    except WorkerLostError as error:
        if str(error):
            print(printable(error), file=sys.stderr, flush=True)
        return EXIT_FAILED
    except OutputError as error:
        return _say(f"error: {error}", EXIT_FAILED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        line = f"error: {error.filename or 'a file'}: {error.strerror}; make room, and run the same command again"
        return _say(line, EXIT_FAILED)
    except KeyboardInterrupt:
        return _say("interrupted; the run folder holds everything written so far", EXIT_INTERRUPTED)


def _say(line: str, code: int) -> int:
    if runtime.is_speaker():
        print(printable(line), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
