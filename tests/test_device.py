"""What our code asks of a device, where a CPU cannot tell whether it asks rightly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cocod_accel import CoCoDSGD, attach
from cocod_accel.averaging.coder import Coder
from cocod_accel.averaging.flat import FlatCopy, square_sums
from cocod_accel.comm import device as devices
from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.groups import private_group
from cocod_accel.comm.in_process import InProcessGroup
from tests.ahead import Rig, ahead
from tests.test_ahead import begin, train, wrapped
from tests.workers import run_workers

GIB = 1 << 30


def test_what_is_worked_on_at_once_is_bounded_on_devices() -> None:
    parameters = [torch.empty(GIB // 4, device="meta") for _ in range(9)]  # 9 GiB, more elements than 31 bits count
    flat = FlatCopy(parameters)
    assert flat.buffers[0].numel() > 2**31
    assert all(segment.flat.numel() * 4 <= GIB for segment in flat.segments)
    assert all(piece.numel() == 1 for piece in square_sums(flat.buffers[0]))
    assert len(square_sums(flat.buffers[0])) > 2
    for name in ("bf16", "int8", "ternary", "topk:0.01"):
        coder = Coder(name, torch.empty(2**31 + 5, device="meta"), InProcessGroup(2).member(0))
        assert coder._scratch[0].numel() * 4 <= GIB


def test_a_machines_gpu_is_not_touched_by_who_does_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: pytest.fail("made a context"))
    assert devices.device_in_use() == torch.device("cpu")
    devices.wait_for_device()
    devices.wait_for_stream()


@contextlib.contextmanager
def moved(now: list[int], index: int) -> Iterator[None]:
    before, now[0] = now[0], index
    yield
    now[0] = before


def gathered(rank: int) -> tuple[list[Any], list[int], int]:
    """The current device while objects travel, and afterwards."""
    now, seen = [0], []
    gather = dist.all_gather_object

    def all_gather_object(*args: Any, **kwargs: Any) -> None:
        seen.append(now[0])
        gather(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda index: moved(now, index), raising=False)
        patch.setattr(dist, "all_gather_object", all_gather_object)
        reports = exchange_reports(rank, dist.group.WORLD, torch.device("cuda", rank))
    return reports, seen, now[0]


def test_objects_travel_through_the_models_own_device() -> None:
    """NCCL takes the current one, which is the first for all workers of a loop that never called set_device."""
    assert run_workers(2, gathered, fresh=True) == [([0, 1], [0], 0), ([0, 1], [1], 0)]


def opened(rank: int) -> list[Any]:
    world: Any = dist.group.WORLD
    seen: list[Any] = []
    new_group = dist.new_group

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(world.bound_device_id)
        world.bound_device_id = None  # gloo knows no such thing
        return new_group(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noted)
        world.bound_device_id = torch.device("cuda", 0)
        if rank < 2:
            private_group(dist.group.WORLD, [0, 1])
        world.bound_device_id = None
    return seen


def test_a_group_of_some_workers_asks_nothing_of_the_others() -> None:
    """With a bound device NCCL would split the world's communicator, for which all of the world must join in."""
    assert run_workers(3, opened, fresh=True) == [[None], [None], []]


def captured(rank: int) -> str:
    model, optimizer, sync = begin(CoCoDSGD(1), rank)
    said = ""
    rig = Rig()
    with ahead(rig):
        rig.is_capturing = True
        try:
            train(model, optimizer, torch.randn(1, 8, 6))
        except RuntimeError as error:
            said = str(error)
    sync.detach()
    return said


def test_a_captured_step_is_refused() -> None:
    assert all("capture forward and backward only" in said for said in run_workers(2, captured, fresh=True))


