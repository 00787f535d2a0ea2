"""The paper's headline from its cluster files: what is fitted, what is predicted, and what the paper found.

    python -m benchmarks.headline [--interference 0.3,0.1]

One number per model is fitted: T_comm / T_comp, to the homogeneous ratio of section 5.2. For ResNet18 the network's
goodput is adjusted, with an assumed step time; for VGG16, on that same network, the step time. The heterogeneous ratios
of section 5.3 are then predicted: nothing is fitted to them. A ratio is the training time of S-SGD over that of
CoCoD-SGD for the paper's 120 epochs; all times are simulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from cocod_accel.runs.tables import aligned
from cocod_accel.simulator.cluster import Cluster, load_cluster
from cocod_accel.simulator.payloads import parcels_of
from cocod_accel.simulator.simulate import configured, simulate
from cocod_accel.tasks import task_facts
from cocod_accel.trainer.work import Work

CONFIGS = Path(__file__).parents[1] / "configs"
#: How close to the paper's ratio a fit must be.
CLOSE = 1e-4
#: (column, configs/variants, proportional sampling): what section 5 compares in each environment.
HOMOGENEOUS = [("S-SGD", "ssgd"), ("Pipe-SGD", "pipe"), ("Local-SGD", "local"), ("CoCoD-SGD", "cocod")]
HETEROGENEOUS = [
    ("S-SGD", "ssgd"),
    ("S-SGD+PS", "ssgd_ps"),
    ("Pipe-SGD", "pipe"),
    ("Pipe-SGD+PS", "pipe_ps"),
    ("AsynLocal-SGD", "asynlocal"),
    ("CoCoD-SGD", "cocod"),
]


@dataclass(frozen=True)
class Case:
    """One of the paper's models, and how many times as fast ("almost") as S-SGD it found CoCoD-SGD."""

    name: str
    model: str
    paper_homogeneous: float
    paper_heterogeneous: float


CASES = [Case("ResNet18", "resnet18", 2.0, 2.5), Case("VGG16", "vgg16", 2.5, 3.0)]


@dataclass(frozen=True)
class Found:
    case: Case
    cluster: Cluster
    #: T_comm / T_comp.
    ratio: float
    #: Training seconds by column.
    homogeneous: dict[str, float]
    heterogeneous: dict[str, float]


def arguments(case: Case, environment: str, overrides: Sequence[str] = ()) -> list[str]:
    return [str(CONFIGS / f"{environment}_16gpu.yaml"), str(CONFIGS / "tasks" / f"cifar10_{case.model}.yaml"), *overrides]


def training_seconds(cluster: Cluster, given: list[str], algorithm: str | None = None) -> float:
    return simulate(cluster, configured(cluster, given, algorithm)).timeline.train_seconds


def gradient_seconds(cluster: Cluster, case: Case) -> float:
    """T_comm."""
    config = configured(cluster, arguments(case, "homogeneous"), "ssgd")
    facts = task_facts(config)
    return parcels_of(config, cluster, Work.of(config, facts.num_train, 0).algorithm, facts).gradients.seconds


