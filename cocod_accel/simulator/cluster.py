"""A cluster in a file: how fast its workers compute, what a sum over them takes, and how the two disturb each other.

``cocod simulate`` runs on one, ``cocod plan`` writes one. Times follow from few numbers: a step of a worker from one
measured step, its batch and its speed; an all-reduce from latency and bandwidth (alpha-beta), or from a measured table.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from cocod_accel.averaging.codecs import check_payload
from cocod_accel.config.strict import (
    ConfigError,
    merge_strictly,
    parse_yaml,
    read_text,
    require,
    require_choice,
    resolved,
    save_yaml,
)
from cocod_accel.sharding.plan import check_speeds

TOPOLOGIES = ("ring", "tree", "hierarchical")
#: So many take a minute for a thousand steps of every algorithm.
MOST_WORKERS = 100_000


@dataclass
class WorkerGroup:
    """Workers that are alike; ranks count through the groups in their order."""

    #: What they are called in tables.
    name: str = "worker"
    #: How many of them there are.
    count: int = 1
    #: Steps of the same batch in the same time, relative to the worker that ``step_seconds`` is of.
    speed: float = 1.0
    #: Standard deviation over mean of a step's time, which is lognormal.
    jitter: float = 0.0


@dataclass
class Stragglers:
    """Steps that take much longer now and then, on any worker."""

    #: Of one step of one worker.
    probability: float = 0.0
    #: How many times longer such a step takes.
    factor: float = 1.0


@dataclass
class Wire:
    """A link."""

    #: Before a message's first byte, in microseconds.
    latency_us: float = 0.0
    #: What arrives (goodput), not what the cable is sold as.
    bandwidth_gbit: float = 1.0

    @property
    def alpha(self) -> float:
        """Seconds before a message's first byte."""
        return self.latency_us * 1e-6

    @property
    def beta(self) -> float:
        """Bytes a second."""
        return self.bandwidth_gbit * 1e9 / 8


@dataclass
class Network:
    """What an all-reduce takes."""

    #: Between nodes, in microseconds.
    latency_us: float = 10.0
    #: Goodput of one node's link, which its workers share. With one worker a node that is the worker's.
    bandwidth_gbit: float = 10.0
    #: ring, tree or hierarchical (inside nodes over ``inner``, a ring between them).
    topology: str = "ring"
    #: Workers that share a node's link, next to each other in rank.
    workers_per_node: int = 1
    #: Inside a node; null: as between nodes.
    inner: Wire | None = None
    #: Measured [bytes, seconds] rows, used instead; other numbers of workers are scaled as latency and bandwidth say.
    allreduce: list[list[float]] | None = None
    #: How many workers ``allreduce`` was measured with; null: those of this file.
    allreduce_workers: int | None = None


