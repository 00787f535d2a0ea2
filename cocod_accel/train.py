"""The trainer's entry point: ``accelerate launch ... -m cocod_accel.train A.yaml [B.yaml ...] [key.sub=value ...]``."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

from cocod_accel import runtime
from cocod_accel.calibration import calibrate
from cocod_accel.config import MEASURE, ConfigError, load_config
from cocod_accel.metrics import RunFolder
from cocod_accel.tasks import build_model, build_task
from cocod_accel.trainer import NonFiniteLossError, Trainer, Work

EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED = 2, 1, 130, 143


def run(arguments: list[str]) -> int:
    """Check everything that can be checked alone, then connect and train."""
    config = load_config(arguments)
    runtime.seed_everything(config.seed)  # the same model on every worker
    task = build_task(config)
    for rank in range(config.cluster.num_workers):
        Work.of(config, task.num_train, rank)
    model = build_model(config, task)
    if config.link is not None and not runtime.is_one_machine():
        raise ConfigError(f"emulate.link={config.link}: workers on several machines share no clock; use one machine")
    with runtime.start(config, arguments) as accelerator:
        calibration = calibrate(config, task, accelerator) if config.cluster.speeds == MEASURE else None
        if calibration is not None:
            config.cluster.speeds = calibration.speeds
            plan = Work.of(config, task.num_train, rank=0).plan
            if accelerator.is_main_process:
                print(calibration.table(plan), flush=True)
        path = RunFolder.create(config) if accelerator.is_main_process else None
        if path is not None and calibration is not None:
            calibration.save(path)
        path = Path(runtime.from_main(str(path)))
        trainer = Trainer(config, task, model, accelerator, path)
        # A polite end (pre-emption, kill): all workers agree on it, evaluate, and write their summary.
        signal.signal(signal.SIGTERM, lambda *_: trainer.sync.request_stop())
        summary = trainer.run()
        if accelerator.is_main_process:
            print(
                f"{summary['name']}: accuracy {summary['final_accuracy']:.4f} (best {summary['best_accuracy']:.4f}) after "
                f"{summary['train_seconds']:.1f} s of training{' (stopped early)' if trainer.is_stopped else ''}"
                f"{f' (emulated: {config.emulated})' if config.emulated else ''}; {path}"
            )
    return EXIT_STOPPED if trainer.is_stopped else 0


def main(arguments: list[str] | None = None) -> int:
    """Run and turn every expected failure into one line and an exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        return _say(f"error: {error}", EXIT_BAD_INPUT)
    except NonFiniteLossError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # from whichever worker it is
        return EXIT_FAILED
    except KeyboardInterrupt:
        return _say("interrupted; the run folder holds what was written until now", EXIT_INTERRUPTED)
    except RuntimeError as error:
        if "gloo" not in str(error) and "NCCL" not in str(error):
            raise
        return _say(f"error: another worker is gone ({str(error).splitlines()[0][-120:]})", EXIT_FAILED)


def _say(line: str, code: int) -> int:
    if runtime.is_speaker():
        print(line, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
