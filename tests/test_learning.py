"""N workers in one process learn what N real processes learn."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from cocod_accel import ALGORITHMS, CoCoDSGD, LocalSGD, train
from cocod_accel.algorithms import Algorithm
from cocod_accel.comm.handles import Exchange, ring_bytes
from cocod_accel.comm.in_process import InProcessGroup
from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.simulator.learning import Learning
from cocod_accel.simulator.lockstep import Lockstep
from cocod_accel.tasks.data import Images
from cocod_accel.trainer.steps import NonFiniteLossError
from tests import loops
from tests.workers import run_workers

ROOT = Path(__file__).parents[1]
#: The embedded default, with fewer samples and epochs; 10 steps an epoch, so that an epoch ends inside a round.
DEFAULT = [
    str(ROOT / "configs/quickstart.yaml"), "task.train_limit=640", "task.test_limit=150", "schedule.epochs=2",
    "schedule.decay_epochs=[1]", "schedule.warmup_epochs=0.5", "algorithm.period=[[0, 1], [1, 4]]", "logging.every_steps=3",
    "logging.trackers=[]", "evaluation.batch_size=40",
]  # fmt: skip
#: All that draws random numbers or keeps statistics, and is quick.
TINY = [
    *DEFAULT, "task.name=synthetic", "task.args={num_train: 200, num_test: 41, size: 8}",
    "model.name=tests.own_code:with_dropout_and_batch_norm", "batch_size=6",
]  # fmt: skip
#: A user's own data, which goes through a loader.
OWN = [
    *DEFAULT, "task.name=tests.own_code:make_noisy_data", "model.name=tests.own_code:Forgetful", "batch_size=3",
]  # fmt: skip


# ---------------------------------------------------------------------------------- against the real trainer


SAMPLED = ["cluster.speeds=[1, 2]", "cluster.proportional=true"]
RUNS: dict[str, list[str]] = {
    **{name: [*DEFAULT, f"algorithm.name={name}"] for name in ALGORITHMS},
    "augmented": [*DEFAULT, "algorithm.name=cocod", "task.augment=true", "evaluation.training_loss=true"],
    "proportional ssgd": [*TINY, "algorithm.name=ssgd", *SAMPLED, "cluster.shuffle=across"],
    "proportional pipe": [*TINY, "algorithm.name=pipe", *SAMPLED, "optimizer.scale_learning_rate=false"],
    "adam": [*TINY, "algorithm.name=cocod", *SAMPLED, "optimizer.name=adam"],
    "own steps": [*TINY, "algorithm.name=asynlocal", "cluster.speeds=[1, 2]", "algorithm.optimizer_state=average"],
    "reset": [*TINY, "algorithm.name=local", "algorithm.optimizer_state=reset", "evaluation.every_epochs=2"],
    "int8": [*TINY, "algorithm.name=cocod", *SAMPLED, "algorithm.payload=int8"],
    "bf16": [*TINY, "algorithm.name=local", "algorithm.payload=bf16", "precision=bf16"],
    "fragments": [*TINY, "algorithm.name=cocod", "algorithm.fragments=3", "algorithm.period=5"],
    "delay": [*TINY, "algorithm.name=cocod", "algorithm.delay=2", "algorithm.fragments=2", "algorithm.period=5"],
    "delay, reset": [*TINY, "algorithm.name=cocod", "algorithm.delay=1", "algorithm.optimizer_state=reset"],
    "ternary": [*TINY, "algorithm.name=cocod", *SAMPLED, "algorithm.payload=ternary", "algorithm.period=1"],
    "topk": [*TINY, "algorithm.name=cocod", "algorithm.payload=topk:0.05", "algorithm.delay=1"],
    "ssgd, int4": [*TINY, "algorithm.name=ssgd", *SAMPLED, "algorithm.payload=int4"],
    "ssgd, terngrad": [*TINY, "algorithm.name=ssgd", "algorithm.payload=terngrad", "seed=3"],
    "pipe, qsgd": [*TINY, "algorithm.name=pipe", "algorithm.payload=qsgd:4"],
    "steps": [
        *TINY,
        "algorithm.name=cocod",
        "schedule.epochs=null",
        "schedule.steps=23",
        "schedule.decay_epochs=[]",
        "schedule.decay=wsd",
        "schedule.warmup_steps=4",
        "evaluation.every_steps=7",
        "algorithm.period=[[0, 1], [5, 3]]",
        "optimizer.clip_norm=0.5",
        "optimizer.accumulate=4",
    ],
    "steps, ssgd": [
        *TINY,
        "algorithm.name=ssgd",
        "schedule.epochs=null",
        "schedule.steps=21",
        "schedule.decay_epochs=[]",
        "schedule.decay=cosine",
        "optimizer.clip_norm=0.5",
        "optimizer.accumulate=2",
    ],
    "own data": [*OWN, "algorithm.name=cocod", "algorithm.optimizer_state=reset"],
    "own data, ssgd": [*OWN, "algorithm.name=ssgd"],
}
#: Sums of two, inside nodes and between them.
NODES = [
    "cluster.num_workers=4",
    "cluster.workers_per_replica=2",
    "cluster.speeds=[1, 2, 1, 1]",
    "cluster.proportional=true",
]
RUNS_OF_NODES: dict[str, list[str]] = {
    "cocod": [*TINY, *NODES, "algorithm.name=cocod"],
    "local": [*TINY, *NODES, "algorithm.name=local", "algorithm.fragments=2", "algorithm.period=4"],
    "ternary": [*TINY, *NODES, "algorithm.name=cocod", "algorithm.payload=ternary", "algorithm.period=2"],
}


def launched(rank: int, folder: Path, runs: dict[str, list[str]]) -> None:
    """All runs one after the other, each as if it had been launched."""
    world = os.environ["WORLD_SIZE"]
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    for number, (name, arguments) in enumerate(runs.items()):
        if number > 0:  # a run ends with its process group
            AcceleratorState._reset_state(reset_partial_state=True)
            dist.init_process_group("gloo", f"file://{folder}/store_{number}", rank=rank, world_size=int(world))
        assert train.main([*arguments, f"output={folder}", f"name={name}"]) == 0


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, by two real processes."""
    folder = tmp_path_factory.mktemp("real")
    run_workers(2, launched, folder, RUNS, seconds=110, fresh=True)
    return folder