@dataclass
class Cluster:
    """A cluster; every time in it is of one step or of one all-reduce."""

    #: What the cluster is called in tables and run folders.
    name: str = "cluster"
    #: A line about it.
    description: str = ""
    #: A step of a worker of speed 1 with a batch of ``batch_size``, without any communication.
    step_seconds: float = 0.1
    #: The batch that ``step_seconds`` was measured with.
    batch_size: int = 32
    #: The part of ``step_seconds`` that a smaller batch does not shrink.
    fixed_seconds: float = 0.0
    #: Groups of workers that are alike.
    workers: list[WorkerGroup] = field(default_factory=lambda: [WorkerGroup(count=2)])
    stragglers: Stragglers = field(default_factory=Stragglers)
    network: Network = field(default_factory=Network)
    #: While a transfer is under way a worker computes at the rate 1 - interference: the a% of section 4.2 of the paper.
    interference: float = 0.0
    #: The share of a step's all-reduce that S-SGD hides behind its backward; 0, as in the paper: none.
    gradient_overlap: float = 0.0
    #: Nanoseconds that a worker's main thread codes an element for one average, by payload; those not named: 0.
    coding_ns: dict[str, float] = field(default_factory=dict)
    #: Of a model in float32; null: of the model that is trained.
    payload_bytes: int | None = None

    def __post_init__(self) -> None:
        #: Values that were given by reference, such as ``${oc.env:NAME}``: they may be secrets, which no file may tell.
        self.given: dict[str, str] = {}

    @property
    def num_workers(self) -> int:
        return sum(group.count for group in self.workers)

    def speeds(self) -> list[float]:
        """Every worker's, in rank order."""
        return [group.speed for group in self.workers for _ in range(group.count)]

    def jitters(self) -> list[float]:
        """Every worker's, in rank order."""
        return [group.jitter for group in self.workers for _ in range(group.count)]

    def step_seconds_of(self, rank: int, batch: int) -> float:
        """The mean time that worker ``rank`` computes a step of ``batch`` samples, stragglers left out."""
        return self._step_of_speed_one(batch) / self.speeds()[rank]

    def seconds_alone(self, batch: int) -> float:
        """The mean step of a worker of speed 1 that trains alone, stragglers included."""
        return self._step_of_speed_one(batch) * (1 + self.stragglers.probability * (self.stragglers.factor - 1))

    def _step_of_speed_one(self, batch: int) -> float:
        return self.fixed_seconds + (self.step_seconds - self.fixed_seconds) * batch / self.batch_size

    def allreduce_seconds(self, num_bytes: float, num_workers: int | None = None) -> float:
        """A sum of ``num_bytes`` over all workers, or another number of them, from when the last one joins to the end."""
        workers = self.num_workers if num_workers is None else num_workers
        if workers == 1:
            return 0.0
        network = self.network
        if network.allreduce is None:
            return _modelled_seconds(network, num_bytes, workers)
        seconds = _interpolated(network.allreduce, num_bytes)
        measured = network.allreduce_workers or self.num_workers
        if workers == measured:
            return seconds
        return seconds * _modelled_seconds(network, num_bytes, workers) / _modelled_seconds(network, num_bytes, measured)

    def between_seconds(self, num_bytes: float, node_size: int, *, gathers: bool = True) -> float:
        """A model's average between nodes of ``node_size`` workers, each of which sums a share of it with its peers.

        Then every node ``gathers`` the shares, unless they are all that its workers hold. With nodes of one worker that is a
        sum over all.
        """
        if node_size == 1:
            return self.allreduce_seconds(num_bytes)
        num_nodes = self.num_workers // node_size
        if num_nodes == 1:
            return 0.0
        network, inner = self.network, self._inner(node_size)
        # As many shares pass a link as workers share it.
        through = num_bytes * network.workers_per_node / node_size
        gathering = (node_size - 1) * (inner.alpha + num_bytes / node_size / inner.beta) if gathers else 0.0
        modelled = _ring_seconds(Wire(network.latency_us, network.bandwidth_gbit), through, num_nodes) + gathering
        return modelled * self._measured_over_modelled(num_bytes)

    def message_seconds(self, num_bytes: float) -> tuple[float, float]:
        """From one worker to another: seconds before the first byte, and on the link of one of them."""
        if self.num_workers == 1 and self.network.allreduce is not None:
            return self.network.latency_us * 1e-6, num_bytes * 8e-9 / self.network.bandwidth_gbit
        factor = self._measured_over_modelled(num_bytes)
        wire = Wire(self.network.latency_us, self.network.bandwidth_gbit)
        return factor * wire.alpha, factor * num_bytes / wire.beta

    def inside_seconds(self, num_bytes: float, node_size: int) -> float:
        """A sum over the workers of a node."""
        if node_size == 1:
            return 0.0
        return _ring_seconds(self._inner(node_size), num_bytes, node_size) * self._measured_over_modelled(num_bytes)

    def _inner(self, node_size: int) -> Wire:
        network = self.network
        outer = Wire(network.latency_us, network.bandwidth_gbit)
        return network.inner if network.inner is not None and node_size <= network.workers_per_node else outer

    def _measured_over_modelled(self, num_bytes: float) -> float:
        """1, unless sums over all workers were measured."""
        if self.network.allreduce is None:
            return 1.0
        return self.allreduce_seconds(num_bytes) / _modelled_seconds(self.network, num_bytes, self.num_workers)

    def coding_seconds(self, payload: str, num_elements: int) -> float:
        """Seconds each worker's main thread needs to code an average of this many elements."""
        return self.coding_ns.get(payload, 0.0) * num_elements * 1e-9 if self.num_workers > 1 else 0.0

    def resized(self, num_workers: int) -> Cluster:
        """The same cluster with another number of workers; the mix of groups stays, as far as whole workers allow."""
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers} must be at least 1")
        _check_number(num_workers, "--workers")
        total = self.num_workers
        exact = [group.count * num_workers / total for group in self.workers]
        counts = [math.floor(share) for share in exact]
        # What is left goes where most was cut off; ties to the groups that come first.
        order = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
        for index in order[: num_workers - sum(counts)]:
            counts[index] += 1
        groups = [replace(group, count=n) for group, n in zip(self.workers, counts, strict=True) if n]
        measured = self.network.allreduce_workers or (None if self.network.allreduce is None else total)
        result = replace(self, workers=groups, network=replace(self.network, allreduce_workers=measured))
        changed = ("workers", "network.allreduce_workers")
        result.given = {key: text for key, text in self.given.items() if not key.startswith(changed)}
        return result


