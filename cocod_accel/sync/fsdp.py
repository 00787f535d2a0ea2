"""The FSDP2 side: ``fully_shard`` over the workers of a node, so that nothing but a node holds a whole model.

Its parameters are ``DTensor``\\ s; their local shards are averaged as they are, empty ones and uneven ones too. Known by
name: importing FSDP is expensive for those who do without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cocod_accel.averaging.flat import local
from cocod_accel.sync.shards import ShardRouter

ROUTERS: WeakKeyDictionary[nn.Module, ShardRouter] = WeakKeyDictionary()


def is_sharded_module(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this module itself."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module or on parts of it."""
    return any(is_sharded_module(child) for child in module.modules())


def is_dtensor(tensor: object) -> bool:
    return type(tensor).__name__ == "DTensor" or type(getattr(tensor, "data", None)).__name__ == "DTensor"


def router_of(module: nn.Module) -> ShardRouter:
    """This model's router, made on first use."""
    return ROUTERS.setdefault(module, ShardRouter())


class FsdpShards:
    """One worker's shard of a model that ``fully_shard`` shares out over its node."""

    kind = signature = "fsdp"

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.refresh()  # after a forward, a module may hold gathered parameters in the place of its shards
        named = dict(module.named_parameters())
        for name, parameter in named.items():
            if parameter.requires_grad and not is_dtensor(parameter):
                raise ValueError(
                    f"parameter {name} is not sharded, so its gradient is not summed inside the node; "
                    "call fully_shard(model) on the whole model, too"
                )
        self.node = _node(named)
        self.trainable: list[Tensor] = [parameter for parameter in named.values() if parameter.requires_grad]
        self.frozen: list[Tensor] = [parameter for parameter in named.values() if not parameter.requires_grad]

    def refresh(self) -> None:
        """Gathered parameters were made of shards that have changed since: without this, the next forward would use them."""
        for child in _sharded_in(self._module):
            child.reshard()

    def held(self) -> dict[str, Tensor]:
        self.refresh()
        state = self._module.state_dict()
        return {name: local(value) for name, value in state.items() if isinstance(value, Tensor)}

    def whole_optimizer(self) -> AbstractContextManager[None]:
        return nullcontext()

    def whole(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor]]]:
        self.refresh()
        for name, value in self._module.state_dict().items():
            gather = value.full_tensor if is_dtensor(value) else value.detach
            yield name, value.dtype, tuple(value.shape), gather


def _sharded_in(module: nn.Module) -> Iterator[Any]:
    return (child for child in module.modules() if is_sharded_module(child))


def _node(named: dict[str, nn.Parameter]) -> tuple[int, ...]:
    nodes: dict[tuple[int, ...], str] = {}
    for name, parameter in named.items():
        if not is_dtensor(parameter):
            continue
        tensor: Any = parameter
        mesh, placements = tensor.device_mesh, tensor.placements
        if mesh.ndim > 1 and any(placement.is_replicate() for placement in placements):
            raise ValueError(
                f"parameter {name} is replicated over a dimension of its mesh (HSDP), where FSDP all-reduces in every step; "
                "shard over the node's dimension alone: fully_shard(module, mesh=mesh[name])"
            )
        if mesh.ndim > 1 or not placements[0].is_shard():
            raise ValueError(
                f"parameter {name} is placed as {placements} on {mesh}; use fully_shard over one dimension alone"
            )
        nodes.setdefault(tuple(dist.get_process_group_ranks(mesh.get_group())), name)
    if len(nodes) > 1:
        (first, name), (other, another) = list(nodes.items())[:2]
        raise ValueError(
            f"parameter {name} is sharded over ranks {list(first)}, {another} over {list(other)}; use one mesh for all"
        )
    return next(iter(nodes), ())
