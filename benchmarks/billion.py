"""A model of 1 B parameters on 8 nodes over slow links: utilisation by method, and the goodput a method needs.

    python -m benchmarks.billion

The cluster is ``configs/cluster/eight_nodes_1b.yaml`` with other links. Utilisation is what a step takes alone over what it
takes in a steady state; all times are simulated. Beside them stands what Douillard et al. published (Streaming DiLoCo,
arXiv:2501.18512, table 4): simulated, too, with the same time for a step, but other assumptions.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cocod_accel.runs.tables import aligned
from cocod_accel.simulator.cluster import Cluster, load_cluster
from cocod_accel.simulator.simulate import configured, simulate

CLUSTER = Path(__file__).parents[1] / "configs/cluster/eight_nodes_1b.yaml"
GBITS = (0.1, 1.0, 10.0)
MILLISECONDS = (1.0, 50.0)
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
#: What is simulated has nothing to do with data.
_TASK = ("task.name=synthetic", "task.args={num_train: 4000000, size: 4}", "model.name=mlp", "schedule.warmup_epochs=0")
#: Goodput in Gbit/s between which a need is looked for, and how precisely.
_LOWEST, _HIGHEST, _PRECISION = 0.001, 10_000.0, 1.01
#: Rounds that are measured, after those in which the first transfers have arrived.
_ROUNDS, _BEFORE = 4, 3


@dataclass(frozen=True)
class Method:
    label: str
    period: int
    options: tuple[str, ...]
    #: Gbit/s for :data:`TARGETS`, as published of the like.
    published: tuple[float, ...] = ()


def _cocod(period: int, payload: str) -> Method:
    options = ("algorithm.name=cocod", f"algorithm.period={period}", f"algorithm.payload={payload}")
    return Method(f"CoCoD-SGD k={period}{'' if payload == 'fp32' else f' {payload}'}", period, options)


#: The paper cuts 24 layers into parts of three, sends each every 100 steps and merges it up to five steps later.
_STREAMED = ("algorithm.name=streaming_diloco", "algorithm.period=100", "algorithm.fragments=8", "algorithm.delay=5")
METHODS = (
    Method("S-SGD", 1, ("algorithm.name=ssgd",), (86.8, 152.6, 184.2, 222.3, 569.0)),
    Method("DiLoCo k=100", 100, ("algorithm.name=diloco", "algorithm.period=100"), (1.4, 6.2, 13.3, 23.3, 86.8)),
    Method("StreamingDiLoCo k=100", 100, _STREAMED, (1.4, 4.3, 6.2, 9.1, 11.0)),
    Method("StreamingDiLoCo k=100 int4", 100, (*_STREAMED, "algorithm.payload=int4"), (0.4, 0.9, 1.7, 2.0, 3.0)),
    _cocod(5, "fp32"),
    _cocod(1, "ternary"),
    _cocod(5, "ternary"),
    _cocod(50, "ternary"),
)


def utilisation(cluster: Cluster, method: Method) -> float:
    """The share of a steady round in which the slowest worker computes its own steps."""
    config = configured(cluster, [*_TASK, *method.options])
    first, last = _BEFORE * method.period, (_BEFORE + _ROUNDS) * method.period
    timeline = simulate(cluster, config, steps=last + method.period).timeline
    seconds = timeline.train_seconds_after(last) - timeline.train_seconds_after(first)
    return (last - first) * cluster.step_seconds / seconds


@functools.cache
def _base() -> Cluster:
    return load_cluster(CLUSTER)


def linked(gbit: float, milliseconds: float) -> Cluster:
    """The cluster with links of this goodput and latency."""
    base = _base()
    return replace(base, network=replace(base.network, bandwidth_gbit=gbit, latency_us=1e3 * milliseconds))


def needed(method: Method, target: float, milliseconds: float) -> float | None:
    """The least goodput in Gbit/s with which a method is utilised so; None: latency alone forbids it."""
    low, high = _LOWEST, _HIGHEST
    if utilisation(linked(high, milliseconds), method) < target:
        return None
    while high / low > _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if utilisation(linked(middle, milliseconds), method) >= target else (middle, high)
    return high


def links_table(gbits: Sequence[float] = GBITS, milliseconds: Sequence[float] = MILLISECONDS) -> str:
    rows = [["utilisation, simulated", *(f"{g:g} Gbit/s, {ms:g} ms" for ms in milliseconds for g in gbits)]]
    for method in METHODS:
        found = (utilisation(linked(g, ms), method) for ms in milliseconds for g in gbits)
        rows.append([method.label, *(f"{share:.1%}" for share in found)])
    return aligned(rows)


def needs_table(milliseconds: float, targets: Sequence[float] = TARGETS) -> str:
    rows = [["Gbit/s for a utilisation of", *(f"{target:.0%}" for target in targets), "published"]]
    for method in METHODS:
        needs = [needed(method, target, milliseconds) for target in targets]
        shown = ["never" if need is None else f"{need:.3g}" for need in needs]
        rows.append([method.label, *shown, ", ".join(f"{gbit:g}" for gbit in method.published) or "-"])
    return aligned(rows)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    base = _base()
    print(f"1 B parameters in float32, {base.num_workers} nodes in a ring, {1e3 * base.step_seconds:g} ms a step; simulated")
    print(links_table())
    print(f"\nlatency {MILLISECONDS[0]:g} ms; published: for the same utilisations (arXiv:2501.18512, table 4)")
    print(needs_table(MILLISECONDS[0]))


if __name__ == "__main__":
    main()