def solved(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where an increasing function reaches ``target``: false position with the Illinois modification."""
    below, above = function(low) - target, function(high) - target
    assert below < 0 < above, "the target is not between the ends"
    side = 0
    while True:
        x = (low * above - high * below) / (above - below)
        value = function(x) - target
        if abs(value) < CLOSE:
            return x
        if value > 0:
            high, above, below, side = x, value, below / 2 if side == 1 else below, 1
        else:
            low, below, above, side = x, value, above / 2 if side == -1 else above, -1


def with_ratio(cluster: Cluster, case: Case, ratio: float, network: Cluster | None) -> Cluster:
    """The cluster with this T_comm / T_comp: by its goodput, or, on the network of ``network``, by its step time."""
    if network is not None:
        cluster = replace(cluster, network=network.network)
        return replace(cluster, step_seconds=gradient_seconds(cluster, case) / ratio)
    latency = gradient_seconds(replace(cluster, network=replace(cluster.network, bandwidth_gbit=1e12)), case)
    sending = gradient_seconds(cluster, case) - latency
    goodput = cluster.network.bandwidth_gbit * sending / (ratio * cluster.step_seconds - latency)
    return replace(cluster, network=replace(cluster.network, bandwidth_gbit=goodput))


def fit(case: Case, cluster: Cluster, network: Cluster | None, overrides: Sequence[str] = ()) -> tuple[Cluster, float]:
    """The cluster on which CoCoD-SGD is as much faster than S-SGD as the paper found with equal workers."""
    given = arguments(case, "homogeneous", overrides)

    def faster(ratio: float) -> float:
        tried = with_ratio(cluster, case, ratio, network)
        return training_seconds(tried, given, "ssgd") / training_seconds(tried, given, "cocod")

    ratio = solved(faster, case.paper_homogeneous, 0.2, 5.0)
    return with_ratio(cluster, case, ratio, network), ratio


def headline(interference: float | None = None, overrides: Sequence[str] = ()) -> list[Found]:
    """Fit and predict for both models; ``interference``: instead of the value that the cluster files assume."""
    found: list[Found] = []
    for case in CASES:
        suffix = "" if not found else f"_{case.model}"
        cluster, mixed = (load_cluster(CONFIGS / "cluster" / f"paper{suffix}{kind}.yaml") for kind in ("", "_heterogeneous"))
        if interference is not None:
            cluster, mixed = (replace(these, interference=interference) for these in (cluster, mixed))
        fitted, ratio = fit(case, cluster, found[0].cluster if found else None, overrides)
        predicted = replace(mixed, network=fitted.network, step_seconds=fitted.step_seconds)
        equal = {
            column: training_seconds(fitted, arguments(case, "homogeneous", overrides), variant)
            for column, variant in HOMOGENEOUS
        }
        unequal = {}
        for column, variant in HETEROGENEOUS:
            given = [*arguments(case, "heterogeneous"), str(CONFIGS / "variants" / f"{variant}.yaml"), *overrides]
            unequal[column] = training_seconds(predicted, given)
        found.append(Found(case, fitted, ratio, equal, unequal))
    return found


def tables(found: Sequence[Found]) -> str:
    header = [
        "model",
        "interference (assumed)",
        "T_comm/T_comp (fitted)",
        "equal: fitted",
        "paper",
        "mixed: predicted",
        "paper",
        "off",
    ]
    rows = [header]
    for one in found:
        case = one.case
        fitted = one.homogeneous["S-SGD"] / one.homogeneous["CoCoD-SGD"]
        predicted = one.heterogeneous["S-SGD"] / one.heterogeneous["CoCoD-SGD"]
        rows.append(
            [
                case.name,
                f"{one.cluster.interference:g}",
                f"{one.ratio:.3f}",
                f"{fitted:.2f}",
                f"{case.paper_homogeneous:g}",
                f"{predicted:.2f}",
                f"{case.paper_heterogeneous:g}",
                f"{predicted / case.paper_heterogeneous - 1:+.0%}",
            ]
        )
    return aligned(rows)


def all_algorithms(found: Sequence[Found]) -> str:
    """Times as fast as S-SGD; the paper states only CoCoD-SGD's, the rest is predicted."""
    rows = [["environment", "model", *dict.fromkeys(column for column, _ in HOMOGENEOUS + HETEROGENEOUS)]]
    for title, key in (("equal workers", "homogeneous"), ("8 of 16 at half speed", "heterogeneous")):
        for one in found:
            seconds: dict[str, float] = getattr(one, key)
            cells = [f"{seconds['S-SGD'] / seconds[column]:.2f}" if column in seconds else "" for column in rows[0][2:]]
            rows.append([title, one.case.name, *cells])
    return aligned(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interference", help="also use these values, e.g. 0,0.1,0.2")
    options = parser.parse_args()
    others = [] if options.interference is None else [float(value) for value in options.interference.split(",")]
    found = [headline(value) for value in tqdm([None, *others], unit="fit", leave=False, disable=not sys.stderr.isatty())]
    print("CoCoD-SGD over S-SGD, simulated; fitted to section 5.2 of the paper, predicted for section 5.3")
    print(tables([one for these in found for one in these]))
    print("\ntimes as fast as S-SGD, simulated")
    print(all_algorithms(found[0]))
    for one in found[0]:
        cluster = one.cluster
        print(
            f"{one.case.name}: goodput {cluster.network.bandwidth_gbit:.4g} Gbit/s, step {cluster.step_seconds:.4g} s, "
            f"all-reduce {1e3 * one.ratio * cluster.step_seconds:.4g} ms"
        )


if __name__ == "__main__":
    main()
