"""One worker of a measurement: what the cluster it runs on takes for steps and for transfers, alone and together.

    accelerate launch ... -m cocod_accel.plan.measure OUT.yaml SECONDS A.yaml [key=value ...]

Worker 0 writes what all of them found as a cluster file. What is timed is the configured model with its batch; nothing is
trained. Every worker decides from the same gathered figures, so that all enter the same collectives.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.accelerator import Accelerator

from cocod_accel.averaging.coder import time_coding
from cocod_accel.averaging.flat import payload_dtype
from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.device import wait_for_device, wait_for_stream
from cocod_accel.comm.emulated import EmulatedLink
from cocod_accel.comm.groups import TorchComm, default_group, private_group
from cocod_accel.comm.handles import Communicator, Handle
from cocod_accel.comm.in_process import InProcessGroup
from cocod_accel.config.loading import load_training_config
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError
from cocod_accel.plan.findings import Findings, as_cluster
from cocod_accel.sharding.speeds import measure_speeds
from cocod_accel.simulator.cluster import save_cluster
from cocod_accel.tasks import Task, build_model, build_task
from cocod_accel.theory.hiding import CODES
from cocod_accel.trainer import process as runtime
from cocod_accel.trainer.calibration import common_batch, device_name, sample_steps

MODULE = "cocod_accel.plan.measure"

#: Shares of the time for steps; the rest is halved between transfers alone and both together.
_FOR_STEPS = 0.5
_FEWEST_STEPS, _MOST_STEPS = 5, 50
#: Sizes that are timed, of the model's.
_SIZES = (1 / 16, 1 / 4, 1 / 2, 1, 2)
_MOST_REPEATS = 20
_TOGETHER_REPEATS = 3
#: Transfers that are this much shorter than a step cannot disturb it.
_NEGLIGIBLE = 0.02


@dataclass(frozen=True)
class Steps:
    """Every worker's."""

    seconds: list[float]
    fixed_seconds: list[float]
    jitters: list[float]


def measure(config: Config, task: Task, accelerator: Accelerator, seconds: float) -> Findings:
    """All that a cluster file holds; takes about ``seconds``. Collective."""
    say = _say if accelerator.is_main_process else lambda line: None
    batch, numel = common_batch(config), _payload_numel(config, task)
    transfers: list[tuple[float, float]] = []
    interference = 0.0
    coding_ns: dict[str, float] = {}
    with sample_steps(config, task, accelerator, batch) as run_step:
        say(f"measuring {config.cluster.num_workers} workers: steps of {config.model.name} with batches of {batch}")
        steps = _steps(config, task, accelerator, run_step, batch, seconds * _FOR_STEPS)
        if config.cluster.num_workers > 1:
            left = seconds * (1 - _FOR_STEPS) / 2
            comm: Communicator = TorchComm(private_group(default_group()))
            if config.link is not None:
                comm = EmulatedLink(comm, config.link)
            link = _Link(comm, accelerator.device)
            say(f"measuring all-reduces around {4 * numel / 1e6:.2f} MB")
            transfers = link.table(numel, left)
            say("measuring both together")
            alone = next(s for size, s in transfers if size == 4 * numel)
            interference = link.interference(run_step, numel, max(steps.seconds), alone, left)
            coding_ns = _coding_ns(numel, config.cluster.num_workers, accelerator.device)
    return Findings(
        devices=exchange_reports(device_name(accelerator.device), default_group()),
        batch=batch,
        step_seconds=steps.seconds,
        fixed_seconds=steps.fixed_seconds,
        jitters=steps.jitters,
        transfers=transfers,
        interference=interference,
        what=f"{config.model.name}, batch {batch}" + ("" if config.emulated is None else f"; emulated: {config.emulated}"),
        coding_ns=coding_ns,
    )


def _coding_ns(numel: int, num_workers: int, device: torch.device) -> dict[str, float]:
    """Per element and payload; every worker measures alone, the slowest one counts."""
    seat, values = InProcessGroup(num_workers).member(0), torch.randn(numel, device=device)
    codes = [code for code in CODES if code != "fp32"]
    rows = exchange_reports([time_coding(code, values, seat) for code in codes], default_group())
    return {code: 1e9 / numel * max(row[index] for row in rows) for index, code in enumerate(codes)}


