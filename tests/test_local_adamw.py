"""AdamW and Muon with local steps: bounded updates after a merge, decay that is decoupled, matrices apart from the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, CoCoDSGD, LocalSGD, attach
from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.simulator.lockstep import Lockstep
from cocod_accel.tasks import build_model, build_optimizer, build_task
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.test_learning import Own, together
from tests.workers import run_workers

RATE, DECAY = 0.01, 0.1
POLICIES = [(name, policy) for name in ("local", "cocod") for policy in ALGORITHMS[name].optimizer_policies]
has_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="requires torch 2.9")


@pytest.mark.parametrize(("name", "policy"), POLICIES)
def test_a_step_after_a_merge_is_no_larger_than_a_first_one(name: str, policy: str) -> None:
    """Of a new AdamW the first step is the rate, whatever the gradient; without bias correction it would be 3 times that."""
    kind: Any = ALGORITHMS[name]
    _, own = together([kind(3, optimizer_state=policy) for _ in range(2)], [2.0, 3.0], [12, 12], optimizer="adamw")
    for trace in own.traces:
        for step in (3, 6, 9):  # the first of a round; rows are of after the merge
            for before, after in zip(trace[step - 1], trace[step], strict=True):
                update = (after - before * (1 - RATE * DECAY)).abs() / RATE
                most = 1.0 if policy == "reset" else (1 - 0.9) / (1 - 0.999) ** 0.5  # Adam's own bound
                assert update.max() <= most + 1e-9
                if policy == "reset":
                    assert update.min() > 0.999


class Still(Own):
    """Gradients that are zero: what moves is decay."""

    def compute(self, rank: int) -> None:
        super().compute(rank)
        for parameter in self.models[rank].parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()


@pytest.mark.parametrize(("name", "policy"), POLICIES)
def test_decay_is_decoupled_from_merges_and_from_state(name: str, policy: str) -> None:
    models = [loops.make_model() for _ in range(2)]
    kind: Any = ALGORITHMS[name]
    optimizers = [loops.OPTIMIZERS["adamw"](model) for model in models]
    lockstep = Lockstep(models, optimizers, [kind(3, optimizer_state=policy) for _ in models], [2.0, 3.0])
    own = Still(models)
    while own.steps != [12, 12]:
        lockstep.advance(own, [12, 12])
    lockstep.finish()
    for model in models:
        for ours, start in zip(loops.snapshot(model), loops.snapshot(loops.make_model()), strict=True):
            torch.testing.assert_close(ours, start * (1 - RATE * DECAY) ** 12, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------------------ Muon


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's Muon on the hidden matrix and AdamW on all else, by hand."""
    module: Any = model.module if isinstance(model, DistributedDataParallel) else model
    hidden = module[0].weight
    rest = [parameter for parameter in module.parameters() if parameter is not hidden]
    muon = torch.optim.Muon([hidden], lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=RATE, weight_decay=DECAY)]


def config_of(*more: str) -> Any:
    options = [f"optimizer.learning_rate={RATE}", f"optimizer.weight_decay={DECAY}", "optimizer.name=muon"]
    return load_config(["task.name=synthetic", "model.name=mlp", *options, *more])


class Both(torch.optim.Optimizer):
    """The two, one after the other, for the serial reference."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = two(model)
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def train_muon(rank: int) -> list[Any]:
    found = []
    for algorithm in (CoCoDSGD(3), LocalSGD(3)):
        for as_one in (False, True):
            model = DistributedDataParallel(loops.make_model())
            optimizers = [build_optimizer(config_of(), model.module)] if as_one else two(model)
            attach(model, optimizers, algorithm, weight=[2.0, 3.0][rank])
            trace = []
            for step in range(11):
                model.zero_grad()
                loops.loss_of(model, *loops.make_batch(rank, step)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                trace.append(loops.snapshot(model))
            found.append(trace)
    return found


@has_muon
def test_muon_for_matrices_equals_the_serial_reference() -> None:
    """As a list of torch's own, and as the trainer builds it. Muon computes in bfloat16, the same on both sides."""
    results = run_workers(2, train_muon)
    batches = [[loops.make_batch(i, t) for t in range(11)] for i in range(2)]
    for index, name in enumerate(("cocod", "cocod", "local", "local")):
        expected = reference.run(name, loops.make_model(), Both, batches, loops.loss_of, [2.0, 3.0], [3, 3])
        assert_traces_equal([worker[index] for worker in results], expected, f"{name} {index}")


@has_muon
def test_which_parameters_are_matrices_of_hidden_layers(tmp_path: Any) -> None:
    (tmp_path / "a.txt").write_text("abc" * 40)
    (tmp_path / "b.txt").write_text("abd" * 40)
    text = f"task.args={{files: {tmp_path}, length: 8, held_out: 2}}"
    gpt = ["task.name=text", text, "model.name=gpt", "model.args={layers: 2, width: 16, heads: 2}"]
    config = config_of(*gpt)
    model = build_model(config, build_task(config))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, others = ({names[id(p)] for p in group["params"]} for group in build_optimizer(config, model).param_groups)
    kinds = ("attention", "projection", "wide", "narrow")
    assert matrices == {f"blocks.{i}.{kind}.weight" for i in range(2) for kind in kinds}
    assert {"tokens.weight", "positions.weight", "head.weight"} < others
    assert matrices | others == set(names.values())


@has_muon
def test_its_state_is_saved_and_loaded_as_that_of_one_optimizer() -> None:
    model = loops.make_model()
    twin = copy.deepcopy(model)
    optimizer = build_optimizer(config_of(), model)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
        for step in which:
            model.zero_grad()
            loops.loss_of(model, *loops.make_batch(0, step)).backward()
            optimizer.step()

    steps(model, optimizer, range(3))
    twin.load_state_dict(model.state_dict())
    loaded = build_optimizer(config_of(), twin)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in (*optimizer.param_groups, *loaded.param_groups):  # as the trainer does in every step
        group["lr"] = 0.02
    steps(model, optimizer, range(3, 6))
    steps(twin, loaded, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    loaded.state.clear()  # optimizer_state="reset"
    steps(twin, loaded, range(6, 7))
    assert {float(entry["step"]) for entry in loaded.state.values() if "step" in entry} == {1.0}


def test_a_torch_without_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ConfigError, match=r"optimizer.name=muon: requires torch 2.9, this is .*; use adamw"):
        config_of()


@has_muon
def test_what_muon_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.optimizer_state=average: is not supported with optimizer.name=muon"):
        config_of("algorithm.name=local", "algorithm.optimizer_state=average")
    with pytest.raises(ConfigError, match="the model has no matrix in a hidden layer; use adamw"):
        build_optimizer(config_of(), nn.Sequential(nn.Linear(3, 2)))
