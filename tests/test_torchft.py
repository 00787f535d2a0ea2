"""DiLoCo, streaming DiLoCo and Local-SGD beside torchft's own, on the same gradients. Skipped where there is no torchft."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import DiLoCo, LocalSGD, StreamingDiLoCo, attach
from cocod_accel.averaging.flat import balanced_cuts
from tests import loops
from tests.test_exactness import assert_traces_equal
from tests.workers import run_workers

pytest.importorskip("torchft", reason="pip install cocod-accel[elastic]")

STEPS, PERIOD = 24, 6
WORKERS = 2


@dataclass(frozen=True)
class Case:
    """What both are asked for."""

    #: None: Local-SGD.
    fragments: int | None
    delay: int = 0
    mix: float = 0.0

    def ours(self) -> Any:
        if self.fragments is None:
            return LocalSGD(PERIOD)
        if self.delay == 0:
            return DiLoCo(PERIOD, fragments=self.fragments)
        # torchft counts back from where a mean is merged, this project forward from where it is sent.
        schedule = [(0, PERIOD - self.delay), (PERIOD - self.delay, PERIOD)]
        return StreamingDiLoCo(schedule, delay=self.delay, mix=self.mix)

    def theirs(self, local_sgd: Any, manager: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        if self.fragments is None:
            return local_sgd.LocalSGD(manager, model, optimizer, sync_every=PERIOD)
        parameters = list(model.parameters())
        cuts = balanced_cuts([parameter.numel() for parameter in parameters], self.fragments)
        # Their first fragment is sent first, ours at a round's end.
        parts = [nn.ParameterList(parameters[cut]) for cut in (*cuts[1:], cuts[0])]
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        return local_sgd.DiLoCo(
            manager, parts, optimizer, outer, sync_every=PERIOD, fragment_sync_delay=self.delay,
            fragment_update_alpha=self.mix,
        )  # fmt: skip


CASES = [Case(None), Case(1), Case(2), Case(1, 2), Case(1, 5), Case(1, 3, 0.5)]


@contextmanager
def manager_of(name: str, address: str, is_asynchronous: bool) -> Iterator[Any]:
    torchft: Any = importlib.import_module("torchft")
    rank, here = dist.get_rank(), "127.0.0.1"
    store: Any = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(), load_state_dict=lambda state: None, state_dict=dict, min_replica_size=WORKERS,
        use_async_quorum=is_asynchronous, rank=0, world_size=1, store_addr=here, store_port=store.port,
        lighthouse_addr=address, replica_id=f"{name}_{rank}", hostname=here, init_sync=False,
    )  # fmt: skip
    try:
        yield manager
        dist.barrier()  # a manager that is gone cannot vote
    finally:
        manager.shutdown(wait=False)


def train_both(rank: int) -> list[Any]:
    local_sgd: Any = importlib.import_module("torchft.local_sgd")
    coordination: Any = importlib.import_module("torchft.coordination")
    found = []
    for number, case in enumerate(CASES):
        ours = DistributedDataParallel(loops.make_model())
        optimizer = loops.OPTIMIZERS["adamw"](ours)
        with attach(ours, optimizer, case.ours()):
            mine = loops.trained(ours, optimizer, rank, STEPS)
        lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=WORKERS) if rank == 0 else None
        address = [f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}" if lighthouse is not None else ""]
        dist.broadcast_object_list(address)
        theirs = loops.make_model()
        optimizer = loops.OPTIMIZERS["adamw"](theirs)
        with (
            manager_of(f"case_{number}", address[0], case.fragments is None) as manager,
            case.theirs(local_sgd, manager, theirs, optimizer),
        ):
            other = loops.trained(theirs, optimizer, rank, STEPS)
        dist.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()
        found.append((mine, other))
    return found


def test_every_step_equals_torchfts() -> None:
    results = run_workers(WORKERS, train_both, seconds=110)
    for index, case in enumerate(CASES):
        ours = [worker[index][0] for worker in results]
        theirs = [worker[index][1] for worker in results]
        assert_traces_equal(ours, theirs, str(case))
