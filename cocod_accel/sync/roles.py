"""What must be true where a server holds the model: who serves, and what can be served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel.algorithms import Algorithm
from cocod_accel.averaging.flat import as_real
from cocod_accel.comm.groups import world_group

if TYPE_CHECKING:
    from cocod_accel.sync.preflight import Report


def check_roles(reports: Sequence[Report], algorithm: Algorithm) -> None:
    """The last rank serves, if the algorithm has a server, and nobody else does."""
    first, last = reports[0], len(reports) - 1
    for rank, report in enumerate(reports):
        if report.serves != (algorithm.is_served and rank == last):
            raise ValueError(
                f"rank {rank} called serve(), but the server is the last rank, {last}, and only of ASGD; call attach()"
                if report.serves
                else f"there is no process for the server: rank {last}, the last one, called attach(); start one process "
                "more, and call serve() on the last"
            )
        if report.optimizer != first.optimizer:
            raise ValueError(
                f"the optimizers differ: rank {rank} has {report.optimizer}, rank 0 has {first.optimizer}; "
                "build the same one on workers and server"
            )


def check_served(module: nn.Module, ddp: DistributedDataParallel | None, is_sharded: bool, inner: Any) -> None:
    """What a server of gradients can be attached to: models on CPUs, connected by gloo."""
    if world_group() is None:
        raise ValueError(
            "ASGD: there is no process for the server, because this is the only one; start one more than there are "
            "workers, and call serve() on the last"
        )
    if inner is not None:
        raise ValueError("ASGD: inner is for algorithms that average models between nodes; leave it out, or use CoCoDSGD")
    if is_sharded:
        raise ValueError("ASGD trains whole models, not sharded ones or DeepSpeed's; use DistributedDataParallel or none")
    backends = str(dist.get_backend_config(None))
    if "gloo" not in backends:
        raise ValueError(f'ASGD sends with gloo, and these processes are connected by {backends}; use "gloo" or "cpu:gloo"')
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(f"ASGD runs on CPUs, but {name} is on {parameter.device}; move the model, or use another one")
        if as_real(parameter) is not parameter:
            raise ValueError(f"ASGD does not train complex or sharded parameters ({name}); use another algorithm")
    world = list(range(dist.get_world_size()))
    if ddp is not None and dist.get_process_group_ranks(ddp.process_group) not in (world, world[:-1]):
        raise ValueError("ASGD: the model is wrapped for some of the workers; wrap it for all processes, or not at all")
