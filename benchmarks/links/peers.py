"""No communication at all, and the alternatives a user has, each used as its docs recommend.

Every contender trains its own model with the same loop:

    contender.step(inputs, labels)        # one step; what it communicates, and whether it waits, is up to it
    with contender.averaged(): evaluate   # the model that this contender would use
    contender.drain()                     # leave nothing in flight that would slow down the next contender
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Contender:
    """Local steps and nothing else: the limit that no method with communication can beat."""

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
        """What a peer requires after each step."""

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, ``module`` is the mean of all workers' models; afterwards this worker's own is restored."""
        return contextlib.nullcontext()

    def drain(self) -> None:
        """Wait for whatever is in flight."""

    def close(self) -> None:
        """Unwrap the model."""


class TorchDDP(Contender):
    label = "torch DDP"

    def set_up(self) -> None:
        # By default DDP broadcasts buffers in every forward, which would only add waiting.
        self.model = DistributedDataParallel(self.module, forward_sync_buffers=False)


class TorchDDPHalf(TorchDDP):
    label = "torch DDP, fp16 hook"

    def set_up(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        super().set_up()
        self.model.register_comm_hook(None, fp16_compress_hook)  # type: ignore[operator]


class TorchDDPPower(TorchDDP):
    """Low-rank gradients (Vogels et al. 2019), with torch's defaults but for the steps before it begins, a thousand."""

    label = "torch DDP, PowerSGD hook"

    def set_up(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        super().set_up()
        state = PowerSGDState(process_group=None, start_powerSGD_iter=2)
        self.model.register_comm_hook(state, powerSGD_hook)  # type: ignore[operator]


class Averaging(Contender):
    """Peers that average models themselves; their mean is evaluated."""

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


class TorchPostLocal(Averaging):
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


class AccelerateLocal(Averaging):
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


class _Torchft(Averaging, ABC):
    """Every worker is a replica group of one, with a store and a manager; a lighthouse forms the quorum of every round."""

    #: DiLoCo requires False.
    has_async_quorum = True

    def set_up(self) -> None:
        # Optional and untyped.
        torchft: Any = importlib.import_module("torchft")
        coordination: Any = importlib.import_module("torchft.coordination")
        self.local_sgd: Any = importlib.import_module("torchft.local_sgd")
        rank, size = dist.get_rank(), dist.get_world_size()
        # The address of this worker; a lab host has no name.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 1))
            here = probe.getsockname()[0]
        address = [""]
        if rank == 0:
            self._lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=size)
            address = [f"http://{here}:{self._lighthouse.address().rpartition(':')[2]}"]
        dist.broadcast_object_list(address)
        self._store: Any = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(), load_state_dict=lambda state: None, state_dict=dict, min_replica_size=size,
            use_async_quorum=self.has_async_quorum, rank=0, world_size=1, store_addr=here, store_port=self._store.port,
            lighthouse_addr=address[0], replica_id=f"bench_{rank}", hostname=here,
            init_sync=False,
        )  # fmt: skip
        self._context = self.method().__enter__()

    @abstractmethod
    def method(self) -> Any:
        """The context manager that trains."""

    def close(self) -> None:
        self._context.__exit__(None, None, None)
        dist.barrier()  # a manager that is gone cannot vote
        self.manager.shutdown(wait=False)
        dist.barrier()
        if dist.get_rank() == 0:
            self._lighthouse.shutdown()


class TorchftLocal(_Torchft):
    label = "torchft LocalSGD"

    def method(self) -> Any:
        return self.local_sgd.LocalSGD(self.manager, self.module, self.optimizer, sync_every=self.period)


class TorchftDiLoCo(_Torchft):
    """Overlapped: sends after the first step of a round, and waits after the last."""

    label = "torchft DiLoCo, overlapped"
    has_async_quorum = False

    def method(self) -> Any:
        # The outer optimizer of the DiLoCo paper.
        outer = torch.optim.SGD(self.module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        delay = self.period - 1
        return self.local_sgd.DiLoCo(
            self.manager, [self.module], self.optimizer, outer, sync_every=self.period, fragment_sync_delay=delay
        )