def test_random_numbers_of_any_accelerator_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from cocod_accel.checkpoint import rng

    class Module:
        state = torch.tensor([1, 2], dtype=torch.uint8)

        @classmethod
        def get_rng_state(cls) -> torch.Tensor:
            return cls.state.clone()

        @classmethod
        def set_rng_state(cls, state: torch.Tensor) -> None:
            cls.state = state

    monkeypatch.setattr(rng, "device_in_use", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    kept = rng.random_state()
    Module.state = torch.tensor([9], dtype=torch.uint8)
    rng.set_random_state(kept)
    assert Module.state.tolist() == [1, 2]


class WithNccl:
    """A group whose GPUs are connected by NCCL, as torch describes it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Any] = {}
        #: The world's device at every call.
        self.bound: list[Any] = []
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        patch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
        patch.setattr(dist, "get_world_size", lambda group=None: 2)
        patch.setattr(dist, "new_group", self._noted)

    def _noted(self, ranks: Any, **options: Any) -> None:
        self.asked.update(options)
        self.bound.append(getattr(dist.group.WORLD, "bound_device_id", None))


def test_averages_on_gpus_have_a_stream_of_their_own_few_blocks_and_the_users_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What torch is asked for; it was not run on a GPU."""
    if not dist.is_nccl_available():
        pytest.skip("this torch knows no NCCL")
    group = WithNccl(monkeypatch)
    monkeypatch.setattr("cocod_accel.comm.groups._timeout_of", lambda group: timedelta(seconds=77))
    private_group(group, device=torch.device("cuda", 0), ctas=6)
    options = group.asked["pg_options"]
    assert group.asked["backend"] == "cpu:gloo,cuda:nccl", "buffers of the host travel, too"
    assert "device_id" not in group.asked, "the world's own device, or none"
    assert (options.is_high_priority_stream, options.config.max_ctas, options.config.min_ctas) == (True, 6, 4)
    assert options._timeout == group.asked["timeout"] == timedelta(seconds=77)
    private_group(group, device=torch.device("cuda", 0))
    assert group.asked["pg_options"].config.max_ctas < 0, "NCCL's own choice"
    group.asked.clear()
    private_group(group)
    assert not {"backend", "pg_options", "device_id"} & group.asked.keys()


def test_a_group_of_some_gpus_is_told_which_device_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would guess it from the rank, and connect another one at once."""
    if not dist.is_nccl_available():
        pytest.skip("this torch knows no NCCL")
    group = WithNccl(monkeypatch)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    world = type("World", (), {"bound_device_id": torch.device("cuda", 1)})()
    monkeypatch.setattr(dist, "group", type("group", (), {"WORLD": world}))
    monkeypatch.setattr("cocod_accel.comm.groups._timeout_of", lambda group: None)
    private_group(group, [0, 1], device=torch.device("cuda", 1))
    assert group.asked["device_id"] == torch.device("cuda", 1)
    assert group.bound == [None], "not split off the world's"


def test_an_older_torch_is_asked_for_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        is_high_priority_stream = False

    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("Old", (), {"Options": Options}), raising=False)
    group = WithNccl(monkeypatch)
    monkeypatch.setattr("cocod_accel.comm.groups._timeout_of", lambda group: None)
    private_group(group, device=torch.device("cuda", 0), ctas=4)
    assert group.asked["pg_options"].is_high_priority_stream


def warmed(rank: int) -> list[list[str]]:
    found = []
    for algorithm in (CoCoDSGD(2), CoCoDSGD(2, payload="int8")):
        model, optimizer = wrapped()
        rig = Rig(0.001)
        with ahead(rig):
            sync = attach(model, optimizer, algorithm)
            found.append(sorted(set(rig.started)))
        sync.detach()
    return found


def test_groups_are_connected_at_attach() -> None:
    """NCCL would connect at the first round, which is then seconds late."""
    everything = ["all_gather_into_tensor", "all_reduce", "all_to_all_single"]
    assert run_workers(2, warmed, fresh=True) == [[["all_reduce"], everything]] * 2


@pytest.mark.parametrize("ctas", [0, 65, 4.0, "4", True])
def test_a_wrong_number_of_blocks_is_refused(ctas: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"ctas=.*: must be a number from 1 to 64, or None"):
        attach(model, torch.optim.SGD(model.parameters(), 0.1), CoCoDSGD(2), ctas=ctas)
