"""What several commands share: their options, the checks of these, and the start of workers."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from cocod_accel.config.strict import ConfigError, found, printable
from cocod_accel.extras import missing

if TYPE_CHECKING:
    from cocod_accel.config.settings import Config
    from cocod_accel.theory import Failures

#: What ``add_subparsers`` returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

CONFIGS_HELP = "configuration files, merged in order, then overrides"


def add_configs(parser: argparse.ArgumentParser, help_text: str = CONFIGS_HELP, metavar: str = "A.yaml|key=value") -> None:
    """Files and overrides; overrides may also follow options."""
    parser.add_argument("configs", nargs="*", metavar=metavar, help=help_text)


def add_workers(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help=help_text)


def add_accelerate_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accelerate-config",
        type=Path,
        metavar="FILE",
        help="accelerate configuration to use instead of this machine's default, e.g. one with DeepSpeed",
    )


def say_without_figures() -> bool:
    """Whether figures cannot be drawn here, which is then said."""
    absent = missing("matplotlib", "report")
    if absent is not None:
        print(f"no figures: {absent}", file=sys.stderr)
    return absent is not None


def check_at_least(option: str, value: int | None, least: int) -> None:
    """Refuse an option's value that is too small; None: not given."""
    if value is not None and value < least:
        raise ConfigError(f"{option}={value}: must be at least {least}")


def add_failures(parser: argparse.ArgumentParser) -> None:
    """What fails; :func:`failures_of` reads it."""
    parser.add_argument("--failures", type=float, metavar="N", help="workers that fail in an hour, of all: expected goodput")
    parser.add_argument(
        "--restart-seconds", type=float, metavar="S", help="from a failure until its worker trains again; default: 60"
    )


def failures_of(options: argparse.Namespace) -> Failures | None:
    from cocod_accel.theory import Failures

    given, seconds = options.failures, options.restart_seconds
    if given is None:
        if seconds is not None:
            raise ConfigError(f"--restart-seconds={seconds:g}: is about failures; add --failures=N, a number in an hour")
        return None
    for flag, value in (("--failures", given), ("--restart-seconds", seconds)):
        if value is not None and not 0 <= value <= 1e6:
            raise ConfigError(f"{flag}={value:g}: must be from 0 to 1000000")
    return Failures(given, 60.0 if seconds is None else seconds)


def start_workers(
    options: argparse.Namespace,
    *,
    module: str | None = None,
    arguments: Sequence[str] = (),
    max_restarts: int = 0,
    dry_run: bool = False,
) -> int:
    """Check the configuration, print the ``accelerate launch`` command for this machine and run it; the exit code.

    Args:
        options: with ``configs``, ``workers`` and ``accelerate_config``.
        module: what workers run; None: the trainer.
        arguments: passed to it before those of the configuration.
    """
    from cocod_accel.config.algorithms import num_processes
    from cocod_accel.config.loading import load_training_config
    from cocod_accel.trainer.launch import TRAINER, launch_command, threads_of_each

    check_at_least("--workers", options.workers, 1)
    check_at_least("--max-restarts", max_restarts, 0)
    given = None if options.accelerate_config is None else found(options.accelerate_config)
    if given is not None and not given.is_file():
        raise ConfigError(f"--accelerate-config={given}: no such file; see configs/accelerate")
    configs = list(options.configs)
    if options.workers is not None:
        configs.append(f"cluster.num_workers={options.workers}")
    config = load_training_config(configs)
    check_start(config, given, reads_data=not dry_run)
    use_gpu = False if config.cluster.device == "cpu" else None
    num_workers = num_processes(config)
    command = launch_command(num_workers, [*arguments, *configs], use_gpu, max_restarts, given, module or TRAINER)
    print(printable(shlex.join(command)), flush=True)
    if dry_run:
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_each(num_workers)))
    return _launch(command)


def check_start(config: Config, accelerate_config: Path | None = None, *, reads_data: bool) -> None:
    """What can be checked before any process starts: a mistake is reported here, once, and not by every worker."""
    from cocod_accel.tasks import build_task, check_model, check_task
    from cocod_accel.trainer.launch import most_workers
    from cocod_accel.trainer.work import Work

    num_workers, most = config.cluster.num_workers, most_workers()
    if accelerate_config is None and num_workers > most:
        raise ConfigError(
            f"cluster.num_workers={num_workers}: is more than the {most} workers that one machine can run; use "
            "accelerate launch on several machines, or cocod simulate"
        )
    facts = check_task(config)
    task = build_task(config) if reads_data else facts
    check_model(config, task)
    if task is not None:
        for rank in {speed: rank for rank, speed in enumerate(config.speeds)}.values():  # one of each kind
            Work.of(config, task.num_train, rank)


def _launch(command: list[str]) -> int:
    """Run an ``accelerate launch`` command in this process, without its traceback when a worker fails."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from cocod_accel.comm.watchdog import identity
    from cocod_accel.trainer.process import LAUNCHER

    os.environ[LAUNCHER] = identity(os.getpid())
    logging.disable(logging.CRITICAL)  # the launcher's own account of a failure: the worker has said what happened
    try:
        launch_command(launch_command_parser().parse_args(command[2:]))
    except ChildFailedError as error:
        # The first to fail is the cause; the launcher ended the others.
        code = int(error.get_first_failure()[1].exitcode)
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    except SystemExit as error:
        return int(error.code or 0)
    return 0
