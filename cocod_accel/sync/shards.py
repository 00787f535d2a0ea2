"""What averaging needs of a model that a node shares out: tensors of this worker's own, and a word after writing them.

A node trains such a model together, so its gradients are summed by whoever has sharded it. Every worker of the node
averages its own shard, with its namesakes: the workers in its place on the other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cocod_accel.averaging.flat import local
from cocod_accel.averaging.route import Route
from cocod_accel.comm.groups import ChannelKey, Channels


class Shards(Protocol):
    """One worker's shard of a model."""

    #: Such as "fsdp" or "zero3".
    kind: str
    #: The ranks of the workers that share the model out, in the order of their shards.
    node: tuple[int, ...]
    #: What is averaged. A ``DTensor`` stands for this worker's shard of it.
    trainable: list[Tensor]
    #: What all namesakes must hold alike.
    frozen: list[Tensor]

    @property
    def signature(self) -> str:
        """What workers with other shards of the same model have in common, beside names and shapes."""
        ...

    def refresh(self) -> None:
        """The shards have been written: renew what was made of them. Collective inside the node, if at all."""

    def held(self) -> dict[str, Tensor]:
        """What this worker holds of all parameters, by name, to be saved and written into."""
        ...

    def whole_optimizer(self) -> AbstractContextManager[None]:
        """Inside, the optimizer has all of its parameters."""
        ...

    def whole(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor]]]:
        """Every entry of the whole model's state_dict, and what gathers it inside the node."""
        ...


class ShardRouter:
    """Keeps a sharded model's process groups from one attach to the next. Gradients are the node's own affair."""

    barrier = None

    def __init__(self) -> None:
        #: Process groups of this model's own, and what they were opened for.
        self.channels: Channels | None = None
        self.channels_of: ChannelKey | None = None

    def take(self, method: object) -> None:
        """Nothing is reduced here."""

    def release(self) -> None:
        """Nothing was taken."""

    def retire_static_graph(self, ddp: object) -> None:
        """There is none."""


@contextmanager
def refreshed(shards: Shards | None) -> Iterator[None]:
    """Whatever writes parameters stands inside."""
    before = _version(shards)
    try:
        yield
    finally:
        if shards is not None and _version(shards) != before:
            shards.refresh()


def asking(node: Route | None, device: torch.device) -> Callable[[bool], bool] | None:
    """A question to the workers of a node: whether any of them says yes. None: there is nobody to ask."""
    if node is None:
        return None

    def ask(found: bool) -> bool:
        answer = torch.full((1,), float(found), device=device)
        node.comm.launch([answer]).wait()
        return bool(answer.item() > 0)

    return ask


def _version(shards: Shards | None) -> int:
    # The same writes happen on all workers of a node, so either all of them refresh or none.
    return 0 if shards is None else sum(local(tensor)._version for tensor in shards.trainable)


def check_node(shards: Shards, inner: Any) -> None:
    """Refuse a node that cannot step alone, or another one than ``inner`` says."""
    ranks, num_workers = shards.node, dist.get_world_size() if dist.is_initialized() else 1
    if len(ranks) == 1:
        raise ValueError("the model is sharded over one worker, so each holds a whole one; use DistributedDataParallel")
    if inner is None:
        if len(ranks) == num_workers:
            raise ValueError(
                f"the model is sharded over all {num_workers} workers, so none can step alone and nothing is left to "
                "average; shard it over the workers of a node, or pass inner=... for a single node"
            )
        return
    stated = ranks_of(inner, ranks)
    if stated != ranks:
        raise ValueError(
            f"inner has the ranks {list(stated)}, the model is sharded over {list(ranks)}; pass that group, or leave it out"
        )


def ranks_of(inner: Any, sharded_over: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The ranks of a node: of a process group, of a device mesh, of a DeepSpeed ``mpu``.

    Of a mesh with several dimensions, that which the model is sharded over, if there is one.
    """
    if hasattr(inner, "get_data_parallel_group"):
        inner = inner.get_data_parallel_group()
    if isinstance(inner, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(inner))
    if hasattr(inner, "mesh_dim_names") and hasattr(inner, "get_group"):
        found = [tuple(dist.get_process_group_ranks(inner.get_group(dim))) for dim in range(inner.ndim)]
        if len(found) == 1 or sharded_over in found:
            return sharded_over if sharded_over in found else found[0]
        raise ValueError(f"inner={inner!r}: the model is sharded over none of its dimensions; pass mesh[name]")
    raise TypeError(f"inner={inner!r} is not a process group with this worker; pass one from dist.new_subgroups()")