def _modelled_seconds(network: Network, num_bytes: float, workers: int) -> float:
    """Alpha-beta: a message of b bytes takes alpha + b / beta."""
    outer = Wire(network.latency_us, network.bandwidth_gbit)
    inner = network.inner or outer
    size = min(network.workers_per_node, workers)
    num_nodes = math.ceil(workers / network.workers_per_node)
    if network.topology == "hierarchical":
        # Reduce-scatter and all-gather inside every node; between them each worker sums its share with its peers, and
        # the shares of all workers of a node pass the node's link together.
        return _ring_seconds(inner, num_bytes, size) + _ring_seconds(outer, num_bytes, num_nodes)
    wire = inner if num_nodes == 1 else outer
    if network.topology == "tree":
        return 2 * math.ceil(math.log2(workers)) * (wire.alpha + num_bytes / wire.beta)
    return _ring_seconds(wire, num_bytes, workers)


def _ring_seconds(wire: Wire, num_bytes: float, members: int) -> float:
    """2 (N - 1) messages of an N-th of the payload, one after the other."""
    return 2 * (members - 1) * (wire.alpha + num_bytes / members / wire.beta)


def _interpolated(rows: list[list[float]], num_bytes: float) -> float:
    """Straight between rows, on along the last of these lines, and never faster than the first row."""
    sizes, seconds = [row[0] for row in rows], [row[1] for row in rows]
    if num_bytes <= sizes[-1]:
        return float(np.interp(num_bytes, sizes, seconds))
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return seconds[-1] + slope * (num_bytes - sizes[-1])


# ------------------------------------------------------------------------------------------------ loading


def load_cluster(path: str | Path) -> Cluster:
    """The cluster that a YAML file describes."""
    return copy.deepcopy(_loaded(str(path), read_text(path)))


# A grid's cells are on the same few clusters.
@functools.lru_cache(maxsize=16)
def _loaded(path: str, text: str) -> Cluster:
    given = parse_yaml(text, path)
    cluster = resolved(merge_strictly(Cluster, OmegaConf.structured(Cluster), [(given, path)]))
    assert isinstance(cluster, Cluster)
    references = _references(OmegaConf.to_container(given, resolve=False))
    cluster.given = references if any("oc.env" in value for value in references.values()) else {}
    for key in ("name", "description"):
        if key in cluster.given:  # they are shown, and name folders
            setattr(cluster, key, cluster.given[key])
    for index, group in enumerate(cluster.workers):
        group.name = cluster.given.get(f"workers[{index}].name", group.name)
    try:
        validate(cluster)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return cluster


