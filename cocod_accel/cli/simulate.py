"""``cocod simulate``: every algorithm on one cluster, a table, and run folders that ``cocod compare`` reads."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocod_accel.cli.common import Commands, add_configs, add_workers, check_at_least
from cocod_accel.config.strict import ConfigError, printable, printable_lines, require_choice

if TYPE_CHECKING:
    from cocod_accel.config.settings import Config
    from cocod_accel.simulator.cluster import Cluster
    from cocod_accel.simulator.simulate import Simulated
    from cocod_accel.theory.goodput import Failures

_OUT = Path("runs/simulated")
#: Steps whose spans are kept by default.
_SPAN_STEPS = 200


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("simulate", help="what to expect on a cluster you do not have, in virtual time")
    parser.add_argument("cluster", metavar="CLUSTER.yaml", help="e.g. configs/cluster/paper.yaml")
    add_configs(parser, "what to train, as for cocod train")
    parser.add_argument("--algorithms", metavar="A,B", help="default: the paper's five, or what algorithm.name=... names")
    add_workers(parser, "resize the cluster to N workers, keeping its mix")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of worker 0; default: those of the configuration")
    parser.add_argument("--learn", action="store_true", help="also train all workers for real, in turn, in this process")
    parser.add_argument("--spans", type=int, metavar="STEPS", help="keep the spans of this many steps; default: 200")
    parser.add_argument("--failures", type=float, metavar="N", help="workers that fail in an hour: what that would cost")
    parser.add_argument("--restart", type=float, default=120, metavar="SECONDS", help="until one is back; default: 120")
    parser.add_argument("--save", type=float, default=600, metavar="SECONDS", help="between checkpoints; default: 600")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to create run folders; default: runs/simulated")
    return parser


def run(options: argparse.Namespace) -> int:
    """Simulate, print the table, and leave a run folder for each algorithm."""
    from cocod_accel.config.settings import Config
    from cocod_accel.simulator.cluster import load_cluster
    from cocod_accel.simulator.folders import write
    from cocod_accel.simulator.learning import Learning
    from cocod_accel.simulator.simulate import simulate
    from cocod_accel.simulator.tables import report
    from cocod_accel.theory.goodput import Failures

    cluster = load_cluster(options.cluster)
    check_at_least("--workers", options.workers, 1)
    if options.workers is not None:
        cluster = cluster.resized(options.workers)
    if options.learn and options.steps is not None:
        raise ConfigError(f"--steps={options.steps}: --learn trains whole epochs; drop --steps and set schedule.epochs=1")
    check_at_least("--spans", options.spans, 0)
    failures = None
    if options.failures is not None:
        try:
            failures = Failures(options.failures, options.restart, options.save)
        except ValueError as error:
            raise ConfigError(f"--failures={options.failures:g} --restart={options.restart:g}: {error}") from error
    configs, skipped = _configs(cluster, options.configs, options.algorithms, options.steps)
    runs: list[Simulated] = []
    folders: list[Path] = []
    for config in configs:
        if options.out is not None or config.output == Config().output:
            config.output = str(_OUT if options.out is None else options.out)
        kept = _SPAN_STEPS if options.spans is None else options.spans
        kept = kept if config.logging.spans else 0
        with _bar(config.algorithm.name) as bar:
            done = simulate(cluster, config, steps=options.steps, span_steps=kept, progress=bar.update)
        runs.append(done)
        if not options.learn:
            folders.append(write(done))
            continue
        with _bar(f"{config.algorithm.name}, learning", total=done.timeline.num_steps) as bar:
            folders.append(write(done, Learning(config, on_step=bar.update).rows()))
    print(printable_lines(report(cluster, runs)))
    if failures is not None:
        for done in runs:
            print(printable(_goodput(done, failures)))
    waiting = [done.config.algorithm.name for done in runs if done.exposed_share > 0.5]
    if waiting:
        resized = [] if options.workers is None else ["--workers", str(options.workers)]
        plan = shlex.join(["cocod", "plan", *options.configs, "--cluster", options.cluster, *resized])
        print(printable(f"with {', '.join(waiting)} a worker waits for most of the time; what to train with: {plan}"))
    for line in skipped:
        print(f"skipped: {printable(line)}", file=sys.stderr)
    print(printable(f"run folders: cocod compare {shlex.join(map(str, folders))}"))
    return 0


def _goodput(done: Simulated, failures: Failures) -> str:
    """What failures would cost this run, in words; estimated, not simulated."""
    from cocod_accel.theory.goodput import goodput_of_members, goodput_of_restarts

    name = done.config.algorithm.name
    kept = f"{goodput_of_restarts(failures):.1%} of the steps are kept if all start again"
    again = f"{name}, {failures.per_hour:g} failures an hour: {kept}"
    if name not in ("local", "cocod", "diloco"):
        return again
    seconds = done.step_seconds * done.work.algorithm.period.at(0)
    others = goodput_of_members(failures, done.cluster.num_workers, seconds, overlapped=name == "cocod")
    return f"{again}, {others:.1%} if the others go on (estimated)"


def _bar(what: str, total: int | None = None) -> Any:
    from tqdm import tqdm

    return tqdm(desc=what, total=total, disable=not sys.stderr.isatty(), unit="step", leave=False, dynamic_ncols=True)


def _configs(
    cluster: Cluster, arguments: list[str], algorithms: str | None, steps: int | None
) -> tuple[list[Config], list[str]]:
    """One for each algorithm; if the user chose none, those that accept the configuration, and why others do not."""
    from cocod_accel.algorithms import ALGORITHMS, PAPERS
    from cocod_accel.simulator.simulate import configured

    asked = [argument for argument in arguments if argument.startswith("algorithm.name=")]
    if algorithms is None and asked:
        return [_named(configured(cluster, arguments, steps=steps), cluster, 1)], []
    names = list(PAPERS) if algorithms is None else [name.strip() for name in algorithms.split(",")]
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
        raise problems[0]  # all have the same one: a missing file, an unknown key
    return [_named(config, cluster, len(configs)) for config in configs], [str(problem) for problem in problems]


def _named(config: Config, cluster: Cluster, num_runs: int) -> Config:
    """A name that tells the runs of one command apart."""
    if config.name is None:
        config.name = f"{config.run_name}-{cluster.name}-{cluster.num_workers}"
    elif num_runs > 1:
        config.name = f"{config.name}-{config.algorithm.name}"
    return config