@pytest.fixture(scope="module")
def real_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, by two nodes of two."""
    folder = tmp_path_factory.mktemp("real_nodes")
    run_workers(4, launched, folder, RUNS_OF_NODES, seconds=110, fresh=True)
    return folder


def check_run(run: Path, arguments: Sequence[str]) -> None:
    """The rows, the summary and the model of a real run, to the bit."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] != "plan"]
    expected = [{k: v for k, v in row.items() if "second" not in k} for row in rows]
    learning = Learning(load_config(list(arguments)))
    learnt = list(learning.rows())
    got = [{"kind": row.kind, "step": row.step, **row.values} for row in learnt]
    assert got == expected
    samples = [row["samples_per_second"] * row["train_seconds"] for row in rows if row["kind"] == "train"]
    assert [row.samples for row in learnt if row.kind == "train"] == pytest.approx(samples)
    assert {row["kind"] for row in got} == {"train", "eval"}
    summary, outcome = json.loads((run / "summary.json").read_text()), learning.outcome()
    for key in ("steps", "rounds", "best_accuracy", "final_accuracy", "comm_bytes", "model_digest"):
        assert getattr(outcome, key) == summary[key], key
    assert outcome.samples == pytest.approx(summary["samples_per_second"] * summary["train_seconds"])
    exported, ours = load_file(run / "model.safetensors"), learning.model.state_dict()
    assert exported.keys() == ours.keys()
    assert all(torch.equal(exported[name], ours[name]) for name in ours)


@pytest.mark.parametrize("name", list(RUNS))
def test_two_workers_are_two_processes_to_the_bit(name: str, real: Path) -> None:
    check_run(real / name, RUNS[name])


@pytest.mark.parametrize("name", list(RUNS_OF_NODES))
def test_two_nodes_of_two_are_four_processes_to_the_bit(name: str, real_nodes: Path) -> None:
    check_run(real_nodes / name, RUNS_OF_NODES[name])