def _payload_numel(config: Config, task: Task) -> int:
    """Elements of float32 that a round sends."""
    parameters = [p for p in build_model(config, task).parameters() if p.requires_grad]
    return max(1, sum(p.numel() * payload_dtype(p.dtype).itemsize // 4 for p in parameters))


def _steps(
    config: Config, task: Task, accelerator: Accelerator, run_step: Callable[[], None], batch: int, seconds: float
) -> Steps:
    """Steps of two batch sizes: what both have in common does not depend on the batch. The larger twice."""
    smaller = batch // 2

    def timed(step: Callable[[], None]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        found = measure_speeds(step, warmup_steps=2, min_steps=_FEWEST_STEPS, min_seconds=seconds / 3)
        return found.step_seconds, found.jitters

    before, jitters = timed(run_step)
    less: tuple[float, ...] | None = None
    if smaller:
        with sample_steps(config, task, accelerator, smaller) as smaller_step:
            less, _ = timed(smaller_step)
    after, more_jitters = timed(run_step)
    both = [statistics.fmean(pair) for pair in zip(before, after, strict=True)]
    fixed = [0.0] * len(both)
    if less is not None:
        fixed = [fixed_seconds((smaller, a), (batch, b)) for a, b in zip(less, both, strict=True)]
    return Steps(both, fixed, [statistics.fmean(pair) for pair in zip(jitters, more_jitters, strict=True)])


def fixed_seconds(smaller: tuple[int, float], larger: tuple[int, float]) -> float:
    """What a step takes whatever its batch, from two (batch, seconds): where their line meets a batch of 0."""
    (m, s), (n, t) = smaller, larger
    return min(max((s * n - t * m) / (n - m), 0.0), 0.9 * t)  # never all of it: then batches would be free


class _Link:
    """Transfers between all workers, on a group that nobody else uses."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm, self._device = comm, device

    def table(self, numel: int, seconds: float) -> list[tuple[float, float]]:
        """(bytes, seconds) of sums alone, smallest first; the median of as many as there is time for."""
        sizes = sorted({max(1, round(numel * share)) for share in _SIZES})
        self._timed(numel)  # connections are made once
        [first] = self._agreed([self._timed(numel)])
        repeats = min(_MOST_REPEATS, max(1, int(seconds / (sum(_SIZES) * first))))
        rows = [self._agreed([self._timed(size) for _ in range(repeats)]) for size in sizes]
        return [(4.0 * size, statistics.median(row)) for size, row in zip(sizes, rows, strict=True)]

    def interference(
        self, run_step: Callable[[], None], numel: int, compute: float, transfer: float, seconds: float
    ) -> float:
        """The share of a worker's computing that a transfer takes while it is under way, of the average worker."""
        if transfer < _NEGLIGIBLE * compute:
            return 0.0
        steps = int(min(max(seconds / _TOGETHER_REPEATS / 5 / compute, _FEWEST_STEPS), _MOST_STEPS))
        # Enough for twice as long, so that there is always one under way; the same number on every worker.
        count = math.ceil(2 * steps * compute / transfer) + 1
        repeats = int(min(max(seconds / (3 * steps * compute + count * transfer), 1), _TOGETHER_REPEATS))
        # Sums of zeros may share their memory.
        zeros = [torch.zeros(numel, device=self._device) for _ in range(2)]

        def block() -> float:
            exchange_reports(None, default_group())
            wait_for_stream(self._device)  # not for the transfers that run beside it
            begin = time.perf_counter()
            for _ in range(steps):
                run_step()
            wait_for_stream(self._device)
            return (time.perf_counter() - begin) / steps

        found = []
        for _ in range(repeats):
            before = block()
            handles: list[Handle] = [self._comm.launch([zeros[index % 2]]) for index in range(count)]
            under = block()
            for handle in handles:
                handle.wait()
            found.append(1 - (before + block()) / 2 / under)
        everybodys = exchange_reports(statistics.median(found), default_group())
        return min(max(statistics.fmean(everybodys), 0.0), 0.95)

    def _timed(self, numel: int) -> float:
        payload = torch.zeros(numel, device=self._device)
        wait_for_device(self._device)
        begin = time.perf_counter()
        self._comm.launch([payload]).wait()
        wait_for_device(self._device)
        return time.perf_counter() - begin

    def _agreed(self, transfers: list[float]) -> list[float]:
        """Each transfer as whoever joined it last has seen it: the others have waited for that worker, too."""
        everybodys = exchange_reports(transfers, default_group())
        return [min(seen) for seen in zip(*everybodys, strict=True)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(arguments: list[str]) -> int:
    out, seconds, *given = runtime.without_launcher_arguments(arguments)
    config = load_training_config(given)
    runtime.seed_everything(config.seed)
    task = build_task(config)
    if config.link is not None and not runtime.is_one_machine():
        raise ConfigError(f"emulate.link={config.link}: workers on several machines share no clock; use one machine")
    with runtime.start(config, arguments, MODULE) as accelerator:
        findings = measure(config, task, accelerator, float(seconds))
        if accelerator.is_main_process:
            save_cluster(as_cluster(findings, Path(out).stem), Path(out))
    return 0


def main() -> int:
    runtime.end_without_launcher(1)
    try:
        return run(sys.argv[1:])
    except ConfigError as error:
        if runtime.is_speaker():
            _say(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
