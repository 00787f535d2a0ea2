"""DeepSpeed engines that share a model out over a node (ZeRO 1 to 3), with algorithms between nodes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cocod_accel import (
    SSGD,
    AsynLocalSGD,
    Checkpoints,
    CoCoDSGD,
    LocalSGD,
    PipeSGD,
    attach,
    export_model,
    node_mpu,
)
from cocod_accel.sync.deepspeed import prepare_for_cpu
from tests import loops, reference
from tests.test_fsdp import check_turns, collectives_in_turns
from tests.workers import run_outcomes, run_workers

# Not imported here: that changes the environment and prints.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

ROUNDS, WEIGHTS = 12, [1.0, 3.0]


@dataclass(frozen=True)
class Case:
    stage: int
    algorithm: str = "cocod"
    period: int = 3
    bf16: bool = False
    accumulated: int = 1
    clipping: float = 0.0
    offload: bool = False
    #: Stage 3 keeps parameters of at most so many elements whole.
    whole_below: int = 100_000
    num_nodes: int = 2
    settings: tuple[tuple[str, Any], ...] = ()

    def steps(self, node: int) -> int:
        return ROUNDS * self.period_of(node)

    def period_of(self, node: int) -> int:
        return self.period + node if self.algorithm == "asynlocal" else self.period

    def weight(self, node: int) -> float:
        return 1.0 if self.algorithm == "asynlocal" else WEIGHTS[node]

    def make(self, node: int) -> Any:
        kinds: dict[str, Any] = {"cocod": CoCoDSGD, "local": LocalSGD, "asynlocal": AsynLocalSGD}
        return kinds[self.algorithm](self.period_of(node))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float16 if "fp16" in dict(self.settings) else torch.float32

    @property
    def configuration(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": False}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = self.whole_below
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        return {
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": self.accumulated,
            "zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": self.clipping, "steps_per_print": None, "bf16": {"enabled": self.bf16},
            **dict(self.settings),
        }  # fmt: skip


CASES = {
    "zero1 cocod": Case(1),
    "zero1 local": Case(1, "local"),
    "zero1 asynlocal": Case(1, "asynlocal", period=2),
    "zero2 cocod": Case(2),
    "zero2 cocod, accumulation and clipping": Case(2, accumulated=2, clipping=0.05),
    "zero2 local": Case(2, "local"),
    "zero2 asynlocal": Case(2, "asynlocal", period=2),
    "zero2 offloaded": Case(2, offload=True),
    "zero3 cocod": Case(3),
    "zero3 cocod, nothing kept whole": Case(3, whole_below=0),
    "zero3 local": Case(3, "local", clipping=0.05),
    "zero3 asynlocal": Case(3, "asynlocal", period=2),
    "zero3 offloaded": Case(3, offload=True),
}
#: float32 accumulation of gradients at stage 1 makes an optimizer of another class.
BF16 = {
    **{f"zero{stage} bf16": Case(stage, period=1, bf16=True) for stage in (1, 2, 3)},
    "zero1 bf16 accumulated in float32": Case(
        1, period=1, bf16=True, settings=(("data_types", {"grad_accum_dtype": "fp32"}),)
    ),
}


#: This CPU has kernels for float16, but DeepSpeed says no: its check is patched. The first node overflows at step 4.
FP16 = {
    f"zero{stage} fp16": Case(stage, settings=(("fp16", {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}),))
    for stage in (1, 2, 3)
}
OVERFLOW = 4


def start(rank: int, num_workers: int) -> Any:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_SIZE=str(num_workers), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    prepare_for_cpu()
    import deepspeed

    engine: Any = deepspeed
    engine.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


class _Clipped(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


def make_optimizer(case: Case, model: nn.Module, *, clips: bool = False) -> torch.optim.Optimizer:
    # AdamW turns the rounding of a small gradient into a step of another sign.
    if case.dtype != torch.float32:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return (_Clipped if clips else torch.optim.AdamW)(model.parameters(), lr=1e-2)


def make_engine(deepspeed: Any, mpu: Any, case: Case) -> Any:
    model = loops.make_model(torch.float32)
    optimizer = make_optimizer(case, model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=case.configuration, mpu=mpu, dist_init_required=False
    )
    return engine


def kept(engine: Any) -> list[Tensor]:
    """The node's float32 parameters; collective inside the node."""
    import deepspeed.utils

    tools: Any = deepspeed.utils
    return [tools.safe_get_full_fp32_param(p).detach().clone() for p in engine.module.parameters()]