def test_the_mean_models_training_loss_is_of_all_training_data_as_they_are() -> None:
    """Neither augmented, nor of a worker's own model; the model at the end is the mean that was looked at last."""
    learning = Learning(load_config(RUNS["augmented"]))
    last = [row.values for row in learning.rows() if row.kind == "eval"][-1]
    images = learning.task.train
    assert isinstance(images, Images)
    with torch.no_grad():
        inputs, labels = images.batch(torch.arange(len(images)), torch.device("cpu"), None)
        loss = nn.functional.cross_entropy(learning.model.eval()(inputs), labels)
    assert last["mean_train_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert last["mean_train_loss"] != pytest.approx(last["train_loss"], rel=1e-2)


def test_nobody_learns_otherwise_for_a_look_at_the_training_loss() -> None:
    """Of a user's own data neither, whose loader draws random numbers."""
    digests = set()
    for look in ("true", "false"):
        learning = Learning(load_config([*RUNS["own data"], f"evaluation.training_loss={look}"]))
        list(learning.rows())
        digests.add(learning.outcome().model_digest)
    assert len(digests) == 1


def test_one_worker_is_one_process_to_the_bit(tmp_path: Path) -> None:
    runs = {"pipe": [*OWN, "algorithm.name=pipe", "cluster.num_workers=1"]}
    run_workers(1, launched, tmp_path, runs, fresh=True)
    check_run(tmp_path / "pipe", runs["pipe"])


# ------------------------------------------------------------------------ against attach, in float64


class Own:
    """The loop of ``tests.loops``, for all workers."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.steps = [0] * len(models)
        self.traces: list[list[list[Tensor]]] = [[] for _ in models]
        self.guarded = 0

    def compute(self, rank: int) -> None:
        loops.loss_of(self.models[rank], *loops.make_batch(rank, self.steps[rank])).backward()
        self.steps[rank] += 1

    def guard(self, rank: int) -> None:
        self.guarded += 1

    def stepped(self, rank: int) -> None:
        self.traces[rank].append(loops.snapshot(self.models[rank]))


def together(
    algorithms: Sequence[Algorithm],
    weights: Sequence[float],
    num_steps: Sequence[int],
    make_model: Callable[[], nn.Module] = loops.make_model,
    optimizer: str = "momentum",
) -> tuple[Lockstep, Own]:
    models = [make_model() for _ in weights]
    lockstep = Lockstep(models, [loops.OPTIMIZERS[optimizer](model) for model in models], algorithms, weights)
    own = Own(models)
    while own.steps != list(num_steps):
        lockstep.advance(own, num_steps)
    return lockstep, own


def variants(num_workers: int) -> list[tuple[str, list[float], list[Any], list[int]]]:
    """(algorithm, weights, period of each worker, steps of each worker)."""
    weights: list[float] = [32.0, 96.0, 16.0, 7.0, 50.0][:num_workers]
    rows: list[tuple[str, list[float], list[Any], list[int]]] = [
        (name, weights, [loops.SCHEDULE] * num_workers, [200] * num_workers) for name in ("ssgd", "pipe", "local", "cocod")
    ]
    own = [4, 5, 2, 3, 1][:num_workers]
    return [*rows, ("asynlocal", [1.0] * num_workers, own, [50 * k for k in own])]


def train_real(rank: int, num_workers: int) -> list[Any]:
    results = []
    for name, weights, periods, num_steps in variants(num_workers):
        ends: list[list[Tensor]] = []

        def finish(sync: Any, model: nn.Module, ends: list[list[Tensor]] = ends) -> None:
            with sync.averaged():
                ends.append(loops.snapshot(model))
            sync.finish()
            ends.append(loops.snapshot(model))

        trace = loops.train(rank, name, "momentum", weights, periods, num_steps, after=finish)
        results.append([*trace[::10], trace[-1], *ends])
    return results


@pytest.mark.parametrize("num_workers", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_three_and_five_workers_agree_with_processes_over_200_steps(num_workers: int) -> None:
    real = run_workers(num_workers, train_real, num_workers)
    for index, (name, weights, periods, num_steps) in enumerate(variants(num_workers)):
        algorithms = [loops.make_algorithm(name, period) for period in periods]
        lockstep, own = together(algorithms, weights, num_steps)
        means: dict[int, list[Tensor]] = {}
        local = [loops.snapshot(model) for model in own.models]
        lockstep.averaged(lambda rank, own=own, means=means: means.update({rank: loops.snapshot(own.models[rank])}))  # type: ignore[misc]
        for model, before in zip(own.models, local, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(loops.snapshot(model), before, strict=True))
        lockstep.finish()
        for rank, model in enumerate(own.models):
            got = [*own.traces[rank][::10], own.traces[rank][-1], means[rank], loops.snapshot(model)]
            assert len(got) == len(real[rank][index])
            for step, (ours, theirs) in enumerate(zip(got, real[rank][index], strict=True)):
                for a, b in zip(ours, theirs, strict=True):
                    error = ((a - b).norm() / b.norm()).item()
                    assert error <= 1e-12, f"{name} N={num_workers}: worker {rank} differs by {error:.1e} at row {step}"


# ------------------------------------------------------------------------------------------- the communicator


@given(
    st.integers(1, 5),
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.randoms(use_true_random=False),
)
def test_sums_belong_together_by_their_order_however_far_one_worker_is_ahead(
    size: int, shapes: list[list[int]], dtype: torch.dtype, order: Any
) -> None:
    """``shapes[n]``: the sizes of the tensors of the n-th sum."""
    group = InProcessGroup(size)
    tensors = [
        [[torch.full((count,), 10.0**n * (rank + 1), dtype=dtype) for count in counts] for n, counts in enumerate(shapes)]
        for rank in range(size)
    ]
    turns = [rank for rank in range(size) for _ in shapes]
    order.shuffle(turns)
    handles: list[list[Any]] = [[] for _ in range(size)]
    for rank in turns:
        number = len(handles[rank])
        handle = group.member(rank).launch(tensors[rank][number])
        handles[rank].append(handle)
        assert handle.num_bytes == ring_bytes(tensors[rank][number], size)
        for row in handles:
            for n, earlier in enumerate(row):
                earlier.poll()
                assert earlier.is_complete == all(len(theirs) > n for theirs in handles)
    for rank in range(size):
        for n in range(len(shapes)):
            handles[rank][n].wait()
            assert handles[rank][n].end.seconds >= handles[rank][n].start.seconds
            expected = torch.zeros((), dtype=dtype)
            for other in range(size):
                expected = expected + torch.tensor(10.0**n * (other + 1), dtype=dtype)
            assert all(bool((tensor == expected).all()) for tensor in tensors[rank][n])


def test_an_exchange_gives_everybody_what_every_owner_made_of_its_row() -> None:
    size = 3
    group = InProcessGroup(size)
    made = []

    def part(rank: int) -> Exchange:
        rows = torch.arange(size, dtype=torch.uint8).add(10 * rank).unsqueeze(1).repeat(1, 2)  # row j: 10 rank + j
        incoming = torch.zeros_like(rows)

        def combine() -> None:
            made.append(rank)
            assert incoming[:, 0].tolist() == [rank, 10 + rank, 20 + rank]
            rows[rank] = 100 + rank

        return Exchange(rows, incoming, combine, rows, rows, rows.numel())

    parts = [part(rank) for rank in range(size)]
    handles = [group.member(rank).exchange([parts[rank]]) for rank in range(size)]
    assert made == [0, 1, 2]
    for handle, own in zip(handles, parts, strict=True):
        handle.wait()
        assert handle.num_bytes == ring_bytes([own.rows], size)
        assert own.rows.tolist() == [[100, 100], [101, 101], [102, 102]]


def test_waiting_for_a_worker_that_has_not_joined_is_an_error_and_not_for_ever() -> None:
    group = InProcessGroup(3)
    handle = group.member(0).launch([torch.ones(2)])
    group.member(2).launch([torch.ones(2)])
    with pytest.raises(RuntimeError, match=r"worker 0 waits for workers \[1\] of its own process"):
        handle.wait()


@pytest.mark.parametrize("other", [[torch.ones(3)], [torch.ones(2).double()], [], [torch.ones(2), torch.ones(2)]])
def test_workers_that_bring_different_things_are_told(other: list[Tensor]) -> None:
    group = InProcessGroup(2)
    group.member(0).launch([torch.ones(2)])
    with pytest.raises(
        RuntimeError, match=r"worker 1 starts a sum of .* where worker 0 has started a sum of \[\(2,\) float32\]"
    ):
        group.member(1).launch(other)
    group = InProcessGroup(2)
    group.member(0).launch([torch.ones(2)])
    with pytest.raises(RuntimeError, match="worker 1 starts an exchange of"):
        group.member(1).exchange([Exchange(torch.ones(2), torch.ones(2), lambda: None, torch.ones(2), torch.ones(2), 8)])


# -------------------------------------------------------------------------------------------------- memory


class Kept:
    """What a graph keeps of a forward for its backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Counted(nn.Module):
    """Whenever a copy computes, counts what all of them keep of their forwards, and what others hold of gradients."""

    copies: ClassVar[list[Counted]] = []
    kept: ClassVar[WeakSet[Kept]] = WeakSet()
    seen: ClassVar[list[tuple[int, int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.inner = loops.make_model()
        self.copies.append(self)

    def forward(self, x: Tensor) -> Tensor:
        others = [parameter for copy in self.copies if copy is not self for parameter in copy.parameters()]
        self.seen.append((len(self.kept), sum(parameter.grad is not None for parameter in others)))

        def keep(tensor: Tensor) -> Kept:
            kept = Kept(tensor)
            self.kept.add(kept)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
            out: Tensor = self.inner(x)
        assert len(self.kept) > 0
        return out


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_one_worker_at_a_time_has_activations_and_gradients(name: str) -> None:
    Counted.copies.clear()
    Counted.seen.clear()
    together([loops.make_algorithm(name, 2)] * 3, [1] * 3, [4] * 3, Counted)
    assert Counted.seen == [(0, 0)] * 12


def test_sixteen_workers_learn() -> None:
    sixteen = ["cluster.num_workers=16", "batch_size=4", "schedule.epochs=4", "optimizer.learning_rate=0.002"]
    config = load_config([*TINY, "task.args={num_train: 640, num_test: 40, size: 8, noise: 0.5}", *sixteen])
    steps = []
    learning = Learning(config, on_step=lambda: steps.append(1))
    rows = list(learning.rows())
    assert len(steps) == learning.num_steps == learning.outcome().steps == 40
    assert [row.step for row in rows if row.kind == "eval"] == [10, 20, 30, 40]
    assert [row.samples for row in rows if row.kind == "eval"] == [640, 1280, 1920, 2560]
    assert rows[-1].values["accuracy"] == learning.outcome().final_accuracy > 0.9
    assert learning.outcome().best_accuracy == max(row.values["accuracy"] for row in rows if row.kind == "eval")


def test_all_workers_begin_with_the_model_of_worker_0() -> None:
    learning = Learning(load_config([*TINY, "model.name=tests.own_code:with_another_start"]))
    first, second = (learner.model.state_dict() for learner in learning._learners)
    assert all(torch.equal(first[name], second[name]) for name in first)


# ----------------------------------------------------------------------------------------- what is left alone


def test_the_callers_random_numbers_and_threads_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    seen = []
    learning = Learning(
        load_config([*TINY, "algorithm.name=ssgd"]), threads=3, on_step=lambda: seen.append(torch.get_num_threads())
    )
    for _ in learning.rows():
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.get_num_threads() == threads
    assert set(seen) == {3}
    assert torch.equal(torch.get_rng_state(), before)


def test_whatever_a_caller_draws_between_rows_changes_nothing() -> None:
    def run(disturbed: bool) -> list[dict[str, Any]]:
        values = []
        for row in Learning(load_config([*TINY, "algorithm.name=cocod"])).rows():
            values.append(dict(row.values))
            if disturbed:
                torch.rand(3)
        return values

    assert run(disturbed=True) == run(disturbed=False)


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["cluster.speeds=measure"], "cluster.speeds=measure: nothing is measured in a simulation; give a list"),
        (
            ["cluster.replan_epochs=1", "cluster.proportional=true", "cluster.speeds=[1, 2]"],
            "cluster.replan_epochs=1: follows measured times; set it to null",
        ),
        (["batch_size=200"], "batch_size=200: 200 training samples are fewer than the 400 that 2 worker"),
        (
            ["algorithm.fragments=9", "algorithm.period=9"],
            "algorithm.name=cocod: fragments=9 is more than the model's 6 trainable parameters",
        ),
        (
            ["model.name=tests.own_code:with_shared_statistics", "algorithm.name=ssgd"],
            "algorithm.name=ssgd: 0 is a SyncBatchNorm",
        ),
        (
            ["model.name=tests.own_code:with_an_idle_parameter", "algorithm.name=ssgd"],
            "algorithm.name=ssgd: parameter idle has no gradient, which DDP also refuses; freeze or use it",
        ),
    ],
)
def test_what_cannot_be_learnt_is_one_line(options: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(Learning(load_config([*TINY, *options])).rows())
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("period", [4, 50])  # found at a round's end, and where an epoch ends inside a round
def test_a_loss_that_is_no_number_names_worker_and_step_and_enters_no_average(period: int) -> None:
    learning = Learning(load_config([*TINY, "algorithm.name=cocod", f"algorithm.period={period}"]))
    compute = learning.compute

    def spoilt(rank: int) -> None:
        compute(rank)
        if rank == 1 and learning._learners[1].step == 6:
            learning._learners[1].unchecked[-1].fill_(float("nan"))

    learning.compute = spoilt  # type: ignore[method-assign]
    kinds: list[str] = []
    with pytest.raises(NonFiniteLossError, match="worker 1: the loss is not finite at step 6; lower the learning rate"):
        kinds.extend(row.kind for row in learning.rows())
    assert "eval" not in kinds
    assert learning._lockstep.workers[0].driver.replica.route.traffic.num_bytes == 0, (
        "the round of the bad loss was launched"
    )


class Unused(nn.Module):
    """Its second layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.unused = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_a_parameter_without_a_gradient_is_refused_where_ddp_refuses_it() -> None:
    for name in ("ssgd", "pipe"):
        with pytest.raises(ValueError, match=r"parameter unused\.weight has no gradient, which DDP also refuses"):
            together([loops.make_algorithm(name, 1)] * 2, [1, 1], [2, 2], Unused)
        together([loops.make_algorithm(name, 1)], [1], [2], Unused)
    together([CoCoDSGD(period=2)] * 2, [1, 1], [5, 5], Unused)


def test_optimizer_states_that_are_not_alike_are_not_averaged() -> None:
    models = [Unused() for _ in range(2)]
    optimizers = [loops.OPTIMIZERS["momentum"](model) for model in models]
    lockstep = Lockstep(models, optimizers, [LocalSGD(period=2, optimizer_state="average")] * 2, [1, 1])
    for parameter in models[1].unused.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[1].step()
    with pytest.raises(RuntimeError, match="workers hold different optimizer states"):
        lockstep.advance(Own(models), [2, 2])


def test_workers_that_cannot_meet_are_told() -> None:
    with pytest.raises(ValueError, match=r"workers \[0\] end a round before step limits \[4, 3\], workers \[1\] do not"):
        together([LocalSGD(period=4)] * 2, [1, 1], [4, 3])


def test_workers_that_begin_or_train_differently_are_told() -> None:
    models = [loops.make_model() for _ in range(2)]
    optimizers = [loops.OPTIMIZERS["sgd"](model) for model in models]
    with pytest.raises(ValueError, match="workers differ in period"):
        Lockstep(models, optimizers, [LocalSGD(period=4), LocalSGD(period=3)], [1, 1])
    with torch.no_grad():
        next(models[1].parameters()).add_(1)
    with pytest.raises(ValueError, match="the workers' models differ"):
        Lockstep(models, optimizers, [LocalSGD(period=4)] * 2, [1, 1])


def test_a_period_that_follows_measured_times_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.period=auto: follows measured times"):
        Learning(load_config([*DEFAULT, "algorithm.period=auto"]))
