"""What ``cocod plan`` prints: what was measured, what to use and why, what to expect, and the command to run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cocod_accel.algorithms import ALGORITHMS
from cocod_accel.plan.recommend import Advice, Expected
from cocod_accel.report.curves import Scaling
from cocod_accel.runs.tables import aligned
from cocod_accel.simulator.cluster import Cluster

#: Longer lists of workers are not shown one by one.
_MOST_ROWS = 12


def report(cluster: Cluster, advice: Advice, arguments: Sequence[str]) -> str:
    width = max(len(f"{what}: {value}") for what, value, _ in advice.reasons)
    reasons = [f"  {f'{what}: {value}'.ljust(width)}   {why}" for what, value, why in advice.reasons]
    command = shlex.join(["cocod", "train", *arguments, *advice.overrides])
    blocks = [
        *_cluster_tables(cluster),
        "\n".join(["recommended", *reasons, *(f"  warning: {warning}" for warning in advice.warnings)]),
        f"expected speedup over one worker of speed 1 alone (simulated)\n{_expected_table(advice.expected)}",
        f"run\n  {command}",
    ]
    return "\n\n".join(blocks)


def _cluster_tables(cluster: Cluster) -> list[str]:
    """What the plan is of."""
    about = f": {cluster.description}" if cluster.description else ""
    rows = [["workers", "", "count", "speed", "ms/step", "jitter"]]
    for group in cluster.workers[:_MOST_ROWS]:
        figures = [f"{group.speed:g}", f"{1e3 * cluster.step_seconds / group.speed:.2f}", f"{group.jitter:.1%}"]
        rows.append([group.name, "", str(group.count), *figures])
    if len(cluster.workers) > _MOST_ROWS:
        rows.append([f"and {len(cluster.workers) - _MOST_ROWS} more groups", "", "", "", "", ""])
    fixed = cluster.fixed_seconds / cluster.step_seconds
    notes = [
        f"batches of {cluster.batch_size}; {fixed:.0%} of a step does not depend on the batch",
        f"while a transfer is under way, computing loses {cluster.interference:.1%}",
    ]
    blocks = [f"cluster {cluster.name}{about}\n{aligned(rows)}", "\n".join(notes)]
    network = cluster.network
    if network.allreduce is not None:
        table = [["all-reduce", "", "ms", "Mbit/s"]]
        for size, seconds in network.allreduce:
            table.append([f"{size / 1e6:.3f} MB", "", f"{1e3 * seconds:.2f}", f"{8 * size / seconds / 1e6:.0f}"])
        blocks.insert(1, aligned(table))
    else:
        link = f"{network.bandwidth_gbit:g} Gbit/s, {network.latency_us:g} us"
        blocks.insert(1, f"{network.topology} all-reduce over {link}")
    return blocks


def _expected_table(expected: Sequence[Expected]) -> str:
    rows = [["workers", "period", *ALGORITHMS, "linear"]]
    for row in expected:
        speedups = [row.speedups[name] for name in ALGORITHMS]
        cells = ["-" if speedup is None else f"{speedup:.2f}" for speedup in speedups]
        rows.append([str(row.num_workers), "-" if row.period is None else str(row.period), *cells, f"{row.linear:.2f}"])
    return aligned(rows)


def scaling_of(expected: Sequence[Expected]) -> Scaling:
    series: dict[str, list[tuple[int, float]]] = {name: [] for name in ALGORITHMS}
    for row in expected:
        for name, speedup in row.speedups.items():
            if speedup is not None:
                series[name].append((row.num_workers, speedup))
    return Scaling("one worker alone", {name: found for name, found in series.items() if found}, 1)
