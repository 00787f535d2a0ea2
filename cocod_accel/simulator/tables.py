"""The table that ``cocod simulate`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from cocod_accel.config.algorithms import algorithm_class
from cocod_accel.runs.tables import aligned
from cocod_accel.simulator.cluster import Cluster
from cocod_accel.simulator.served import ServedTimeline
from cocod_accel.simulator.simulate import Simulated
from cocod_accel.theory import Failures


def report(cluster: Cluster, runs: Sequence[Simulated]) -> str:
    """The table, and what its columns mean."""
    speeds = cluster.speeds()
    header = ["algorithm", "period", "ms/step", "samples/s", "speedup", "exposed", "MB sent"]
    rows = [[*_names(run), *_figures(run)] for run in runs]
    late = [
        f"{_names(run)[0]}: {run.timeline.lateness_in_words()}" for run in runs if isinstance(run.timeline, ServedTimeline)
    ]
    return "\n".join(
        [
            f"simulated: {cluster.name}, {len(speeds)} workers, {runs[0].timeline.num_steps} steps",
            aligned([header, *rows]),
            f"speedup: throughput relative to one worker of speed 1 on its own; linear would be {sum(speeds):g}",
            "exposed: share of the time the worst worker was blocked; MB sent: by one worker over the whole run",
            *late,
        ]
    )


def goodput_table(runs: Sequence[Simulated], failures: Failures) -> str:
    """What is left of a run in which workers fail, if all restart, and if the others go on."""
    rows = [["algorithm", "period", "all restart", "the others go on"]]
    intervals = set()
    for run in runs:
        interval = run.checkpoint_seconds
        intervals.add(f"{interval:.0f} s")
        kept = f"{failures.goodput_of_restarting(interval):.3f}"
        round_seconds = run.work.algorithm.period.at(0) * run.step_seconds
        joined = failures.goodput_of_going_on(run.cluster.num_workers, round_seconds)
        kind = algorithm_class(run.config.algorithm.name)
        goes_on = kind.same_period and not kind.reduces_gradients
        rows.append([*_names(run), kept, f"{joined:.3f}" if goes_on else "-"])
    return "\n".join(
        [
            f"expected goodput with {failures.per_hour:g} failures an hour, each worker back after "
            f"{failures.restart_seconds:g} s; 1: nothing fails",
            aligned(rows),
            f"all restart: from checkpoints every {', '.join(sorted(intervals))} of training; the others go on: they wait "
            f"{failures.heartbeat_seconds:g} s for each (docs/tutorials/machines_that_come_and_go.md)",
        ]
    )


def _names(run: Simulated) -> list[str]:
    config = run.config
    sampling = " + PS" if config.cluster.proportional else ""
    kind = algorithm_class(config.algorithm.name)
    gradients = kind.reduces_gradients or kind.is_served
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
