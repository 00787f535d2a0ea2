"""``cluster.shard``: runs from YAML whose nodes share a model, and what is simulated of them."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.report import read_summary
from cocod_accel.simulator.cluster import load_cluster
from cocod_accel.simulator.payloads import parcels_of
from cocod_accel.tasks import task_facts
from cocod_accel.trainer.work import Work
from tests.test_faults import end, start, workers_of
from tests.test_trainer import ROOT, TINY, command

FOUR = [*TINY, "cluster.num_workers=4", "cluster.workers_per_replica=2", "logging.trackers=[]", "evaluation.batch_size=32"]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def trained(tmp_path: Path, name: str, *more: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    done = command("cocod", "train", "configs/quickstart.yaml", *FOUR, f"output={tmp_path}", f"name={name}", *more)
    assert done.returncode == 0, done.stderr
    return read_summary(tmp_path / name), load_file(tmp_path / name / "model.safetensors")


@pytest.mark.parametrize("shard", ["fsdp", *(pytest.param(f"zero{stage}", marks=pytest.mark.slow) for stage in (1, 2, 3))])
@pytest.mark.timeout(200)
def test_a_sharded_run_ends_where_one_with_whole_models_does(shard: str, tmp_path: Path) -> None:
    if shard != "fsdp" and not HAS_DEEPSPEED:
        pytest.skip("deepspeed is not installed")
    plain, expected = trained(tmp_path, "whole")
    summary, model = trained(tmp_path, "sharded", f"cluster.shard={shard}")
    assert (summary["steps"], summary["rounds"]) == (plain["steps"], plain["rounds"])
    assert summary["final_accuracy"] == plain["final_accuracy"]
    assert summary["comm_bytes"] == pytest.approx(plain["comm_bytes"], rel=0.01)
    assert model.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(model[name], value, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["fsdp", "zero3"])
@pytest.mark.timeout(300)
def test_a_sharded_run_is_killed_and_goes_on_bit_for_bit(shard: str, tmp_path: Path) -> None:
    options = [*FOUR, f"cluster.shard={shard}", "checkpoint.every_steps=5", "schedule.epochs=4"]
    done = command("cocod", "train", "configs/quickstart.yaml", *options, f"output={tmp_path}", "name=whole")
    assert done.returncode == 0, done.stderr
    process = start(tmp_path, *options)
    try:
        deadline = time.monotonic() + 90
        while not list((tmp_path / "run" / "checkpoints").glob("step_*1?")):
            assert time.monotonic() < deadline, "no checkpoint was written"
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(workers_of(tmp_path)[1], signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        end(process, tmp_path)
    process = start(tmp_path, *options)
    try:
        _, err = process.communicate(timeout=100)
    finally:
        end(process, tmp_path)
    assert process.returncode == 0, err
    expected, found = read_summary(tmp_path / "whole"), read_summary(tmp_path / "run")
    for key in ("model_digest", "final_accuracy", "steps", "rounds", "comm_bytes"):
        assert found[key] == expected[key], key


BAD = [
    (["cluster.workers_per_replica=1"], "shares a model between the workers of a node"),
    (["cluster.speeds=measure"], "models are not measured on one worker"),
    (["algorithm.payload=auto"], "requires a payload and a delay that are stated"),
    (["algorithm.name=local", "algorithm.optimizer_state=average"], "is not averaged of sharded models"),
    (["cluster.proportional=true", "cluster.speeds=[1,2,1,2]"], "requires equal batches"),
    (
        ["cluster.proportional=true", "cluster.speeds=[1,1,2,2]", "cluster.replan_epochs=1"],
        "is not supported with cluster.shard",
    ),
    (["algorithm.name=ssgd", "algorithm.period=1"], "is not supported by ssgd, which sums all gradients"),
    (["cluster.shard=fsdp2"], "fsdp"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[" ".join(settings) for settings, _ in BAD])
def test_what_cannot_be_sharded_is_one_line(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([str(ROOT / "configs/quickstart.yaml"), *FOUR, "cluster.shard=fsdp", *settings])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_simulation_knows_that_a_worker_sends_its_shard_and_gathers_nothing() -> None:
    profile = str(ROOT / "configs/sharded_4x4.yaml")
    cluster = load_cluster(ROOT / "configs/cluster/paper.yaml").resized(16)
    found = {}
    for shard in ("null", "fsdp", "zero1"):
        config = load_config([profile, f"cluster.shard={shard}", "schedule.epochs=6"])
        found[shard] = _parcels(config, cluster)
    flat = _parcels(load_config([profile, "cluster.shard=null", "cluster.workers_per_replica=1"]), cluster)
    whole, fsdp, zero1 = found["null"], found["fsdp"], found["zero1"]
    assert fsdp.parts[0].sent_bytes == whole.parts[0].sent_bytes < flat.parts[0].sent_bytes / 4
    assert fsdp.parts[0].seconds < whole.parts[0].seconds
    assert zero1.inside_seconds == whole.inside_seconds
    assert fsdp.inside_seconds == pytest.approx(1.5 * whole.inside_seconds)


def _parcels(config: Any, cluster: Any) -> Any:
    facts = task_facts(config)
    return parcels_of(config, cluster, Work.of(config, facts.num_train, 0).algorithm, facts)
