"""The DeepSpeed ZeRO side: stages 1 to 3 over the workers of a node, whose float32 partitions are averaged between nodes.

What the engine computes with (16-bit copies, gathered parameters, those that stage 3 keeps whole) is made of the
partitions, so it is made again after they were written: inside the node, as after a step of its own.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.groups import node_group
from cocod_accel.sync.shards import ShardRouter
from cocod_accel.sync.step_counter import Watcher

ROUTERS: WeakKeyDictionary[Any, ShardRouter] = WeakKeyDictionary()


class NodeMpu:
    """What ``deepspeed.initialize(mpu=...)`` asks for, with nodes in the place of all workers."""

    def __init__(self, group: Any, alone: Any) -> None:
        self._group, self._alone = group, alone

    def get_data_parallel_group(self) -> Any:
        return self._group

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._group)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_model_parallel_group(self) -> Any:
        return self._alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def node_mpu(workers_per_node: int) -> NodeMpu:
    """For nodes of so many workers with consecutive ranks: pass it to ``deepspeed.initialize(mpu=...)``.

    Every worker calls this, at the same point.
    """
    if type(workers_per_node) is not int or workers_per_node < 2:
        raise ValueError(f"workers_per_node={workers_per_node!r}: must be a number above 1; alone, a worker shards nothing")
    num_workers = dist.get_world_size() if dist.is_initialized() else 1
    if num_workers % workers_per_node:
        raise ValueError(
            f"workers_per_node={workers_per_node} does not divide {num_workers} workers; use nodes of equal size"
        )
    return NodeMpu(node_group(workers_per_node), dist.new_subgroups(1)[0])


def stage_of(engine: Any) -> int:
    return int(engine.zero_optimization_stage())


def router_of(engine: Any) -> ShardRouter:
    """This engine's router, made on first use."""
    return ROUTERS.setdefault(engine, ShardRouter())


