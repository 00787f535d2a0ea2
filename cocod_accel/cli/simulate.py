"""``cocod simulate``: every algorithm on one cluster, a table, and run folders that ``cocod compare`` reads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cocod_accel.algorithms import ALGORITHMS
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError, require_choice
from cocod_accel.runs.tables import aligned
from cocod_accel.simulator.cluster import Cluster
from cocod_accel.simulator.folders import write
from cocod_accel.simulator.learning import Learning
from cocod_accel.simulator.simulate import Simulated, configured, simulate

_OUT = Path("runs/simulated")
#: Steps whose spans are kept, if nobody says otherwise.
_SPAN_STEPS = 200


def run(
    cluster: Cluster,
    arguments: list[str],
    algorithms: str | None = None,
    *,
    steps: int | None = None,
    spans: int | None = None,
    out: Path | None = None,
    learns: bool = False,
) -> list[Path]:
    """Simulate, print the table, and leave a run folder for each algorithm.

    ``learns``: all workers train for real, one after the other in this process.
    """
    if learns and steps is not None:
        raise ConfigError(f"--steps={steps}: does not go with --learn, which trains whole epochs; set schedule.epochs=1")
    if spans is not None and spans < 0:
        raise ConfigError(f"--spans={spans}: must be at least 0")
    configs, left_out = _configs(cluster, arguments, algorithms, steps)
    runs: list[Simulated] = []
    folders: list[Path] = []
    for config in configs:
        if out is not None or config.output == Config().output:
            config.output = str(_OUT if out is None else out)
        kept = _SPAN_STEPS if spans is None else spans
        with _bar(config.algorithm.name) as bar:
            done = simulate(
                cluster, config, steps=steps, span_steps=kept if config.logging.spans else 0, progress=bar.update
            )
        runs.append(done)
        if not learns:
            folders.append(write(done))
            continue
        with _bar(f"{config.algorithm.name}, learning", total=done.timeline.num_steps) as bar:
            learning = Learning(config, on_step=bar.update)
            folders.append(write(done, learning.rows()))
    print(report(cluster, runs))
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    print(f"run folders: cocod compare {' '.join(map(str, folders))}")
    return folders


def _bar(what: str, total: int | None = None) -> Any:
    return tqdm(desc=what, total=total, disable=not sys.stderr.isatty(), unit="step", leave=False, dynamic_ncols=True)


def _configs(
    cluster: Cluster, arguments: list[str], algorithms: str | None, steps: int | None
) -> tuple[list[Config], list[str]]:
    """One for each algorithm; if the user chose none, those that go with the configuration, and why others do not."""
    asked = [argument for argument in arguments if argument.startswith("algorithm.name=")]
    if algorithms is None and asked:
        return [_named(configured(cluster, arguments, steps=steps), cluster, 1)], []
    names = list(ALGORITHMS) if algorithms is None else [name.strip() for name in algorithms.split(",")]
    for name in names:
        require_choice(name, "--algorithms", list(ALGORITHMS))
    configs, problems = [], []
    for name in dict.fromkeys(names):
        try:
            configs.append(configured(cluster, arguments, name, steps))
        except ConfigError as error:
            if algorithms is not None:
                raise
            problems.append(error)
    if not configs:
        raise problems[0]  # of them all: a file that is not there, a key that is not known
    return [_named(config, cluster, len(configs)) for config in configs], [str(problem) for problem in problems]


def _named(config: Config, cluster: Cluster, num_runs: int) -> Config:
    """A name that tells the runs of one command apart."""
    if config.name is None:
        config.name = f"{config.run_name}-{cluster.name}-{cluster.num_workers}"
    elif num_runs > 1:
        config.name = f"{config.name}-{config.algorithm.name}"
    return config


def report(cluster: Cluster, runs: Sequence[Simulated]) -> str:
    """The table, and what it is of."""
    speeds = cluster.speeds()
    header = ["algorithm", "period", "ms/step", "samples/s", "speedup", "exposed", "MB sent"]
    rows = [[*_names(run), *_figures(run)] for run in runs]
    ideal = f"{sum(speeds):g}"
    return "\n".join(
        [
            f"simulated: {cluster.name}, {len(speeds)} workers, {runs[0].timeline.num_steps} steps",
            aligned([header, *rows]),
            f"speedup: samples a second over those of one worker of speed 1 alone; {ideal} is linear",
            "exposed: share of the time that the worst worker was blocked; MB sent: by one worker in the whole run",
        ]
    )


def _names(run: Simulated) -> list[str]:
    config = run.config
    sampling = " + PS" if config.cluster.proportional else ""
    gradients = ALGORITHMS[config.algorithm.name].reduces_gradients
    period = "-" if gradients else ", ".join(f"{k} from epoch {e}" if e else str(k) for e, k in config.period_by_epoch)
    return [config.algorithm.name + sampling, period]


def _figures(run: Simulated) -> list[str]:
    return [
        f"{1e3 * run.step_seconds:.2f}",
        f"{run.samples_per_second:.0f}",
        f"{run.speedup:.2f}",
        f"{run.exposed_share:.1%}",
        f"{run.timeline.fleet.sent_bytes / 1e6:.1f}",
    ]