def used(deepspeed: Any, engine: Any) -> list[Tensor]:
    """What the next forward computes with."""
    parameters = list(engine.module.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return [p.detach().clone() for p in parameters]
    with deepspeed.zero.GatheredParameters(parameters):
        return [p.detach().clone() for p in parameters]


def agree(deepspeed: Any, engine: Any) -> list[Tensor]:
    values = kept(engine)
    for value, other in zip(values, used(deepspeed, engine), strict=True):
        assert torch.equal(value.to(other.dtype), other), "the engine computes with stale parameters"
    return values


def train(deepspeed: Any, rank: int, mpu: Any, case: Case) -> Any:
    node = rank // 2
    engine = make_engine(deepspeed, mpu, case)
    sync = attach(engine, engine.optimizer, case.make(node), weight=case.weight(node), inner=mpu)
    trace = []
    for step in range(case.steps(node)):
        for part in range(case.accumulated):
            x, y = loops.make_batch(rank, step * case.accumulated + part, dtype=case.dtype)
            loss = torch.nn.functional.mse_loss(engine(x).float(), y.float())
            if case.dtype == torch.float16 and step == OVERFLOW and rank == 0:
                loss = loss * float("inf")
            engine.backward(loss)
            engine.step()
        trace.append(agree(deepspeed, engine))
        if step == 4 and case.algorithm != "asynlocal":  # in the middle of a round
            before = [p.clone() for p in sync.subject.trainable]
            with sync.averaged():
                mean = agree(deepspeed, engine)
                with torch.no_grad():
                    engine(x)
            assert all(torch.equal(a, b) for a, b in zip(before, sync.subject.trainable, strict=True))
            trace[-1] = [*agree(deepspeed, engine), *mean]
    rounds = sync.stats().rounds
    sync.finish()
    final = agree(deepspeed, engine)
    sync.detach()
    return trace, final, rounds


def train_all(rank: int, cases: dict[str, Case]) -> Any:
    deepspeed = start(rank, 4)
    import deepspeed.accelerator as accelerators

    devices: Any = accelerators
    type(devices.get_accelerator()).is_fp16_supported = lambda self: True
    mpu = node_mpu(2)
    found = {name: train(deepspeed, rank, mpu, case) for name, case in cases.items()}
    for stage in (1, 2, 3):
        engine = make_engine(deepspeed, mpu, Case(stage))
        for algorithm in (SSGD(), PipeSGD()):
            with pytest.raises(ValueError, match="reduces gradients over all workers") as caught:
                attach(engine, engine.optimizer, algorithm, inner=mpu)
            found[f"zero{stage} {algorithm.name}"] = str(caught.value)
    return found


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_workers(4, train_all, {**CASES, **BF16, **FP16}, seconds=150, fresh=True)


def node_loss(model: nn.Module, xs: Any, ys: Any) -> Tensor:
    return sum((loops.loss_of(model, x, y) / len(xs) for x, y in zip(xs, ys, strict=True)), torch.zeros(()))


def serial(case: Case) -> reference.Trace:
    """The reference sees each node as one worker, in float64; a 16-bit engine begins with what it has rounded."""
    dtype = case.dtype
    batches: Any = []
    for node in range(2):
        rows = []
        for step in range(case.steps(node)):
            parts = [
                loops.make_batch(rank, step * case.accumulated + part, dtype=dtype)
                for rank in (2 * node, 2 * node + 1)
                for part in range(case.accumulated)
            ]
            rows.append(([x.double() for x, _ in parts], [y.double() for _, y in parts]))
        batches.append(rows)
    return reference.run(
        case.algorithm, loops.make_model(torch.float32).to(dtype).double(),
        lambda m: make_optimizer(case, m, clips=case.clipping > 0), batches, node_loss,
        [case.weight(node) for node in range(2)], [case.period_of(node) for node in range(2)],
        [{OVERFLOW} if dtype == torch.float16 and node == 0 else set() for node in range(2)],
    )  # fmt: skip


@pytest.mark.parametrize("name", [*(f"zero{stage} {name}" for stage in (1, 2, 3) for name in ("ssgd", "pipe")), *CASES])
@pytest.mark.timeout(200)
def test_engines_equal_the_serial_reference(name: str) -> None:
    if name not in CASES:
        assert all("its node; use CoCoDSGD" in worker[name] and "\n" not in worker[name] for worker in results())
        return
    case, expected = CASES[name], serial(CASES[name])
    for rank, worker in enumerate(results()):
        trace, final, rounds = worker[name]
        assert rounds == ROUNDS
        for row, wanted in zip(trace, expected[rank // 2], strict=True):
            for ours, theirs in zip(row, wanted, strict=False):
                torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-6)
        if case.algorithm != "asynlocal":
            w = reference.shares([case.weight(node) for node in range(2)])
            for ours, one, other in zip(trace[4][4:], expected[0][4], expected[1][4], strict=True):
                torch.testing.assert_close(ours.double(), w[0] * one + w[1] * other, rtol=0, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(final, results()[0][name][1], strict=True))


@pytest.mark.parametrize("name", [*BF16, *FP16])
@pytest.mark.timeout(200)
def test_16_bit_engines_equal_the_reference_up_to_rounding(name: str) -> None:
    """With float16, a node that overflows skips its step alone, and rounds count it all the same."""
    case = {**BF16, **FP16}[name]
    begin = [p.detach().double() for p in loops.make_model(case.dtype).parameters()]
    expected = serial(case)
    for rank, worker in enumerate(results()):
        trace, final, rounds = worker[name]
        assert rounds == ROUNDS
        for row, wanted in zip(trace, expected[rank // 2], strict=True):
            for ours, theirs, first in zip(row, wanted, begin, strict=False):
                assert ours.dtype == torch.float32
                assert (ours.double() - theirs).norm() <= 0.02 * (theirs - first).norm()
        assert all(torch.equal(a, b) for a, b in zip(final, results()[0][name][1], strict=True))


def one_node(rank: int) -> Any:
    """Twice the same training: alone, and as the only node."""
    deepspeed = start(rank, 2)
    mpu = node_mpu(2)
    found: list[Any] = []
    for stage in (1, 2, 3):
        for algorithm in (None, CoCoDSGD(2), LocalSGD(2)):
            case = Case(stage, bf16=True)
            engine = make_engine(deepspeed, mpu, case)
            sync = None if algorithm is None else attach(engine, engine.optimizer, algorithm, inner=mpu)
            for step in range(6):
                x, y = loops.make_batch(rank, step, dtype=torch.bfloat16)
                engine.backward(torch.nn.functional.mse_loss(engine(x).float(), y.float()))
                engine.step()
            if sync is not None:
                sync.finish()
                sync.detach()
            found.append([*kept(engine), *used(deepspeed, engine)])
    return found


def test_a_single_node_is_the_engine_alone_bit_for_bit() -> None:
    for found in run_workers(2, one_node, seconds=110, fresh=True):
        for alone, *others in (found[i : i + 3] for i in range(0, 9, 3)):
            for values in others:
                assert all(torch.equal(a, b) for a, b in zip(alone, values, strict=True))


# ----------------------------------------------------------------------------- checkpoints, other nodes, one model file

STAGES = {
    1: Case(1, bf16=True),
    2: Case(2, offload=True),
    3: Case(3, bf16=True),
}


def saved(rank: int, folder: str, num_workers: int, steps: int, dies_at: int | None = None) -> Any:
    deepspeed = start(rank, num_workers)
    mpu = node_mpu(2)
    found: list[Any] = []
    for stage, case in STAGES.items():
        engine = make_engine(deepspeed, mpu, case)
        algorithm = CoCoDSGD(3, payload="int8", fragments=2, delay=2)
        sync = attach(engine, engine.optimizer, algorithm, weight=[1, 3, 2][rank // 2], inner=mpu)
        checkpoints = Checkpoints(f"{folder}/{stage}", sync)
        resumed = checkpoints.resume()
        begin = agree(deepspeed, engine)
        for step in range(0 if resumed is None else resumed.position, steps):
            x, y = loops.make_batch(rank, step, dtype=case.dtype)
            engine.backward(torch.nn.functional.mse_loss(engine(x).float(), y.float()))
            engine.step()
            if step + 1 == 4:  # in the middle of a round, an average in flight
                checkpoints.save(step + 1)
            if step + 1 == dies_at and rank == 3 and stage == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        stats = sync.stats()
        states = [value.clone() for state in sync.subject.optimizers[0].state.values() for value in state.values()
                  if isinstance(value, Tensor)]  # fmt: skip
        values = [*agree(deepspeed, engine), *states]
        counts = stats.bytes, stats.rounds, engine.global_steps
        found.append((None if resumed is None else resumed.is_exact, begin, values, counts))
        if dies_at is None and resumed is not None:
            sync.finish()
            export_model(sync, f"{folder}/{stage}.safetensors")
            found[-1] = (*found[-1], kept(engine))
        sync.detach()
    return found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_killed_engines_go_on_bit_for_bit(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole = run_workers(4, saved, str(tmp_path / "whole"), 4, 11, seconds=60, fresh=True)
    killed = run_outcomes(4, saved, str(tmp_path / "parts"), 4, 11, 7, seconds=60, fresh=True)
    assert killed[3].exit_code == -signal.SIGKILL
    again = run_workers(4, saved, str(tmp_path / "parts"), 4, 11, seconds=60, fresh=True)
    for expected, found in zip(whole, again, strict=True):
        for (_, _, values, counts), (is_exact, _, others, other_counts, final) in zip(expected, found, strict=True):
            assert is_exact is True
            assert counts == other_counts
            assert len(values) == len(others)
            assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))
            del final
    for index, stage in enumerate(STAGES):
        loaded = loops.make_model(torch.float32)
        loaded.load_state_dict(load_file(tmp_path / "parts" / f"{stage}.safetensors"))
        for worker in again:
            assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), worker[index][-1], strict=True))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_engines_on_other_nodes_go_on_from_the_mean(tmp_path: Path) -> None:
    at_save = run_workers(4, saved, str(tmp_path), 4, 4, seconds=60, fresh=True)
    for worker in run_workers(6, saved, str(tmp_path), 6, 6, seconds=100, fresh=True):
        for index, (is_exact, begin, *_) in enumerate(worker):
            assert is_exact is False
            for ours, first, second in zip(begin, at_save[0][index][2], at_save[2][index][2], strict=False):
                torch.testing.assert_close(ours.double(), 0.25 * first.double() + 0.75 * second.double(), rtol=0, atol=1e-7)


# ------------------------------------------------------------------------------------------ what is communicated, and when


def in_turns(rank: int) -> Any:
    """The second node steps inside a round only when the first has taken all but its last step."""
    deepspeed = start(rank, 4)
    mpu, counted = node_mpu(2), []
    for stage, kind in ((1, CoCoDSGD), (2, LocalSGD), (3, CoCoDSGD)):
        engine = make_engine(deepspeed, mpu, Case(stage, clipping=0.05, bf16=stage > 1))
        sync = attach(engine, engine.optimizer, kind(4), inner=mpu)

        def step(number: int, engine: Any = engine, dtype: torch.dtype = Case(stage, bf16=stage > 1).dtype) -> None:
            x, y = loops.make_batch(rank, number, dtype=dtype)
            engine.backward(torch.nn.functional.mse_loss(engine(x).float(), y.float()))
            engine.step()

        counted.append(collectives_in_turns(rank, 4, step, str(stage)))
        sync.finish()
        sync.detach()
    return counted


@pytest.mark.timeout(150)
def test_inside_a_round_engines_meet_only_on_their_node() -> None:
    for rank, stages in enumerate(run_workers(4, in_turns, seconds=110, fresh=True)):
        for steps in stages:
            check_turns(steps, rank, 4)
