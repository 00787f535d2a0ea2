"""The memory that averaging takes, counted on a GPU without data, and the table of it in ``docs/gpus.md``."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cocod_accel import SSGD, CoCoDSGD, LocalSGD, Outer, PipeSGD
from cocod_accel.algorithms import Algorithm
from tests.fake_cuda import CUDA, fake_cuda
from tests.test_ahead import begin, train
from tests.test_host_reads import attached, bucket_of, step
from tests.test_trainer import ROOT
from tests.workers import run_workers

#: A model of 32 GiB in layers of 1 GiB, so that single pieces count for little.
WIDTH, LAYERS = 16384, 32
ROWS: dict[str, tuple[Algorithm, bool]] = {
    "`SSGD()`": (SSGD(), False),
    '`SSGD(payload="int8")`': (SSGD(payload="int8"), False),
    "`PipeSGD()`": (PipeSGD(), False),
    "`LocalSGD(k)`, `AsynLocalSGD(k)`": (LocalSGD(2), False),
    "`CoCoDSGD(k)`": (CoCoDSGD(2), False),
    '`CoCoDSGD(k, payload="int8")`': (CoCoDSGD(2, payload="int8"), False),
    '`CoCoDSGD(k, payload="ternary")`': (CoCoDSGD(2, payload="ternary"), False),
    "`CoCoDSGD(k, own_share=0.5)`": (CoCoDSGD(2, own_share=0.5), False),
    "`CoCoDSGD(k, outer=Outer(0.7, 0.9))`": (CoCoDSGD(2, outer=Outer(0.7, 0.9)), False),
    '`CoCoDSGD(k)`, `offload="cpu"`': (CoCoDSGD(2), True),
    '`CoCoDSGD(k, payload="int8")`, `offload="cpu"`': (CoCoDSGD(2, payload="int8"), True),
}


class Meter(TorchDispatchMode):
    """The bytes that live on a device, and the most since :meth:`restart`."""

    def __init__(self, kind: str = "cuda") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind
        self._known: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        self._known = {key: held for key, held in self._known.items() if not held[0].expired()}
        return sum(size for _, size in self._known.values())

    def restart(self) -> None:
        gc.collect()
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tree_map(self._note, found)
        return found

    def _note(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf.device.type == self._kind:
            storage = leaf.untyped_storage()
            if storage._cdata not in self._known or self._known[storage._cdata][0].expired():
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.peak = max(self.peak, self.live)


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=CUDA) for _ in range(LAYERS)))


def bytes_a_parameter(algorithm: Algorithm, offloads: bool) -> list[float]:
    """Beside model, gradients and optimizer: between steps, at most in a step, in ``averaged()``, in a checkpoint, and with
    what ``state_dict()`` returns.
    """
    with fake_cuda() as device, Meter() as meter:
        device.is_done = True
        model, optimizer, sync = attached(algorithm, large(), offloads=offloads)
        bucket = bucket_of(model)
        for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()  # it makes its momentum
        numel = sum(parameter.numel() for parameter in model.parameters())

        def extra(number: int) -> float:
            return number / numel - 12

        def steps() -> None:
            for _ in range(4):
                step(model, optimizer, sync, bucket)

        steps()
        found = [extra(meter.live)]
        meter.restart()
        steps()
        found.append(extra(meter.peak))
        meter.restart()
        with sync.averaged():
            found.append(extra(meter.peak))
        meter.restart()
        sync.control.state_to_write()
        found.append(extra(meter.peak))
        meter.restart()
        assert sync.state_dict()
        found.append(extra(meter.peak))
        sync.detach()
    return [round(number, 1) for number in found]


def table() -> dict[str, list[float]]:
    """As the page has it."""
    rows = re.findall(r"^\| (`\w+SGD\(.*?) \|((?: [\d.]+ \|)+)$", (ROOT / "docs/gpus.md").read_text(), re.MULTILINE)
    return {name: [float(cell) for cell in cells.split("|")[:-1]] for name, cells in rows}


@pytest.mark.parametrize("name", list(ROWS))
def test_averages_take_the_memory_that_the_table_says(name: str) -> None:
    found = bytes_a_parameter(*ROWS[name])
    # Both sides are rounded to a tenth: 12.8 - 12.5 is more than 0.3 by the last bit of a float.
    assert table()[name] == pytest.approx(found, abs=0.3 + 1e-9), f"| {name} | {' | '.join(map(str, found))} |"


def test_the_table_has_no_other_rows() -> None:
    assert list(table()) == list(ROWS)


def asked_inside(rank: int) -> list[bool]:
    """Where a state is asked for inside ``averaged()``: is the local state back, and the run's end that without it?"""
    found = []
    for algorithm in (CoCoDSGD(3, payload="int8"), CoCoDSGD(3), CoCoDSGD(3, own_share=0.5)):
        ends = []
        for asks in (False, True):
            model, optimizer, sync = begin(algorithm, rank)
            batches = torch.randn(8, 8, 6, generator=torch.Generator().manual_seed(rank))
            train(model, optimizer, batches[:4])
            before = [parameter.clone() for parameter in model.parameters()]
            if asks:
                with sync.averaged():
                    sync.state_dict()
                    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
                found += [all(changed), all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))]
            train(model, optimizer, batches[4:])
            sync.finish()
            sync.detach()
            ends.append(torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]))
        found.append(torch.equal(*ends))
    return found


def test_a_state_may_be_asked_for_while_the_local_one_is_put_away() -> None:
    assert run_workers(2, asked_inside) == [[True] * 9] * 2


if __name__ == "__main__":
    for row, case in ROWS.items():
        print(f"| {row} | {' | '.join(map(str, bytes_a_parameter(*case)))} |")
