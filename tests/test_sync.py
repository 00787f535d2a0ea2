"""What a loop calls: averaged, finish, reweight, state_dict, detach, the context manager, several optimizers."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, SSGD, CoCoDSGD, LocalSGD, Sync, attach
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.workers import run_outcomes, run_workers

WEIGHTS = [3.0, 1.0]


def make_convolutions() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(OrderedDict([
        ("conv1", nn.Conv2d(3, 8, 3, bias=False)), ("bn1", nn.BatchNorm2d(8)), ("relu", nn.ReLU()),
        ("conv2", nn.Conv2d(8, 8, 3, bias=False)), ("bn2", nn.BatchNorm2d(8)), ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flat", nn.Flatten()), ("fc", nn.Linear(8, 4)),
    ]))  # fmt: skip


def resnet_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(50 * rank + step)
    x = torch.randn(4, 3, 32, 32, generator=generator) * (1 + rank)
    y = torch.randint(0, 4, (4,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def averaged_and_finished(rank: int, name: str) -> Any:
    model = DistributedDataParallel(make_convolutions())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sync = attach(model, optimizer, loops.make_algorithm(name, 2), weight=1 if name == "asynlocal" else WEIGHTS[rank])
    for step in range(3):
        resnet_step(model, optimizer, rank, step)
    local = full_state(model)
    with sync.averaged():
        inside = full_state(model)
        for buffer in model.buffers():  # whatever happens to the model inside is undone
            buffer.add_(1)
    assert same(full_state(model), local)
    with pytest.raises(ZeroDivisionError), sync.averaged():
        raise ZeroDivisionError
    assert same(full_state(model), local)
    resnet_step(model, optimizer, rank, 3)
    resnet_step(model, optimizer, rank, 4)
    sync.finish()
    finished = full_state(model)
    sync.finish()  # may be called again
    again = full_state(model)
    resnet_step(model, optimizer, rank, 5)
    sync.finish()
    sync.detach()
    return local, inside, finished, again, full_state(model)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_averaged_and_finish_hold_the_mean_with_batch_norm(name: str) -> None:
    (local0, inside0, finished0, again0, last0), (local1, inside1, finished1, again1, last1) = run_workers(
        2, averaged_and_finished, name
    )
    w0, w1 = (0.5, 0.5) if name == "asynlocal" else (0.75, 0.25)
    for key, value in inside0.items():
        if value.is_floating_point():
            mean = w0 * local0[key].double() + w1 * local1[key].double()
            assert torch.allclose(value.double(), mean, rtol=1e-5, atol=1e-7), key
            assert torch.equal(value, inside1[key]), key
        else:
            assert torch.equal(value, local0[key]), key
    if name in loops.PERIODIC:
        assert not torch.equal(local0["module.conv1.weight"], local1["module.conv1.weight"])
    assert not torch.equal(local0["module.bn1.running_var"], local1["module.bn1.running_var"])
    for first, second in ((finished0, finished1), (again0, again1), (last0, last1)):
        assert same(first, second)
    assert not same(finished0, last0)
    assert all(torch.allclose(finished0[key], again0[key], rtol=1e-6, atol=0) for key in finished0)


def averaged_in_flight(rank: int, interrupt: bool) -> Any:
    """The run must be the same whether or not somebody looks at the mean in the middle."""
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, CoCoDSGD(3), weight=WEIGHTS[rank])
    for step in range(10):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        if interrupt:
            with sync.averaged():
                model(torch.zeros(1, 6, dtype=torch.float64)).sum().backward()  # a backward that is not training
                optimizer.zero_grad()
            sync.state_dict()
    return loops.snapshot(model), sync.stats().rounds


def test_averaged_leaves_an_average_in_flight_alone() -> None:
    for (plain, rounds), (looked_at, rounds_too) in zip(
        run_workers(2, averaged_in_flight, False), run_workers(2, averaged_in_flight, True), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, looked_at, strict=True))
        assert rounds == rounds_too == 3


def a_step_inside_averaged(rank: int) -> None:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(3))
    with pytest.raises(RuntimeError, match="inside averaged"), sync.averaged():
        optimizer.step()
    for call in (sync.finish, lambda: sync.reweight(1), lambda: sync.averaged().__enter__()):
        with pytest.raises(RuntimeError, match="inside averaged"), sync.averaged():
            call()
    sync.finish()


def test_what_would_be_lost_inside_averaged_is_refused() -> None:
    run_workers(2, a_step_inside_averaged)


# ---------------------------------------------------------------------------------------------- reweight


def reweighted(rank: int) -> Any:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, LocalSGD(2), weight=1)
    for step in range(3):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    before = loops.snapshot(model)
    sync.reweight([1.0, 4.0][rank])
    between = loops.snapshot(model)
    rows = []
    for step in range(3, 5):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        rows.append(([p.grad.clone() for p in model.parameters() if p.grad is not None], loops.snapshot(model)))
        optimizer.step()
    return before, between, rows, loops.snapshot(model)


def test_reweight_finishes_with_the_old_weights_and_starts_a_round_with_the_new() -> None:
    (before0, between0, rows0, after0), (before1, between1, rows1, after1) = run_workers(2, reweighted)
    for a, b, mean, mean_too in zip(before0, before1, between0, between1, strict=True):
        assert torch.allclose(mean, (a + b) / 2, rtol=1e-12)
        assert torch.equal(mean, mean_too)
    for index, (a, b) in enumerate(zip(after0, after1, strict=True)):
        ends = [rows[-1][1][index] - 0.1 * rows[-1][0][index] for rows in (rows0, rows1)]  # before the mean
        assert torch.allclose(a, 0.2 * ends[0] + 0.8 * ends[1], rtol=1e-12)
        assert torch.equal(a, b)


def reweighted_badly(rank: int) -> None:
    model = DistributedDataParallel(loops.make_model())
    sync = attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(2))
    with pytest.raises(ValueError, match=r"weight=-2.* pass this worker's batch size"):
        sync.reweight([1, -2][rank])
    sync.finish()  # still usable


def test_a_bad_weight_on_one_worker_is_refused_on_all() -> None:
    run_workers(2, reweighted_badly)


# ----------------------------------------------------------------------------------- saving and resuming


def straight_or_resumed(rank: int, name: str, stop_at: int | None, period: Any) -> Any:
    weight = 1 if name == "asynlocal" else WEIGHTS[rank]

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DistributedDataParallel(loops.make_model(torch.float32))
        return model, loops.OPTIMIZERS["momentum"](model)

    model, optimizer = build()
    sync = attach(model, optimizer, loops.make_algorithm(name, period), weight=weight)
    for step in range(11):
        if step == stop_at:
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict(), sync.state_dict()), file)
            sync.detach()
            model, optimizer = build()
            file.seek(0)
            model_state, optimizer_state, sync_state = torch.load(file, weights_only=True)
            model.load_state_dict(model_state)
            optimizer.load_state_dict(optimizer_state)
            sync = attach(model, optimizer, loops.make_algorithm(name, period), weight=weight)
            sync.load_state_dict(sync_state)
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step, dtype=torch.float32)).backward()
        optimizer.step()
    stats = sync.stats()
    values = loops.snapshot(model)
    sync.finish()
    return values, loops.snapshot(model), (stats.rounds, stats.bytes, stats.drift)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_resumed_run_is_the_run_that_never_stopped_bit_for_bit(name: str) -> None:
    period = [(0, 1), (2, 4)]
    expected = run_workers(2, straight_or_resumed, name, None, period)
    for stop_at in (1, 4, 6):  # after a round of one step, in the middle of a round, at a round end
        got = run_workers(2, straight_or_resumed, name, stop_at, period)
        for (values, finished, stats), (wanted, wanted_finished, wanted_stats) in zip(got, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True)), f"stopped at {stop_at}"
            assert all(torch.equal(a, b) for a, b in zip(finished, wanted_finished, strict=True))
            if name in ("ssgd", "cocod"):  # the others pay for one extra mean when they are attached again apart
                assert stats[0] == wanted_stats[0]


def wrong_states(rank: int) -> None:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(1))
    for step in range(2):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    state = sync.state_dict()
    pickle.dumps(state)  # no process group inside
    (part,) = state["averages"]["parts"]
    short = {**state["averages"], "parts": [{**part, "in_flight": [torch.zeros(3)]}]}
    for key, value, message in (
        ("algorithm", "local", "saved with local, but cocod is attached"),
        ("version", 99, "state version 99"),
        ("averages", short, "elements, this model"),
    ):
        with pytest.raises(ValueError, match=message):
            sync.load_state_dict({**state, key: value})
    (kept,) = sync.state_dict()["averages"]["parts"]
    assert all(torch.equal(a, b) for a, b in zip(kept["in_flight"], part["in_flight"], strict=True))
    with pytest.raises(ValueError, match="rounds"):
        sync.load_state_dict({key: value for key, value in state.items() if key != "rounds"})
    sync.finish()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    run_workers(2, wrong_states)


# ------------------------------------------------------------------------- detach and the context manager


def detached(rank: int, name: str) -> Any:
    model = DistributedDataParallel(loops.make_model(torch.float32), find_unused_parameters=True)
    optimizer = loops.OPTIMIZERS["momentum"](model)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, number, dtype=torch.float32)).backward()
        optimizer.step()

    switches = model.require_backward_grad_sync, model.broadcast_buffers
    sync = attach(model, optimizer, loops.make_algorithm(name, 2))
    for number in range(3):
        step(number)
    sync.finish()
    sync.detach()
    sync.detach()
    assert (model.require_backward_grad_sync, model.broadcast_buffers) == switches
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not model._forward_hooks
    with pytest.raises(RuntimeError, match=r"finish\(\) after detach\(\); attach again first"):
        sync.finish()
    start = copy.deepcopy(model.module), copy.deepcopy(optimizer.state_dict())
    for number in range(3, 6):
        step(number)
    plain = loops.snapshot(model)
    # the same three steps on a DDP model that never had a hook
    model = DistributedDataParallel(start[0])
    optimizer = loops.OPTIMIZERS["momentum"](model)
    optimizer.load_state_dict(start[1])
    for number in range(3, 6):
        step(number)
    return plain, loops.snapshot(model)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_after_detach_the_model_is_plain_ddp_again(name: str) -> None:
    for ours, stock in run_workers(2, detached, name):
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


def attached_twice(rank: int) -> Any:
    model = DistributedDataParallel(loops.make_model())
    traces: list[list[Tensor]] = []
    for name in ("ssgd", "cocod", "local"):
        model.module.load_state_dict(loops.make_model().state_dict())
        optimizer = loops.OPTIMIZERS["sgd"](model)
        with attach(model, optimizer, loops.make_algorithm(name, 2), weight=WEIGHTS[rank]):
            for step in range(5):
                optimizer.zero_grad()
                loops.loss_of(model, *loops.make_batch(rank, step)).backward()
                optimizer.step()
            traces.append(loops.snapshot(model))
        assert torch.distributed.is_initialized()
    return traces


def test_attaching_again_works_on_the_same_ddp_model() -> None:
    results = run_workers(2, attached_twice)
    batches = [[loops.make_batch(i, t) for t in range(5)] for i in range(2)]
    for index, name in enumerate(("ssgd", "cocod", "local")):
        expected = reference.run(name, loops.make_model(), loops.OPTIMIZERS["sgd"], batches, loops.loss_of, WEIGHTS, [2, 2])
        assert_traces_equal(
            [[result[index]] for result in results], [[worker[-1]] for worker in expected], f"attached again: {name}"
        )


def one_rank_raises(rank: int) -> None:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    with attach(model, optimizer, CoCoDSGD(2)):
        for step in range(8):
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
            if rank == 1 and step == 4:
                raise KeyError("broken batch")
            optimizer.step()


def test_an_exception_on_one_worker_ends_all_without_a_wait() -> None:
    outcomes = run_outcomes(2, one_rank_raises, seconds=30)
    assert outcomes[1].error is not None
    assert outcomes[1].error[0] == "KeyError"
    assert outcomes[0].error is not None
    assert outcomes[0].error[:2] == ("TransferError", "rank 1 has left: KeyError: 'broken batch'")


def all_raise_and_attach_again(rank: int) -> list[Tensor]:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    try:
        with attach(model, optimizer, CoCoDSGD(2)):
            for step in range(3 - 2 * rank):  # worker 0 has an average in flight, worker 1 has not
                optimizer.zero_grad()
                loops.loss_of(model, *loops.make_batch(rank, step)).backward()
                optimizer.step()
            raise KeyError
    except KeyError:
        pass
    sync = attach(model, optimizer, CoCoDSGD(2))
    sync.finish()
    return loops.snapshot(model)


def test_after_an_exception_everywhere_workers_may_attach_again() -> None:
    first, second = run_workers(2, all_raise_and_attach_again)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------ several optimizers


def two_optimizers(rank: int, reverse: bool) -> Any:
    model = DistributedDataParallel(loops.make_model())
    matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() == 2], lr=0.1)
    rest = torch.optim.SGD([p for p in model.parameters() if p.dim() != 2], lr=0.1)
    sync = attach(model, [matrices, rest], CoCoDSGD(3), weight=WEIGHTS[rank])
    trace = []
    for step in range(8):
        model.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        for optimizer in (rest, matrices) if reverse else (matrices, rest):
            optimizer.step()
        trace.append(loops.snapshot(model))
    assert isinstance(sync, Sync)
    assert sync.stats().rounds == 2
    return trace


def one_leaves_by_an_exception(rank: int) -> Any:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    if rank == 0:
        with contextlib.suppress(KeyError), attach(model, optimizer, CoCoDSGD(2)):
            raise KeyError("mine alone")
    else:
        attach(model, optimizer, CoCoDSGD(2)).detach()
    sync = attach(model, optimizer, CoCoDSGD(2))
    sync.finish()
    return loops.snapshot(model)


def test_after_an_exception_on_one_worker_all_may_attach_again() -> None:
    first, second = run_workers(2, one_leaves_by_an_exception, seconds=30)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_last_of_several_optimizers_to_step_drives_the_round(reverse: bool) -> None:
    results = run_workers(2, two_optimizers, reverse)
    batches = [[loops.make_batch(i, t) for t in range(8)] for i in range(2)]
    expected = reference.run("cocod", loops.make_model(), loops.OPTIMIZERS["sgd"], batches, loops.loss_of, WEIGHTS, [3, 3])
    assert_traces_equal(results, expected, "two optimizers")


def test_stats_can_be_logged_as_a_mapping() -> None:
    model = loops.make_model()
    with attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(3)) as sync:
        stats = sync.stats()
    counts = dict.fromkeys(("rounds", "bytes", "largest_staleness", "server_bytes"), 0)
    figures = ("exposed_seconds", "hidden_seconds", "drift", "largest_drift", "mean_drift", "staleness")
    assert dict(stats) == {**counts, **dict.fromkeys(figures, 0.0)}
    assert stats.rounds == stats["rounds"] == 0


def buffers_after_a_round(rank: int, name: str) -> Any:
    model = DistributedDataParallel(make_convolutions())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    attach(model, optimizer, loops.make_algorithm(name, 1), weight=WEIGHTS[rank])
    with torch.no_grad():
        for buffer_name, buffer in model.module.named_buffers():
            if buffer_name.endswith("running_mean"):
                buffer.fill_(1.0 + rank)
    model.eval()  # so that the forward leaves the statistics alone
    resnet_step(model, optimizer, rank, 0)
    return model.module.bn1.running_mean[0].item()


def test_rounds_average_buffers_by_value_in_local_and_leave_them_alone_in_cocod() -> None:
    assert run_workers(2, buffers_after_a_round, "local") == pytest.approx([1.25, 1.25], rel=1e-6)
    assert run_workers(2, buffers_after_a_round, "cocod") == [1.0, 2.0]


class Rebinding(nn.Module):
    """Buffers that are bound anew in every forward, and one that grows."""

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.grows = grows
        self.mean: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.cat([self.mean, x.mean(0).detach()]) if self.grows else 0.5 * self.mean + x.mean(0).detach()
        self.count = self.count + 1
        out: Tensor = self.inner(x)
        return out


def rebinding(rank: int) -> Any:
    model = DistributedDataParallel(Rebinding())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, LocalSGD(2))
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 2), 1.0 + rank + step)).sum().backward()
        optimizer.step()
    local = full_state(model)
    with sync.averaged():
        inside = full_state(model)
        model(torch.ones(1, 2))
    assert same(full_state(model), local)
    return local["module.mean"], inside["module.mean"]


def test_buffers_that_are_bound_anew_are_averaged_and_come_back() -> None:
    (local, inside), (local_too, inside_too) = run_workers(2, rebinding)
    assert torch.equal(inside, inside_too)
    assert torch.allclose(inside, (local + local_too) / 2)


def growing(rank: int) -> None:
    model = DistributedDataParallel(Rebinding(grows=True))
    sync = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), CoCoDSGD(9))
    for _ in range(1 + rank):
        model(torch.ones(1, 2))
    sync.finish()


def test_a_buffer_whose_shape_changed_is_refused_before_any_sum() -> None:
    for outcome in run_outcomes(2, growing, seconds=30):
        assert outcome.error is not None
        assert outcome.error[0] == "ValueError"
        assert "buffer mean had shape (2,) at attach and has" in outcome.error[1]


def copied_and_freed(rank: int) -> None:
    model: Any = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    attach(model, optimizer, CoCoDSGD(2))
    for step in range(3):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    twin = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    torch.save(model, io.BytesIO())
    x = loops.make_batch(rank, 0)[0]
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))
    with pytest.raises(RuntimeError, match="this copy of an attached model would train alone"):
        twin(x)
    twin_optimizer = loops.OPTIMIZERS["sgd"](twin)
    with attach(twin, twin_optimizer, CoCoDSGD(2)):
        twin(x)
    assert twin.require_backward_grad_sync is True
    assert "forward" not in vars(twin)
    watched = weakref.ref(model.module)
    del model, optimizer, twin, twin_optimizer
    gc.collect()
    assert watched() is None


def test_an_attached_model_can_be_copied_saved_and_freed() -> None:
    run_workers(2, copied_and_freed)


def static_graph(rank: int) -> None:
    model = DistributedDataParallel(loops.make_model(), static_graph=True)
    optimizer = loops.OPTIMIZERS["sgd"](model)

    def step() -> None:
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, 0)).backward()
        optimizer.step()

    for _ in range(2):  # attaching local steps again is fine
        with attach(model, optimizer, LocalSGD(2)):
            step()
    with torch.no_grad():
        model(loops.make_batch(rank, 0)[0])
    with pytest.raises(RuntimeError, match="wrap the module in a fresh DistributedDataParallel"):
        step()
    with pytest.raises(ValueError, match="wrap the module in a fresh DDP"):
        attach(model, optimizer, SSGD())


def test_a_static_graph_that_took_local_steps_is_not_trained_on_in_silence() -> None:
    run_workers(2, static_graph)


def a_parameter_as_output(rank: int) -> int:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> tuple[Tensor, Tensor]:
            return self.weight * 2, self.weight

    model = DistributedDataParallel(Plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, CoCoDSGD(2)):
        for _ in range(5):
            optimizer.zero_grad()
            model()[0].sum().backward()
            optimizer.step()
    return len(model.module.weight._backward_hooks or {})


def test_hooks_do_not_pile_up_on_a_parameter_that_is_an_output() -> None:
    assert run_workers(2, a_parameter_as_output) == [0, 0]
