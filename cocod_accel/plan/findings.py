"""What was measured of a cluster, as the cluster file it stands for: pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from cocod_accel.simulator.cluster import Cluster, Network, WorkerGroup, validate

#: Workers next to each other whose steps differ by less, or by less than their jitter, are alike.
ALIKE = 0.05


def alike(first: float, other: float, *jitters: float) -> bool:
    """Whether two speeds, or two step times, are equal as far as can be told."""
    return max(first, other) <= (1 + max(ALIKE, *jitters)) * min(first, other)


@dataclass(frozen=True)
class Findings:
    """One entry per worker, unless it says otherwise."""

    devices: list[str]
    #: Of every worker's step.
    batch: int
    step_seconds: list[float]
    #: The part of that which does not depend on the batch.
    fixed_seconds: list[float]
    jitters: list[float]
    #: (bytes, seconds) of all-reduces over all workers.
    transfers: list[tuple[float, float]]
    interference: float
    #: What was measured, in words.
    what: str
    #: Nanoseconds that the main thread codes an element for one average, by payload; of the slowest worker.
    coding_ns: dict[str, float] = field(default_factory=dict)


def as_cluster(found: Findings, name: str) -> Cluster:
    """Workers that are alike become one group, so that the mix can be scaled; speed 1 is the slowest group's."""
    groups = _groups(found)
    seconds = [statistics.fmean(found.step_seconds[rank] for rank in group) for group in groups]
    slowest = max(range(len(groups)), key=lambda index: seconds[index])
    num_workers = len(found.devices)
    network, what = Network(), found.what
    if not found.transfers:
        what += "; one worker, so the network was not measured; its figures here are placeholders"
    else:
        latency, bandwidth = fit_ring(found.transfers, num_workers)
        network = Network(latency_us=latency, bandwidth_gbit=bandwidth, allreduce=_rising(found.transfers))
    cluster = Cluster(
        name=name,
        description=f"measured by cocod plan: {what}",
        step_seconds=seconds[slowest],
        batch_size=found.batch,
        fixed_seconds=statistics.fmean(found.fixed_seconds[rank] for rank in groups[slowest]),
        workers=[
            WorkerGroup(
                name=found.devices[group[0]],
                count=len(group),
                speed=round(seconds[slowest] / mine, 3),
                jitter=round(statistics.fmean(found.jitters[rank] for rank in group), 4),
            )
            for group, mine in zip(groups, seconds, strict=True)
        ],
        network=network,
        interference=round(found.interference, 4),
        coding_ns={payload: round(nanoseconds, 3) for payload, nanoseconds in found.coding_ns.items()},
    )
    validate(cluster)
    return cluster


def _groups(found: Findings) -> list[list[int]]:
    groups: list[list[int]] = []
    for rank, (device, seconds) in enumerate(zip(found.devices, found.step_seconds, strict=True)):
        first = groups[-1][0] if groups else rank
        is_like_it = alike(found.step_seconds[first], seconds, found.jitters[first], found.jitters[rank])
        if groups and device == found.devices[first] and is_like_it:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return groups


def fit_ring(transfers: Sequence[tuple[float, float]], num_workers: int) -> tuple[float, float]:
    """Latency in microseconds and bandwidth in Gbit/s of the ring that fits best; for other numbers of workers.

    A ring takes 2 (N - 1) (alpha + b / N / beta): a line in b, fitted to relative errors, or the largest size would decide
    alone.
    """
    weights = [1 / seconds**2 for _, seconds in transfers]
    total = sum(weights)
    mean_size = sum(w * b for w, (b, _) in zip(weights, transfers, strict=True)) / total
    mean_seconds = sum(w * s for w, (_, s) in zip(weights, transfers, strict=True)) / total
    spread = sum(w * (b - mean_size) ** 2 for w, (b, _) in zip(weights, transfers, strict=True))
    joint = sum(w * (b - mean_size) * (s - mean_seconds) for w, (b, s) in zip(weights, transfers, strict=True))
    slope = joint / spread
    latency = mean_seconds - slope * mean_size
    largest, longest = transfers[-1]
    if slope <= 0:  # sizes made no difference: nearly all is latency
        slope, latency = 0.1 * longest / largest, 0.9 * longest
    elif latency < 0:
        slope, latency = longest / largest, 0.0
    hops = 2 * (num_workers - 1)
    return latency / hops * 1e6, hops / num_workers / slope * 8 / 1e9


def _rising(transfers: Sequence[tuple[float, float]]) -> list[list[float]]:
    """More bytes never take less time: what noise says otherwise is raised to the row before."""
    rows: list[list[float]] = []
    for size, seconds in transfers:
        rows.append([size, max(seconds, rows[-1][1] if rows else 0.0)])
    return rows
