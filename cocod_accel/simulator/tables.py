"""The table that ``cocod simulate`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from cocod_accel.config.algorithms import algorithm_class
from cocod_accel.runs.tables import aligned
from cocod_accel.simulator.cluster import Cluster
from cocod_accel.simulator.served import ServedTimeline
from cocod_accel.simulator.simulate import Simulated


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
