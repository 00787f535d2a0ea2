"""Cluster files: times at worked values, strict loading, other numbers of workers, and the files that come along."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocod_accel.config.strict import ConfigError
from cocod_accel.simulator.cluster import (
    Cluster,
    Network,
    Stragglers,
    Wire,
    WorkerGroup,
    load_cluster,
    save_cluster,
    validate,
)

FILES = sorted((Path(__file__).parents[1] / "configs" / "cluster").glob("*.yaml"))

# --------------------------------------------------------------------------------------------------------- all-reduce


def seconds(network: Network, num_bytes: float, workers: int) -> float:
    return Cluster(workers=[WorkerGroup(count=workers)], network=network).allreduce_seconds(num_bytes)


def test_a_ring_sends_in_two_times_n_minus_one_messages() -> None:
    # 6 messages of 1 ms latency and 2 MB each at 1 GB/s (8 Gbit/s): 6 * (1 + 2) ms.
    assert seconds(Network(1000.0, 8.0), 8e6, 4) == pytest.approx(0.018)


def test_a_tree_goes_up_and_down_once() -> None:
    # ceil(log2 5) = 3: 6 messages of the whole 8 MB: 6 * (1 + 8) ms.
    assert seconds(Network(1000.0, 8.0, topology="tree"), 8e6, 5) == pytest.approx(0.054)
    assert seconds(Network(1000.0, 8.0, topology="tree"), 8e6, 2) == pytest.approx(0.018)


def test_nodes_reduce_inside_before_they_ring() -> None:
    network = Network(1000.0, 8.0, topology="hierarchical", workers_per_node=4, inner=Wire(10.0, 80.0))
    # Inside: 6 messages of 2 MB at 10 GB/s: 6 * (0.01 + 0.2) ms. Between 3 nodes: 4 messages of 8/3 MB: 4 * (1 + 8/3) ms.
    assert seconds(network, 8e6, 12) == pytest.approx(6 * 0.21e-3 + 4 * (1 + 8 / 3) * 1e-3)
    # 10 workers are on 3 nodes as well; 3 workers are on one.
    assert seconds(network, 8e6, 10) == seconds(network, 8e6, 12)
    assert seconds(network, 9e6, 3) == pytest.approx(4 * (0.01 + 0.3) * 1e-3)


def test_workers_of_one_node_use_its_own_wires() -> None:
    network = Network(1000.0, 8.0, workers_per_node=4, inner=Wire(0.0, 80.0))
    assert seconds(network, 8e6, 4) == pytest.approx(6 * 0.2e-3)
    assert seconds(network, 8e6, 5) == pytest.approx(8 * (1 + 1.6) * 1e-3)
    assert seconds(dataclasses.replace(network, inner=None), 8e6, 4) == pytest.approx(6 * 3e-3)


def test_one_worker_has_nobody_to_sum_with() -> None:
    for topology in ("ring", "tree", "hierarchical"):
        assert seconds(Network(1000.0, 8.0, topology=topology), 8e6, 1) == 0.0


TABLE = [[1e3, 0.001], [1e6, 0.002], [3e6, 0.010]]


def test_a_measured_table_is_straight_between_its_rows() -> None:
    network = Network(1000.0, 8.0, allreduce=TABLE)
    found = [seconds(network, size, 4) for size in (10, 1e3, 5e5, 1e6, 2e6, 3e6, 5e6)]
    half = 0.001 + 0.001 * (5e5 - 1e3) / (1e6 - 1e3)
    # Nothing is faster than the smallest that was measured; above the largest the last slope goes on.
    assert found == pytest.approx([0.001, 0.001, half, 0.002, 0.006, 0.010, 0.018])


def test_a_table_is_scaled_to_other_numbers_of_workers_as_the_model_is() -> None:
    network = Network(0.0, 8.0, allreduce=TABLE, allreduce_workers=2)
    # A ring of 4 sends 2 * 3 / 4 of the payload, one of 2 just the payload.
    assert seconds(network, 1e6, 2) == pytest.approx(0.002)
    assert seconds(network, 1e6, 4) == pytest.approx(0.003)
    small = Cluster(workers=[WorkerGroup(count=2)], network=Network(0.0, 8.0, allreduce=TABLE))
    assert small.allreduce_seconds(1e6, 4) == pytest.approx(0.003)
    assert small.resized(4).allreduce_seconds(1e6) == pytest.approx(0.003)
    assert small.resized(4).resized(2).allreduce_seconds(1e6) == pytest.approx(0.002)


@given(
    st.sampled_from(["ring", "tree", "hierarchical"]),
    st.integers(2, 600),
    st.integers(1, 9),
    st.floats(1, 1e9),
    st.floats(1, 2),
)
def test_more_bytes_and_slower_wires_take_longer(topology: str, workers: int, size: int, payload: float, by: float) -> None:
    network = Network(20.0, 10.0, topology=topology, workers_per_node=size, inner=Wire(2.0, 100.0))
    base = seconds(network, payload, workers)
    assert seconds(network, payload * by, workers) >= base > 0
    slower = dataclasses.replace(network, bandwidth_gbit=10.0 / by, latency_us=20.0 * by, inner=Wire(2.0 * by, 100.0 / by))
    assert seconds(slower, payload, workers) == pytest.approx(base * by)


# -------------------------------------------------------------------------------------------------- workers and steps


def test_a_step_is_its_fixed_part_and_one_by_batch() -> None:
    cluster = Cluster(step_seconds=0.1, fixed_seconds=0.02, batch_size=32, workers=[WorkerGroup(), WorkerGroup(speed=2.0)])
    assert cluster.step_seconds_of(0, 32) == pytest.approx(0.1)
    assert cluster.step_seconds_of(0, 8) == pytest.approx(0.04)
    assert cluster.step_seconds_of(1, 64) == pytest.approx(0.09)
    straggling = dataclasses.replace(cluster, stragglers=Stragglers(0.1, 6.0))
    assert straggling.seconds_alone(32) == pytest.approx(0.15)
    assert straggling.step_seconds_of(0, 32) == pytest.approx(0.1)


def test_ranks_count_through_the_groups() -> None:
    cluster = Cluster(workers=[WorkerGroup("a", 2, 1.0, 0.1), WorkerGroup("b", 1, 3.0)])
    assert (cluster.num_workers, cluster.speeds(), cluster.jitters()) == (3, [1.0, 1.0, 3.0], [0.1, 0.1, 0.0])


def test_another_number_of_workers_keeps_the_mix() -> None:
    cluster = Cluster(workers=[WorkerGroup("a", 8), WorkerGroup("b", 4, 2.0), WorkerGroup("c", 4, 3.0)])

    def mix(number: int) -> dict[str, int]:
        return {group.name: group.count for group in cluster.resized(number).workers}

    assert mix(16) == {"a": 8, "b": 4, "c": 4}
    assert mix(64) == {"a": 32, "b": 16, "c": 16}
    assert mix(5) == {"a": 3, "b": 1, "c": 1}
    assert mix(3) == {"a": 1, "b": 1, "c": 1}
    assert mix(1) == {"a": 1}
    with pytest.raises(ValueError, match="num_workers=0 must be at least 1"):
        cluster.resized(0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 300))
def test_resized_clusters_have_as_many_workers_as_asked_for(counts: list[int], number: int) -> None:
    cluster = Cluster(workers=[WorkerGroup(str(i), count) for i, count in enumerate(counts)])
    found = {group.name: group.count for group in cluster.resized(number).workers}
    assert sum(found.values()) == number
    for index, count in enumerate(counts):
        assert abs(found.get(str(index), 0) - count * number / sum(counts)) < 1


# ------------------------------------------------------------------------------------------------------------ loading


def test_a_saved_cluster_is_the_same_one_loaded(tmp_path: Path) -> None:
    cluster = Cluster(
        "all of it",
        "every key",
        workers=[WorkerGroup("a", 3, 0.5, 0.1), WorkerGroup("b")],
        stragglers=Stragglers(0.01, 4.0),
        network=Network(5.0, 20.0, "hierarchical", 2, Wire(1.0, 90.0), TABLE, 8),
        interference=0.1,
        gradient_overlap=0.5,
        payload_bytes=1000,
    )
    save_cluster(cluster, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == cluster


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step_second: 1", "unknown key step_second; did you mean step_seconds?"),
        ("latency_us: 1", "unknown key latency_us; did you mean network.latency_us?"),
        ("workers: [{cout: 2}]", "unknown key workers[0].cout; did you mean workers[0].count?"),
        ("workers: 4", "workers: must be a list, not 4"),
        ("workers: [4]", "workers[0]: must be a mapping, not 4"),
        ("workers: []", "workers=[]: must not be empty; give groups such as [{count: 2}]"),
        ("workers: [{count: 0}]", "workers[0].count=0: must be at least 1"),
        ("workers: [{count: two}]", "count: Value 'two' of type 'str' could not be converted to Integer"),
        ("workers: [{speed: 0}]", "workers: speeds[0]=0.0 is not positive and finite"),
        ("workers: [{jitter: -1}]", "workers[0].jitter=-1.0: must not be negative"),
        ("network: null", "network: must be a mapping, not None"),
        ("network: {topology: rnig}", "network.topology=rnig: unknown value; did you mean ring?"),
        ("network: {bandwidth_gbit: 0}", "network.bandwidth_gbit=0.0: must be positive"),
        ("network: {latency_us: .nan}", "network.latency_us=nan: must not be negative"),
        ("network: {inner: {bandwith_gbit: 1}}", "unknown key network.inner.bandwith_gbit; did you mean"),
        ("network: {inner: {bandwidth_gbit: -1}}", "network.inner.bandwidth_gbit=-1.0: must be positive"),
        ("network: {inner: {latency_us: -1}}", "network.inner.latency_us=-1.0: must not be negative"),
        ("network: {allreduce: [[1, 2]]}", "network.allreduce=[[1.0, 2.0]]: must have at least two"),
        ("network: {allreduce: [[1, 2], [2]]}", "network.allreduce[1]=[2.0]: must be [bytes, seconds], both positive"),
        ("network: {allreduce: [[2, 1], [2, 2]]}", "network.allreduce[1]=[2.0, 2.0]: must have more bytes than"),
        ("network: {allreduce: [[1, 2], [2, 1]]}", "network.allreduce[1]=[2.0, 1.0]: must not be faster than"),
        ("network: {allreduce_workers: 3}", "network.allreduce_workers=3: requires network.allreduce"),
        ("step_seconds: 0", "step_seconds=0.0: must be positive"),
        ("fixed_seconds: 9", "fixed_seconds=9.0: must be at most step_seconds=0.1, which includes it"),
        ("stragglers: {probability: 2}", "stragglers.probability=2.0: must be in [0, 1]"),
        ("stragglers: {factor: 0.5}", "stragglers.factor=0.5: must be finite and at least 1"),
        ("interference: 1", "interference=1.0: must be in [0, 1): a share of the worker, 0.1 for 10%"),
        ("gradient_overlap: 50", "gradient_overlap=50.0: must be in [0, 1]: a share of the all-reduce"),
        ("payload_bytes: 0", "payload_bytes=0: must be at least 1"),
        ("- 1", "must be a mapping, not a list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}: {said}")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    save_cluster(Cluster(), tmp_path / "office.yaml")
    with pytest.raises(ConfigError, match=r"offce\.yaml: no such file; did you mean .*office\.yaml\?"):
        load_cluster(tmp_path / "offce.yaml")


# ----------------------------------------------------------------------------------------------- the files that come along


def test_there_is_a_file_for_every_cluster_of_the_documentation() -> None:
    names = {path.stem for path in FILES}
    assert {
        "paper",
        "paper_heterogeneous",
        "node_8gpu",
        "office_10gbe",
        "office_1gbe",
        "mixed_16",
        "wide_area_1024",
    } <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_number_is_cited_or_an_assumption(path: Path) -> None:
    """Never an assumption passed off as measured: every line with a number says where it is from."""
    cluster = load_cluster(path)
    validate(cluster)
    assert cluster.name == path.stem
    assert cluster.description
    for line in path.read_text().splitlines():
        key, _, rest = line.partition(":")
        value, _, comment = rest.partition("#")
        is_text = key.lstrip(" -").startswith(("#", "name", "description"))
        if not is_text and any(character.isdigit() for character in value):
            assert any(word in comment for word in ("assumption", "paper", "fitted")), line


def test_a_table_of_one_worker_must_say_how_many_it_is_of() -> None:
    table = Network(allreduce=[[1.0, 0.1], [1e9, 0.2]])
    with pytest.raises(ConfigError, match="must give the number of workers in the table"):
        validate(Cluster(workers=[WorkerGroup(count=1)], network=table))
    validate(Cluster(workers=[WorkerGroup(count=1)], network=replace(table, allreduce_workers=2)))


def test_a_name_that_is_no_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="name=a/b: must not contain a slash"):
        validate(Cluster(name="a/b"))