def _references(tree: Any, prefix: str = "") -> dict[str, str]:
    """Values that refer to something else, such as ``${oc.env:NAME}``, by key, as they are written."""
    if isinstance(tree, dict):
        nodes = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list):
        nodes = [(f"{prefix}[{index}]", value) for index, value in enumerate(tree)]
    else:
        return {prefix: tree} if isinstance(tree, str) and "${" in tree else {}
    return {found: text for key, value in nodes for found, text in _references(value, key).items()}


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster; loading it gives an equal one. What refers to something else is written as it was given."""
    tree = OmegaConf.structured(cluster)
    for key, text in cluster.given.items():
        OmegaConf.update(tree, key, text)
    save_yaml(tree, path)


def _check_number(num_workers: int, key: str) -> None:
    require(num_workers <= MOST_WORKERS, key, num_workers, f"at most {MOST_WORKERS:,} workers can be simulated")


def validate(cluster: Cluster) -> None:
    """Refuse an invalid cluster, with one line."""
    network, stragglers = cluster.network, cluster.stragglers
    require("/" not in cluster.name, "name", cluster.name, "must not contain a slash: run folders are named after it")
    require(bool(cluster.workers), "workers", cluster.workers, "must not be empty; give groups such as [{count: 2}]")
    for key, count in (
        *((f"workers[{i}].count", group.count) for i, group in enumerate(cluster.workers)),
        ("batch_size", cluster.batch_size),
        ("network.workers_per_node", network.workers_per_node),
        *((key, n) for key, n in (("payload_bytes", cluster.payload_bytes),) if n is not None),
    ):
        require(count >= 1, key, count, "must be at least 1")
    _check_number(cluster.num_workers, "workers")
    _at_least_zero(
        ("fixed_seconds", cluster.fixed_seconds),
        ("network.latency_us", network.latency_us),
        *((f"coding_ns.{payload}", nanoseconds) for payload, nanoseconds in cluster.coding_ns.items()),
        *((f"workers[{i}].jitter", group.jitter) for i, group in enumerate(cluster.workers)),
        *((key, wire.latency_us) for key, wire in _inner_wires(network, "latency_us")),
    )
    for key, value in (
        ("step_seconds", cluster.step_seconds),
        ("network.bandwidth_gbit", network.bandwidth_gbit),
        *((key, wire.bandwidth_gbit) for key, wire in _inner_wires(network, "bandwidth_gbit")),
    ):
        require(math.isfinite(value) and value > 0, key, value, "must be positive and finite")
    try:
        check_speeds(cluster.speeds())
    except ValueError as error:
        raise ConfigError(f"workers: {error}") from error
    require(
        cluster.fixed_seconds <= cluster.step_seconds,
        "fixed_seconds",
        cluster.fixed_seconds,
        f"must be at most step_seconds={cluster.step_seconds}, which includes it",
    )
    require_choice(network.topology, "network.topology", list(TOPOLOGIES))
    probability, factor = stragglers.probability, stragglers.factor
    require(0 <= probability <= 1, "stragglers.probability", probability, "must be in [0, 1]")
    require(math.isfinite(factor) and factor >= 1, "stragglers.factor", factor, "must be finite and at least 1")
    for payload in cluster.coding_ns:
        try:
            check_payload(payload, gradients=True)
        except ValueError as error:
            raise ConfigError(f"coding_ns: {error}") from error
    a = cluster.interference
    require(0 <= a < 1, "interference", a, "must be in [0, 1): a share of the worker, 0.1 for 10%")
    overlap = cluster.gradient_overlap
    require(0 <= overlap <= 1, "gradient_overlap", overlap, "must be in [0, 1]: a share of the all-reduce")
    _validate_table(network)
    nobody = network.allreduce is not None and network.allreduce_workers is None and cluster.num_workers == 1
    require(
        not nobody,
        "network.allreduce_workers",
        None,
        "must give the number of workers in the table; this cluster has only one",
    )


def _inner_wires(network: Network, key: str) -> list[tuple[str, Wire]]:
    return [] if network.inner is None else [(f"network.inner.{key}", network.inner)]


def _at_least_zero(*rows: tuple[str, float]) -> None:
    for key, value in rows:
        require(math.isfinite(value) and value >= 0, key, value, "must not be negative")


def _validate_table(network: Network) -> None:
    rows, measured = network.allreduce, network.allreduce_workers
    if rows is None:
        require(measured is None, "network.allreduce_workers", measured, "requires network.allreduce")
        return
    require(measured is None or measured >= 2, "network.allreduce_workers", measured, "must be at least 2")
    require(len(rows) >= 2, "network.allreduce", rows, "must have at least two [bytes, seconds] rows")
    previous = 0.0
    for index, row in enumerate(rows):
        key = f"network.allreduce[{index}]"
        good = len(row) == 2 and all(math.isfinite(value) and value > 0 for value in row)
        require(good, key, row, "must be [bytes, seconds], both positive")
        require(row[0] > previous, key, row, "must have more bytes than the row before")
        previous = row[0]
    last = f"network.allreduce[{len(rows) - 1}]"
    require(rows[-1][1] >= rows[-2][1], last, rows[-1], "must not be faster than the previous row")
