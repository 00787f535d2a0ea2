"""Lightning, Ray, SkyPilot and a Kubernetes schema, the real packages: ``make test-integrations``. Skipped where absent."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import loops
from tests.test_launch import PODS, launch
from tests.test_loops import free_port
from tests.workers import run_outcomes, run_workers

ROOT = Path(__file__).parents[1]
STEPS = 12


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


# ------------------------------------------------------------------------------------------------- Lightning


def as_launched(rank: int, port: int) -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")


def classifier(fails_at: int | None = None) -> Any:
    """On the batches of tests/loops.py, so that the serial reference can be asked."""
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.network = loops.make_model()

        def training_step(self, batch: Any, index: int) -> Any:
            if self.global_rank == 1 and index == fails_at:
                raise KeyError("power")
            rank, step = self.global_rank, int(batch)
            return loops.loss_of(self.network, *loops.make_batch(rank, step))

        def validation_step(self, batch: Any, index: int) -> None:
            self.seen = loops.snapshot(self.network)

        def configure_optimizers(self) -> Any:
            return loops.OPTIMIZERS["momentum"](self)

    return Classifier()


def _numbers(count: int) -> Any:
    return range(count)  # what a loader takes, whatever types say


def fit(rank: int, port: int, folder: str, settings: dict[str, Any], own: dict[str, Any]) -> Any:
    """Trained with the callback: the model at the end, what a validation saw, rounds, what was logged."""
    as_launched(rank, port)
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader

    from cocod_accel.lightning import CoCoDCallback

    local: list[Any] = []

    class Look(Callback):  # type: ignore[misc, unused-ignore]
        def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
            local.append(loops.snapshot(module.network))

    callback = CoCoDCallback(period=3)
    logger = CSVLogger(folder)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, logger=logger, log_every_n_steps=4,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback, Look()], use_distributed_sampler=False,
        default_root_dir=folder, num_sanity_val_steps=0, **settings,
    )  # fmt: skip
    module, steps = classifier(**own), DataLoader(_numbers(STEPS), batch_size=1)
    trainer.fit(module, steps, DataLoader(_numbers(1), batch_size=1))
    assert callback.sync is not None
    table = Path(logger.log_dir, "metrics.csv")
    logged = table.read_text().splitlines()[0].split(",") if rank == 0 else []
    path = trainer.checkpoint_callback.best_model_path if trainer.checkpoint_callback else ""
    torch.distributed.barrier()  # the first worker writes it
    saved = torch.load(path, weights_only=False)
    return loops.snapshot(module.network), module.seen, local, callback.sync.stats().rounds, logged, saved


@needs("lightning")
def test_a_lightning_trainer_takes_the_steps_of_the_reference(tmp_path: Path) -> None:
    from tests import reference
    from tests.test_exactness import assert_traces_equal

    results = run_workers(2, fit, free_port(), str(tmp_path), {"val_check_interval": 7}, {}, seconds=110, fresh=True)
    batches = [[loops.make_batch(rank, step) for step in range(STEPS)] for rank in range(2)]
    expected = reference.run(
        "cocod", loops.make_model(), loops.OPTIMIZERS["momentum"], batches, loops.loss_of, [1, 1], [3, 3]
    )
    assert_traces_equal([result[2] for result in results], expected, "Lightning, validated after 7 steps")
    assert {"comm_exposed_seconds", "comm_hidden_seconds", "drift", "rounds"} <= set(results[0][4])
    for final, seen, _, rounds, _, saved in results:
        assert rounds == 4
        for mine, theirs, value in zip(results[0][2][6], results[1][2][6], seen, strict=True):
            torch.testing.assert_close(value, (mine + theirs) / 2)
        assert all(torch.equal(a, b) for a, b in zip(final, results[0][0], strict=True))
        names = [name for name, _ in loops.make_model().named_parameters()]
        last = saved["global_step"] - 1
        for name, mine, theirs in zip(names, results[0][2][last], results[1][2][last], strict=True):
            torch.testing.assert_close(saved["state_dict"][f"network.{name}"], (mine + theirs) / 2)
            assert not torch.equal(mine, theirs)


@needs("lightning")
def test_a_worker_of_a_lightning_trainer_that_fails_waits_for_nobody(tmp_path: Path) -> None:
    outcomes = run_outcomes(2, fit, free_port(), str(tmp_path), {}, {"fails_at": 5}, seconds=110, fresh=True)
    assert outcomes[1].error is not None
    assert outcomes[1].error[0] == "KeyError"


def mistakes(rank: int) -> list[str]:
    from cocod_accel import LocalSGD
    from cocod_accel.lightning import CoCoDCallback

    said = []
    for given in ({}, {"period": 3, "algorithm": LocalSGD(3)}, {"period": 0}):
        try:
            CoCoDCallback(**given)
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


@needs("lightning")
def test_mistakes_with_lightning_are_one_line() -> None:
    (said,) = run_workers(1, mistakes, seconds=110)
    assert said[0] == said[1] == "pass either period=5, for CoCoDSGD, or algorithm="
    assert said[2].startswith("period=0: a period must be at least 1")


# ------------------------------------------------------------------------------------------------- Ray Train


@needs("ray")
@pytest.mark.timeout(400)
def test_a_local_ray_trains_two_workers(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    line = [sys.executable, "-m", "examples.loops.ray_train", str(tmp_path / "results")]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = set(re.findall(r"rank (\d): (\d+) rounds, model ([\d.]+)", done.stdout + done.stderr))
    assert {(rank, rounds) for rank, rounds, _ in found} == {("0", "8"), ("1", "8")}
    assert len({model for _, _, model in found}) == 1


# ------------------------------------------------------------------------------------------------- launch/


@needs("sky")
def test_skypilot_reads_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # it keeps a folder there
    code = """
import sky
task = sky.Task.from_yaml("launch/skypilot.yaml")
(resources,) = task.resources
print(task.num_nodes, resources.use_spot, resources.accelerators, task.run)
"""
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 True {'L4': 8} export NNODES=")


def test_what_skypilot_would_run_is_a_torchrun_line() -> None:
    """With the variables that it sets."""
    from omegaconf import OmegaConf

    task: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "launch" / "skypilot.yaml"), resolve=False)
    known = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "DRY_RUN": "1", **task["envs"]}
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
           "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", task["run"]], cwd=ROOT, env={**known, **sky}, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:9] == shlex.split("torchrun --nnodes 2 --node_rank 1 --nproc_per_node 8 --master_addr 10.0.0.1")
    assert words[-2:] == ["name=cocod", "output=/runs"]


@needs("kubernetes_validate")
def test_the_manifests_fit_the_schema_of_their_kinds() -> None:
    import kubernetes_validate
    import yaml

    arguments = ["configs/quickstart.yaml", "algorithm.period=[[0, 1], [1, 5]]", 'name=a "b" \\c & d']
    done = launch("kubernetes/submit.sh", *arguments, DRY_RUN="1", **PODS)
    documents = list(yaml.safe_load_all(done.stdout))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, "1.34", strict=True)
    documents[1]["spec"]["template"]["spec"]["containers"][0]["argz"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[1], "1.34", strict=True)
