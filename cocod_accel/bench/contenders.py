"""Who is compared: our five algorithms, their peers driven in the way their docs recommend, and no communication at all.

Every contender trains a model of its own with the same loop:

    contender.step(inputs, labels)        # one step; what it communicates, and whether it waits, is its own affair
    with contender.averaged(): evaluate   # the model that this contender would use
    contender.drain()                     # nothing is left in flight for the next contender to pay for
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel.algorithms import ALGORITHMS
from cocod_accel.attach import Sync, attach
from cocod_accel.comm import Link

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Contender:
    """Local steps and nothing else: the limit that no method with communication can pass."""

    label = "no communication"

    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer, period: int) -> None:
        self.module = copy.deepcopy(module)
        self.period = period
        self.model: nn.Module = self.module
        self.optimizer: Any = make_optimizer(self.module)
        self.set_up()

    def set_up(self) -> None:
        """Wrap the model."""

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.backward(loss)
        self.optimizer.step()
        self.after_step()
        return loss.detach()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def after_step(self) -> None:
        """What a peer asks a loop to call."""

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, ``module`` is the mean of all workers' models; afterwards this worker's own is back."""
        return contextlib.nullcontext()

    def drain(self) -> None:
        """Wait for whatever is in flight."""

    def close(self) -> None:
        """Take off what was put around the model."""


class TorchDDP(Contender):
    label = "torch DDP"

    def set_up(self) -> None:
        # Buffers are broadcast in every forward unless told otherwise, which would only be waiting.
        self.model = DistributedDataParallel(self.module, forward_sync_buffers=False)


class TorchDDPHalf(TorchDDP):
    label = "torch DDP, fp16 hook"

    def set_up(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        super().set_up()
        self.model.register_comm_hook(None, fp16_compress_hook)  # type: ignore[operator]


class _Averaging(Contender):
    """Peers that average models in their own way: what they would be evaluated as is their mean."""

    @contextlib.contextmanager
    def averaged(self) -> Any:
        kept = {name: value.clone() for name, value in self.module.state_dict().items()}
        with torch.no_grad():
            for value in self.module.state_dict().values():
                if value.is_floating_point():
                    dist.all_reduce(value)
                    value.div_(dist.get_world_size())
        try:
            yield
        finally:
            self.module.load_state_dict(kept)


class TorchPostLocal(_Averaging):
    label = "torch PostLocalSGD"

    def set_up(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        alone, _ = dist.new_subgroups(1)
        model = DistributedDataParallel(self.module, forward_sync_buffers=False)
        state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=0)
        model.register_comm_hook(state, post_localSGD_hook)
        self.model = model
        self.optimizer = PostLocalSGDOptimizer(self.optimizer, PeriodicModelAverager(period=self.period, warmup_steps=0))


class AccelerateLocal(_Averaging):
    label = "accelerate LocalSGD"

    def set_up(self) -> None:
        from accelerate.accelerator import Accelerator
        from accelerate.local_sgd import LocalSGD

        self._accelerator = Accelerator(cpu=True)
        model, self.optimizer = self._accelerator.prepare(self.module, self.optimizer)
        model.broadcast_buffers = False
        self.model = model
        self._local = LocalSGD(
            accelerator=self._accelerator, model=self.model, local_sgd_steps=self.period, enabled=True
        ).__enter__()

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def after_step(self) -> None:
        self._local.step()

    def close(self) -> None:
        self._local.__exit__(None, None, None)


class Ours(Contender):
    """One of our five."""

    algorithm: str
    options: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    sync: Sync

    def set_up(self) -> None:
        kind: Any = ALGORITHMS[self.algorithm]
        reduces = kind.reduces_gradients
        algorithm = kind() if reduces else kind(period=self.period, **self.options)
        self.model = DistributedDataParallel(self.module, forward_sync_buffers=False)
        self.sync = attach(self.model, self.optimizer, algorithm)

    def averaged(self) -> AbstractContextManager[None]:
        return self.sync.averaged()

    def drain(self) -> None:
        self.sync.state_dict()

    def close(self) -> None:
        self.sync.state_dict()
        self.sync.detach()

    def emulate(self, link: Link) -> None:
        self.sync.emulate_link(link)


def _ours(name: str, **options: Any) -> type[Ours]:
    label = f"{name}{''.join(f', {value}' for value in options.values())}"
    return type(f"Ours_{label}", (Ours,), {"algorithm": name, "label": label, "options": options})


CONTENDERS: dict[str, type[Contender]] = {
    "none": Contender,
    "ddp": TorchDDP,
    "ddp_fp16": TorchDDPHalf,
    "post_local": TorchPostLocal,
    "accelerate_local": AccelerateLocal,
    **{name: _ours(name) for name in ALGORITHMS},
    "cocod_int8": _ours("cocod", payload="int8"),
}
OURS = tuple(ALGORITHMS)


def available(names: list[str]) -> list[str]:
    """Those whose packages are installed."""
    needs = {"accelerate_local": "accelerate"}
    return [name for name in names if name not in needs or importlib.util.find_spec(needs[name]) is not None]
