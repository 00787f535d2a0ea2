"""Everything that is checked before training starts: on each worker alone, then between workers.

A worker that finds something wrong must not leave the others waiting, and workers that differ would corrupt each
other's averages in silence. So each examines what it was given, all exchange one report, and all raise or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cocod_accel.algorithms import Algorithm, PipeSGD
from cocod_accel.averaging.flat import local
from cocod_accel.averaging.messages import described as described_optimizers
from cocod_accel.averaging.weights import check_weight
from cocod_accel.comm.agreement import bytes_of
from cocod_accel.comm.groups import ChannelKey, default_group, world_group
from cocod_accel.sync import deepspeed as engines
from cocod_accel.sync.ddp import ROUTERS, HookRouter, ignored_names, router_of, torch_optimizers, unsupported_modules, unwrap
from cocod_accel.sync.deepspeed import EngineRouter, check_engine, is_engine
from cocod_accel.sync.fsdp import FsdpShards, is_dtensor, is_fully_sharded
from cocod_accel.sync.fsdp import router_of as fsdp_router_of
from cocod_accel.sync.nodes import Nodes
from cocod_accel.sync.roles import check_roles, check_served
from cocod_accel.sync.shards import ShardRouter, Shards, check_node, ranks_of
from cocod_accel.sync.zero import ZeroShards, stage_of
from cocod_accel.sync.zero import router_of as zero_router_of

#: Modules that an algorithm is attached to now.
ATTACHED: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class Subject:
    """What is attached to, examined on this worker alone."""

    model: nn.Module
    module: nn.Module
    ddp: DistributedDataParallel | None
    #: A DeepSpeed engine.
    engine: Any
    router: HookRouter | EngineRouter | ShardRouter | None
    optimizers: list[Optimizer]
    trainable: list[Tensor]
    frozen: list[Tensor]
    buffer_shapes: dict[str, torch.Size]
    signature: str
    #: The ranks of this worker's node; (): it has said nothing of nodes.
    node: tuple[int, ...] = ()
    #: What its process groups must be for.
    channels: ChannelKey = ((), False, None)
    #: Whether what only the end of a round needs waits in the host's memory.
    offloads: bool = False
    #: Of a model that its node shares out; None: each worker holds a whole one.
    shards: Shards | None = None
    #: Those that train it, where not all processes do: one group, or nothing.
    workers: tuple[Any, ...] = ()

    @property
    def device(self) -> torch.device:
        """What is trained lies there."""
        parameter = next(iter([*self.trainable, *self.frozen]), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @classmethod
    def examine(
        cls,
        model: nn.Module,
        optimizer: Any,
        algorithm: Algorithm,
        weight: object,
        inner: Any = None,
        ctas: int | None = None,
        offload: str | None = None,
    ) -> Subject:
        if not isinstance(algorithm, Algorithm):
            hint = f"pass {algorithm.__name__}(...)" if isinstance(algorithm, type) else "pass e.g. CoCoDSGD(period=5)"
            raise TypeError(f"algorithm={algorithm!r} is not an algorithm; {hint}")
        check_weight(weight)
        if ctas is not None and not (type(ctas) is int and 1 <= ctas <= 64):
            raise ValueError(f"ctas={ctas!r}: must be a number from 1 to 64, or None for NCCL's own choice; 4 to 8 is usual")
        if offload not in (None, "cpu"):
            raise ValueError(f'offload={offload!r}: must be "cpu", or None to keep everything on the model\'s device')
        if offload is not None and (algorithm.reduces_gradients or algorithm.is_served):
            raise ValueError(f'offload="cpu": {algorithm.name} keeps no models that could be moved; leave it out')
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module")
        module, ddp = unwrap(model)
        if algorithm.is_served:
            check_served(module, ddp, is_engine(model) or is_fully_sharded(module), inner)
        if module in ATTACHED:
            raise RuntimeError("an algorithm is attached to this model already; call sync.detach() first")
        engine = model if is_engine(model) else None
        shards = _shards_of(module, engine, algorithm, inner)
        if engine is not None and shards is None:
            check_engine(engine, algorithm)
        optimizers = [shards.of_engine(optimizer)] if isinstance(shards, ZeroShards) else torch_optimizers(optimizer)
        given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        if algorithm.refuses_scaler and any(_is_scaled(item) for item in given):
            raise ValueError(algorithm.refuses_scaler)
        is_bare = ddp is None and engine is None and shards is None
        if is_bare and not algorithm.is_served and world_group() is not None:
            raise TypeError(
                f"the model is a bare {type(module).__name__} while {dist.get_world_size()} processes run; "
                "wrap it first: accelerator.prepare(model) or DistributedDataParallel(model)"
            )
        if ddp is not None and ddp.mixed_precision is not None:
            raise ValueError("DDP(mixed_precision=...) keeps a second set of parameters; use torch.autocast instead")
        node = shards.node if shards is not None else () if inner is None else _node_of(inner, algorithm, ddp)
        if isinstance(algorithm, PipeSGD):
            _check_pipe(module, ddp)
        if algorithm.reduces_gradients and ddp is not None and ddp in ROUTERS and ROUTERS[ddp].barrier is not None:
            raise ValueError(
                "static_graph=True after local steps: DDP no longer synchronises; wrap the module in a fresh DDP"
            )
        for line in unsupported_modules(module, local=not algorithm.reduces_gradients):
            raise ValueError(line)
        named = dict(module.named_parameters())
        for name, parameter in named.items():
            if shards is None and is_dtensor(parameter):
                raise TypeError(
                    f"parameter {name} is a sharded DTensor; use fully_shard over a node, or DistributedDataParallel"
                )
        if not isinstance(shards, ZeroShards):
            _check_ownership(optimizers, named)
        ignored = ignored_names(ddp)
        kept = {name: parameter for name, parameter in named.items() if name not in ignored}
        if shards is not None:
            trainable, frozen = shards.trainable, shards.frozen
        else:
            trainable = [parameter for parameter in kept.values() if parameter.requires_grad]
            frozen = [parameter for parameter in kept.values() if not parameter.requires_grad]
        num_trainable = len(trainable)
        if algorithm.fragments > max(1, num_trainable):
            raise ValueError(
                f"fragments={algorithm.fragments} is more than the model's {num_trainable} trainable parameters, which are "
                f"not cut; use {max(1, num_trainable)} at most"
            )
        return cls(
            model=model,
            module=module,
            ddp=ddp,
            engine=engine,
            router=_router_of(module, ddp, engine, shards),
            optimizers=optimizers,
            trainable=trainable,
            frozen=frozen,
            buffer_shapes={name: buffer.shape for name, buffer in module.named_buffers() if name not in ignored},
            signature=_signature(module, kept, shards),
            node=node,
            # Gradients keep all the links that they can get.
            channels=(node, algorithm.payload != "fp32", None if algorithm.reduces_gradients else ctas),
            offloads=offload is not None,
            shards=shards,
        )

    @property
    def group(self) -> Any:
        """The workers this model is trained by; None if there is one."""
        if self.workers:
            return self.workers[0]
        if self.engine is not None or self.node:
            return default_group()
        if self.ddp is None or dist.get_world_size(self.ddp.process_group) == 1:
            return None
        return self.ddp.process_group

    def buffers(self) -> list[Tensor]:
        """The buffers to average, as they are bound now. Their shapes are those of attach, or the sums would be wrong."""
        found = []
        for name, shape in self.buffer_shapes.items():
            buffer = self.module.get_buffer(name)
            if buffer.shape != shape:
                raise ValueError(
                    f"buffer {name} had shape {tuple(shape)} at attach and has {tuple(buffer.shape)} now, so it cannot be "
                    "averaged; let DDP ignore it (_set_params_and_buffers_to_ignore_for_model) before attaching"
                )
            found.append(buffer)
        return found

    @contextmanager
    def bound_buffers(self) -> Iterator[None]:
        """Afterwards every buffer is bound to the tensor it is bound to now; modules may bind others meanwhile."""
        slots = [
            (owner, name, buffer)
            for owner in self.module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        try:
            yield
        finally:
            for owner, name, buffer in slots:
                owner._buffers[name] = buffer


@dataclass(frozen=True)
class Report:
    """What a worker tells the others at attach."""

    error: tuple[type[Exception], str] | None = None
    weight: float = float("nan")
    algorithm: str = ""
    period: str = ""
    signature: str = ""
    trainable_digest: str = ""
    frozen_digest: str = ""
    node: tuple[int, ...] = ()
    #: Of an algorithm that takes one per worker.
    own_period: str = ""
    #: What :attr:`Algorithm.options` names, in words.
    options: dict[str, str] = field(default_factory=dict)
    has_channels: bool = False
    is_sharded: bool = False
    #: Of a server, whose optimizer is to take the workers' numbers.
    serves: bool = False
    optimizer: str = ""

    @classmethod
    def of(
        cls,
        subject: Subject | None,
        algorithm: Algorithm,
        weight: Any,
        problem: Exception | None,
        *,
        serves: bool = False,
    ) -> Report:
        if subject is None:
            return cls(error=described(problem))
        return cls(
            weight=float(weight),
            algorithm=algorithm.name,
            period=algorithm.stated_period if algorithm.same_period else "",
            signature=subject.signature,
            trainable_digest=digest_of(subject.trainable),
            frozen_digest=digest_of(subject.frozen),
            node=subject.node,
            own_period=str(algorithm.period),
            options={name: str(getattr(algorithm, name)) for name in algorithm.options},
            has_channels=subject.router is not None and subject.router.channels_of == subject.channels,
            is_sharded=subject.shards is not None,
            serves=serves,
            optimizer=described_optimizers(subject.optimizers, subject.trainable) if algorithm.is_served else "",
        )


def described(problem: Exception | None) -> tuple[type[Exception], str] | None:
    if problem is None:
        return None
    kind = next((kind for kind in (TypeError, ValueError) if isinstance(problem, kind)), RuntimeError)
    return kind, str(problem)


def raise_problems(reports: Sequence[Report], problem: Exception | None) -> None:
    if problem is not None:
        raise problem
    for rank, report in enumerate(reports):
        if report.error is not None:
            kind, message = report.error
            raise kind(f"rank {rank}: {message}")


def check_agreement(reports: Sequence[Report], algorithm: Algorithm) -> None:
    first = reports[0]
    check_roles(reports, algorithm)
    for rank, other in enumerate(reports[1:], start=1):
        for what, fix in (
            ("algorithm", "pass the same algorithm on every worker"),
            ("period", "pass the same period on every worker (AsynLocalSGD takes one per worker)"),
            *((name, "pass the same on every worker") for name in algorithm.options),
        ):
            ours, theirs = (r.options[what] if what in r.options else getattr(r, what) for r in (first, other))
            if ours != theirs:
                raise ValueError(f"workers differ in {what}: rank 0 has {ours}, rank {rank} has {theirs}; {fix}")
        if first.signature != other.signature:
            raise ValueError(
                f"workers differ in their models: rank {rank} has other parameters or buffers than rank 0 "
                "(name, shape, dtype, memory format or requires_grad); build the same model on every worker"
            )
    nodes = Nodes.of([report.node for report in reports], rank=0)
    for rank, other in enumerate(reports):
        like = nodes.first_namesake(rank) if other.is_sharded else 0
        if reports[like].frozen_digest != other.frozen_digest:
            raise ValueError(
                f"workers differ in frozen parameters, which are never sent: rank {rank} has other values than rank {like}; "
                "load the same weights on every worker"
            )
    for ranks in nodes.members:
        periods = {reports[rank].own_period for rank in ranks}
        if len(periods) > 1:
            raise ValueError(f"the workers of ranks {list(ranks)} share a node but differ in period; pass the same one")
    check_weights(algorithm, nodes, [report.weight for report in reports], sharded=first.is_sharded)


def start_equal(reports: Sequence[Report], nodes: Nodes) -> bool:
    """Whether all workers begin with the same parameters; of sharded models, all namesakes."""
    return all(
        report.trainable_digest == reports[nodes.first_namesake(rank) if report.is_sharded else 0].trainable_digest
        for rank, report in enumerate(reports)
    )


def check_weights(algorithm: Algorithm, nodes: Nodes, weights: Sequence[float], *, sharded: bool = False) -> None:
    for ranks in nodes.members if sharded else ():
        own = [weights[rank] for rank in ranks]
        if len(set(own)) > 1:
            raise ValueError(
                f"the workers of ranks {list(ranks)} share a model, whose gradients are averaged with equal weights, "
                f"got {own}; pass the same weight inside a node"
            )
    between = nodes.between(weights)
    if algorithm.needs_equal_weights and not between.equal:
        raise ValueError(
            f"{type(algorithm).__name__} averages with equal weights, got {list(between.values)}; "
            "pass the same weight on every worker and a period in proportion to its speed"
        )


def _shards_of(module: nn.Module, engine: Any, algorithm: Algorithm, inner: Any) -> Shards | None:
    """A model that its node shares out; None for a whole one."""
    is_zero = engine is not None and stage_of(engine) > 0 and inner is not None
    if not is_zero and not is_fully_sharded(module):
        return None
    if algorithm.reduces_gradients:
        raise ValueError(
            f"{type(algorithm).__name__} reduces gradients over all workers, but a sharded model's are reduced inside "
            "its node; use CoCoDSGD, LocalSGD or AsynLocalSGD"
        )
    if algorithm.optimizer_state == "average":
        raise ValueError(
            'optimizer_state="average": the optimizer state of a sharded model stays local; use "keep" or "reset"'
        )
    shards: Any = ZeroShards(engine, algorithm.fragments) if is_zero else FsdpShards(module)
    check_node(shards, inner)
    return shards  # type: ignore[no-any-return]


def _router_of(
    module: nn.Module, ddp: DistributedDataParallel | None, engine: Any, shards: Shards | None
) -> HookRouter | EngineRouter | ShardRouter | None:
    if shards is not None:
        return fsdp_router_of(module) if engine is None else zero_router_of(engine)
    if engine is not None:
        return engines.router_of(engine)
    return None if ddp is None else router_of(ddp)


def _is_scaled(optimizer: Any) -> bool:
    scaler = getattr(optimizer, "scaler", None)
    return scaler is not None and bool(scaler.is_enabled())


def _node_of(inner: Any, algorithm: Algorithm, ddp: DistributedDataParallel | None) -> tuple[int, ...]:
    """The ranks of the group that a worker says it shares a node with."""
    stated = ranks_of(inner)
    if algorithm.reduces_gradients:
        raise ValueError(
            f"{type(algorithm).__name__} reduces gradients over all workers, so there is nothing to do between nodes; "
            "leave inner out, or use CoCoDSGD"
        )
    ranks = stated
    if ddp is not None:
        wrapped = tuple(dist.get_process_group_ranks(ddp.process_group))
        if wrapped not in (ranks, tuple(range(dist.get_world_size()))):
            raise ValueError(
                f"inner has the ranks {list(ranks)}, the model is wrapped for {list(wrapped)}; "
                "use DistributedDataParallel(model, process_group=inner), or wrap it for all workers"
            )
        if ddp.find_unused_parameters and wrapped != ranks:
            raise ValueError(
                "find_unused_parameters communicates with all workers in every step; "
                "use DistributedDataParallel(model, process_group=inner, find_unused_parameters=True)"
            )
        if not algorithm.same_period and wrapped != ranks:
            raise ValueError(
                "DDP synchronises all workers in its second step, which may deadlock nodes with different periods; "
                "use DistributedDataParallel(model, process_group=inner)"
            )
    return ranks


def _check_pipe(module: nn.Module, ddp: DistributedDataParallel | None) -> None:
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and ddp is not None:
            raise ValueError(f"PipeSGD does not delay complex gradients under DDP ({name}); use another algorithm")


def _check_ownership(optimizers: Sequence[Optimizer], named: dict[str, nn.Parameter]) -> None:
    owned = {id(parameter) for parameter in named.values()}
    for optimizer in optimizers:
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in owned]
        if foreign:
            raise ValueError(
                f"the optimizer holds {len(foreign)} parameter(s) the model does not, the first of shape "
                f"{tuple(foreign[0].shape)}; build the optimizer from this model's parameters()"
            )


def group_of(model: object) -> Any:
    """The group to report a problem to, as far as it can be told from a model that may be anything."""
    while isinstance(model, nn.Module):
        if isinstance(model, DistributedDataParallel):
            return model.process_group if dist.get_world_size(model.process_group) > 1 else None
        model = getattr(model, "_orig_mod", getattr(model, "_forward_module", None))
    return default_group()


def _signature(module: nn.Module, parameters: dict[str, nn.Parameter], shards: Shards | None) -> str:
    rows = [
        f"{n} {tuple(getattr(p, 'ds_shape', p.shape))} {p.dtype} {'' if hasattr(p, 'ds_shape') else p.stride()} "
        f"{p.requires_grad} {getattr(p, 'placements', '')}"
        for n, p in parameters.items()
    ]
    rows += [f"{n} {tuple(b.shape)} {b.dtype}" for n, b in module.named_buffers()]
    if shards is not None:
        rows.append(shards.signature)
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=16).hexdigest()


def digest_of(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(bytes_of(local(tensor)))
    return digest.hexdigest()
