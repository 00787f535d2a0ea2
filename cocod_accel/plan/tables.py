"""What ``cocod plan`` prints: what was measured, what to use and why, what to expect, and the command to run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cocod_accel.algorithms import PAPERS
from cocod_accel.config.algorithms import algorithm_class
from cocod_accel.plan.candidates import AS_GOOD, Candidate
from cocod_accel.plan.recommend import Advice, Expected
from cocod_accel.report.curves import Scaling
from cocod_accel.runs.tables import aligned
from cocod_accel.simulator.cluster import Cluster

_HEADLINE = "candidates: steps and time to S-SGD's accuracy, over S-SGD's (times simulated, steps from docs/reproduction.md)"
_SPEEDUPS = "expected speedup over one worker of speed 1 alone, in time to S-SGD's accuracy"
#: Longer lists of workers are not shown one by one.
_MOST_ROWS = 12


def report(cluster: Cluster, advice: Advice, arguments: Sequence[str]) -> str:
    width = max(len(f"{what}: {value}") for what, value, _ in advice.reasons)
    reasons = [f"  {f'{what}: {value}'.ljust(width)}   {why}" for what, value, why in advice.reasons]
    command = shlex.join(["cocod", "train", *arguments, *advice.overrides])
    blocks = [
        *_cluster_tables(cluster),
        "\n".join(["recommended", *reasons, *(f"  warning: {warning}" for warning in advice.warnings)]),
        f"{_HEADLINE}\n{_candidates_table(advice)}",
        f"{_SPEEDUPS}\n{_expected_table(advice.expected)}",
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
    if not cluster.coding_ns:
        notes.append("coding times (coding_ns) are not in the file; assumed to be zero")
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


def _candidates_table(advice: Advice) -> str:
    ssgd = next((c for c in advice.candidates if c.algorithm == "ssgd"), None)
    taken = [c.speedup for c in advice.candidates if advice.is_taken(c)]

    def is_as_good(candidate: Candidate) -> bool:
        return any(candidate.speedup >= (1 - AS_GOOD) * speedup for speedup in taken)

    rows = [["algorithm", "payload", "period", "delay", "ms/step", "MB/step", "steps", "time", ""]]
    for candidate in advice.candidates:
        kind = algorithm_class(candidate.algorithm)
        time = "-" if ssgd is None else f"{ssgd.speedup / candidate.speedup:.2f}"
        rows.append(
            [
                candidate.algorithm,
                candidate.payload,
                "" if kind.reduces_gradients else str(candidate.period),
                "" if candidate.algorithm != "cocod" else str(candidate.delay or candidate.period),
                f"{1e3 * candidate.step_seconds:.1f}",
                f"{candidate.step_bytes / 1e6:.3f}",
                f"{candidate.steps_needed:.2f}",
                time,
                "recommended" if advice.is_taken(candidate) else "as good" if is_as_good(candidate) else "",
            ]
        )
    late = advice.asynchronous
    if late is not None:
        figures = [f"{1e3 * late.step_seconds:.1f}", f"{late.step_bytes / 1e6:.3f}"]
        rows.append([late.algorithm, late.payload, "", "", *figures, "-", "-", "steps not measured"])
    return aligned(rows)


def _expected_table(expected: Sequence[Expected]) -> str:
    rows = [["workers", "cocod with", *PAPERS, "linear"]]
    for row in expected:
        speedups = [row.speedups[name] for name in PAPERS]
        cells = ["-" if speedup is None else f"{speedup:.2f}" for speedup in speedups]
        rows.append([str(row.num_workers), row.choice or "-", *cells, f"{row.linear:.2f}"])
    return aligned(rows)


def scaling_of(expected: Sequence[Expected]) -> Scaling:
    series: dict[str, list[tuple[int, float]]] = {name: [] for name in PAPERS}
    for row in expected:
        for name, speedup in row.speedups.items():
            if speedup is not None:
                series[name].append((row.num_workers, speedup))
    ideal = {row.num_workers: row.linear for row in expected}
    return Scaling("one worker alone", {name: found for name, found in series.items() if found}, 1, ideal)