class ZeroShards:
    """One worker's float32 partitions of an engine's parameters, and what is made of them.

    ``fragments``: stages 1 and 2 cut them in so many even ranges; stage 3 by parameters, of which each worker holds a share.
    """

    def __init__(self, engine: Any, fragments: int) -> None:
        self.stage = stage_of(engine)
        self.kind = f"zero{self.stage}"
        self._module: nn.Module = engine.module
        self._zero: Any = engine.optimizer
        _check(engine, self._zero)
        self._group = engine.seq_data_parallel_group
        self.node = tuple(dist.get_process_group_ranks(self._group))
        self._held = [tensor.data_ptr() for tensor in self.partitions]
        pieces = self._by_parameter() if self.stage == 3 else self._in_ranges(fragments)
        self.trainable: list[Tensor] = list(pieces)
        frozen = [parameter for parameter in engine.module.parameters() if not parameter.requires_grad]
        self.frozen: list[Tensor] = [getattr(parameter, "ds_tensor", parameter) for parameter in frozen]

    @property
    def partitions(self) -> list[Tensor]:
        """In float32, flat, one for each group of parameters."""
        names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
        return next(list(getattr(self._zero, name)) for name in names if hasattr(self._zero, name))

    @property
    def signature(self) -> str:
        sizes = [partition.numel() for partition in self.partitions]
        return f"{self.kind} {self._zero.dtype if hasattr(self._zero, 'dtype') else ''} {sizes}"

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer that steps the partitions."""
        found: Optimizer = self._zero.optimizer
        return found

    def of_engine(self, given: object) -> Optimizer:
        """The same, if that is what a user's optimizer stands for."""
        inner: Any = given
        while any(cls.__name__ == "AcceleratedOptimizer" for cls in type(inner).__mro__):
            inner = inner.optimizer
        if inner is not self._zero and inner is not self.optimizer:
            raise TypeError(f"optimizer is a {type(given).__name__} that the engine does not step; pass engine.optimizer")
        return self.optimizer

    @contextmanager
    def whole_optimizer(self) -> Iterator[None]:
        """Stage 3 gives its optimizer one group of parameters at a time; inside, it has all of them."""
        if self.stage != 3:
            yield
            return
        self._zero._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self._zero._clear_fp32_optimizer_param_groups()

    def check(self) -> None:
        """Raise if the partitions lie elsewhere than at attach: averages would be written where nobody looks."""
        if [partition.data_ptr() for partition in self.partitions] != self._held:
            raise RuntimeError("the engine has moved its partitions (offload_states) since attach; detach and attach again")

    @contextmanager
    def _checks_inside(self) -> Iterator[None]:
        """Stage 3 compares its order of parameters with that of worker 0, which would wait for its own node's next step."""
        module: Any = sys.modules[type(self._zero.parameter_offload.get_param_coordinator()).__module__]
        name = "assert_ints_same_as_other_ranks"
        usual = getattr(module, name)
        setattr(module, name, self._check_order)
        try:
            yield
        finally:
            setattr(module, name, usual)

    def _check_order(self, order: list[int]) -> None:
        if any(other != order for other in exchange_reports(list(order), self._group, self.partitions[0].device)):
            raise RuntimeError("the workers of a node use their parameters in different orders; train the same model on all")

    def keep_inside(self) -> Callable[[], None]:
        """From now on nothing of the engine's own meets other nodes; returns what ends that."""
        if self.stage != 3:
            return _nothing
        coordinator: Any = self._zero.parameter_offload.get_param_coordinator()
        usual = coordinator.reset_step

        def reset_step() -> None:
            with self._checks_inside():
                usual()

        def end() -> None:
            if vars(coordinator).get("reset_step") is reset_step:
                del coordinator.reset_step

        coordinator.reset_step = reset_step
        return end

    @torch.no_grad()
    def refresh(self) -> None:
        """As at the end of the engine's own step."""
        if self.stage != 3:
            self._zero.update_lp_params()
            return
        self._zero._partition_all_parameters()
        for index in range(len(self.partitions)):
            self._zero._reassign_or_swap_out_partitioned_parameters(index)
        kept_whole = self._zero.persistent_parameters
        if kept_whole:
            gather = kept_whole[0].all_gather  # the engine's own
            gather(kept_whole)

    def held(self) -> dict[str, Tensor]:
        found = {f"partition {index}": partition.detach() for index, partition in enumerate(self.partitions)}
        return {**found, **{f"frozen {index}": tensor.detach() for index, tensor in enumerate(self.frozen)}}

    def whole(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor]]]:
        module = self._module
        buffers = dict(module.named_buffers())
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name in module.state_dict():
            if name in parameters:
                parameter = parameters[name]
                dtype = torch.float32 if parameter.requires_grad else parameter.dtype
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                yield name, dtype, shape, functools.partial(_gathered, parameter)
            elif name in buffers:
                yield name, buffers[name].dtype, tuple(buffers[name].shape), buffers[name].detach

    def _in_ranges(self, fragments: int) -> Iterator[Tensor]:
        flats = [partition.detach() for partition in self.partitions]
        total, begin = sum(flat.numel() for flat in flats), 0
        for flat in flats:
            end = begin + flat.numel()
            borders = [part * total // fragments for part in range(1, fragments)]
            cuts = [begin, *(border for border in borders if begin < border < end), end]
            yield from (flat[first - begin : last - begin] for first, last in itertools.pairwise(cuts))
            begin = end

    def _by_parameter(self) -> Iterator[Tensor]:
        for flat, parameters in zip(self.partitions, self._zero.fp16_groups, strict=True):
            for piece, parameter in zip(
                flat.detach().split([p.partition_numel() for p in parameters]), parameters, strict=True
            ):
                # The last shards are filled up with whatever was in memory. A worker may hold nothing of a parameter.
                begin = self.node.index(dist.get_rank()) * piece.numel()
                own: Any = piece[: max(0, min(piece.numel(), parameter.ds_numel - begin))]
                own.whole_size = parameter.ds_numel
                yield own


def _nothing() -> None:
    pass


def _check(engine: Any, zero: Any) -> None:
    known = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")
    if type(zero).__name__ not in known:
        raise ValueError(f"the engine's optimizer is a {type(zero).__name__}; pass an optimizer to deepspeed.initialize")
    what = {
        "the optimizer is swapped to NVMe": getattr(zero, "swap_optimizer", False),
        "zero_hpz_partition_size": (engine.zero_hpz_partition_size() or 1) > 1,
        "experts (MoE)": getattr(engine, "has_moe_layers", False),
        "zenflow": getattr(zero, "zenflow", False),
        "enable_sanity_checks": engine.is_sanity_checks_enabled(),
        "a pipeline": getattr(engine, "pipeline_parallelism", False),
    }
    for name, is_on in what.items():
        if is_on:
            raise ValueError(f"{name}: the engine is more than float32 partitions on a node of its own; switch it off")


def _gathered(parameter: Any) -> Tensor:
    """The whole of one parameter, in float32 where it is trained; collective inside the node."""
    if parameter.requires_grad:
        import deepspeed.utils as tools

        gather: Any = tools.safe_get_full_fp32_param  # type: ignore[attr-defined]
        found: Tensor = gather(parameter)
        return found.detach().view(getattr(parameter, "ds_shape", parameter.shape))
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()  # type: ignore[no-any-return]
    import deepspeed

    zero: Any = deepspeed.zero
    with zero.GatheredParameters([parameter]):
        return parameter.detach().clone()  # type: ignore[no-any-return]


class EngineCounter:
    """Counts an engine's steps: each is an attempt, also one that its loss scaler skips."""

    def __init__(self, engine: Any, shards: ZeroShards, watcher: Watcher, in_passing: Callable[[], None]) -> None:
        self._watcher, self._in_passing, self._shards = watcher, in_passing, shards
        self.paused = False
        self._optimizer: Any = engine.optimizer
        self._step = self._optimizer.step
        self._optimizer.step = self._stepped  # what the engine calls at the end of an accumulation
        self._handle = engine.register_forward_pre_hook(lambda module, args: in_passing())
        self._end = shards.keep_inside()

    def remove(self) -> None:
        if vars(self._optimizer).get("step") == self._stepped:
            del self._optimizer.step
        self._handle.remove()
        self._end()

    def settle(self) -> None:
        """Nothing is ever owed: a step has ended when it is counted."""

    def forget(self) -> None:
        """Nothing is remembered."""

    def _stepped(self, *args: Any, **kwargs: Any) -> Any:
        self._in_passing()
        self._watcher.step_begins()
        found = self._step(*args, **kwargs)
        self._shards.check()
        self._watcher.attempted()
        return found
