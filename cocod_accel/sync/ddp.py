"""The DDP side: one communication hook per model, and the switches of a local phase.

Torch lets a DDP model have one communication hook, once. :class:`HookRouter` is that hook; what it does is
changed by attaching and detaching. In a local phase DDP's own gradient synchronisation is switched off instead of being
answered by an identity hook: that saves copying every gradient into buckets and back, and it also stops the buffer
broadcasts and the bitmap all-reduce of ``find_unused_parameters``. Should something synchronise all the same
(``accelerator.trigger_sync_in_backward``), the hook leaves the gradients of such an algorithm as they are.
"""

# No "from __future__ import annotations" here: torch compares the hook's annotations with real classes.
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cocod_accel.algorithms import Algorithm, Bucket
from cocod_accel.comm.device import is_capturing
from cocod_accel.comm.groups import ChannelKey, Channels, launch_like_ddp
from cocod_accel.comm.handles import Handle
from cocod_accel.sync.deepspeed import is_engine

ROUTERS: "WeakKeyDictionary[DistributedDataParallel, HookRouter]" = WeakKeyDictionary()

_SHARDED_MODEL = "it shards flat parameters; use fully_shard (FSDP2) over a node, or DistributedDataParallel"
_SHARDED_OPTIMIZER = "its state is sharded over the workers (ZeRO), so none can step alone; use a plain optimizer"
_REFUSED = {
    "FullyShardedDataParallel": _SHARDED_MODEL,
    "DataParallel": "it is one process; use DistributedDataParallel",
    "ZeROOptimizer": _SHARDED_OPTIMIZER,
    "ZeroRedundancyOptimizer": _SHARDED_OPTIMIZER,
}


def refuse_sharded(thing: object, role: str) -> None:
    """Raise for wrappers that no algorithm here can train; by name, because importing them is expensive."""
    for cls in type(thing).__mro__:
        if cls.__name__ in _REFUSED:
            raise TypeError(f"{role} is a {cls.__name__}: {_REFUSED[cls.__name__]}")


def unwrap(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The user's module and the DDP wrapper around it, if any; ``torch.compile`` and Fabric may sit around it."""
    ddp = None
    module = model
    while True:
        refuse_sharded(module, "the model")
        if isinstance(module, DistributedDataParallel):
            if ddp is not None:
                raise TypeError(
                    "the model is wrapped in DistributedDataParallel twice; the inner one would synchronise; wrap once"
                )
            ddp, module = module, module.module
        elif is_engine(module):
            module = module.module  # type: ignore[assignment]
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        elif is_named(module, "_FabricModule"):
            module = module._forward_module  # type: ignore[assignment]
        else:
            return module, ddp


def is_named(thing: object, name: str) -> bool:
    """Whether this is another package's wrapper; by name, because importing that is expensive."""
    return any(cls.__name__ == name for cls in type(thing).__mro__)


def torch_optimizers(optimizer: object) -> list[Optimizer]:
    """The torch optimizers behind what the user passed: one or a list, bare or prepared by accelerate or Fabric."""
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if not given:
        raise ValueError("optimizer=[] is empty; pass the optimizer that trains the model")
    found = []
    for item in given:
        refuse_sharded(item, "the optimizer")
        inner: Any = item
        while is_named(inner, "AcceleratedOptimizer") or is_named(inner, "_FabricOptimizer"):
            inner = inner.optimizer  # these wrappers are Optimizers, but have no step hooks
        refuse_sharded(inner, "the optimizer")
        if not isinstance(inner, Optimizer):
            raise TypeError(f"optimizer is a {type(item).__name__}; pass a torch.optim.Optimizer or a list of them")
        found.append(inner)
    if len({id(item) for item in found}) != len(found):
        raise ValueError("optimizer lists the same optimizer twice; pass each once")
    return found


class _StockMean:
    """What DDP does without a hook; waited for in the main thread, because no Python may run in a communication thread."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group
        self._handles: list[Handle] = []

    def reduce(self, bucket: Bucket) -> None:
        self._handles.append(launch_like_ddp(bucket.flat, self._group))

    def send(self, buckets: list[Bucket]) -> None:
        """All of them are on their way."""

    def complete(self, buckets: list[Bucket]) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()


class HookRouter:
    """A DDP model's communication hook: the stock mean unless an algorithm has been put in.

    It holds the algorithm weakly: torch keeps the router as long as the model, and would so keep everything else.
    """

    def __init__(self, process_group: Any = None, num_parameters: int | None = None) -> None:
        #: Process groups of this model's own, and what they were opened for.
        self.channels: Channels | None = None
        self.channels_of: ChannelKey | None = None
        self.barrier: Any = None
        self._method: Callable[[], Algorithm | None] = _none
        self._stock = _StockMean(process_group)
        self._open: list[tuple[Bucket, Future[Tensor]]] = []
        #: Of a static graph, in whose first backward DDP gives every bucket the index 0 and calls none the last.
        self._num_parameters = num_parameters

    def take(self, method: Algorithm) -> None:
        self._method = weakref.ref(method)
        if self.barrier is not None:
            self.barrier.remove()
            self.barrier = None

    def release(self) -> None:
        self._method = _none

    def retire_static_graph(self, ddp: DistributedDataParallel | None) -> None:
        """With static_graph, DDP counts gradient hooks in its first backward; local steps have spoilt that count."""
        if ddp is not None and ddp.static_graph:
            self.barrier = ddp.register_forward_pre_hook(_refuse_training)

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        flat = bucket.buffer()
        method = self._method() or self._stock
        if is_capturing(flat.device) and method is not self._stock:
            raise RuntimeError(
                "a backward that reduces gradients is captured in a graph, which would replay without this algorithm; "
                "capture nothing, or use an algorithm that averages models"
            )
        parameters = bucket.parameters()
        if bucket.index() == 0 and (self._num_parameters is None or self._has_seen(parameters)):
            self._open = []  # in case the last backward raised half-way
        # A future must know its device, so that whoever waits for it orders its stream after ours.
        future: Future[Tensor] = Future(devices=[flat.device] if flat.device.type != "cpu" else None)
        mine = Bucket(flat, bucket.gradients(), parameters)
        self._open.append((mine, future))
        method.reduce(mine)
        if self._is_last(bucket):
            opened, self._open = self._open, []
            buckets = [ready for ready, _ in opened]
            method.send(buckets)
            method.complete(buckets)
            for ready, waiter in opened:
                waiter.set_result(ready.flat)
        return future

    def _has_seen(self, parameters: list[Tensor]) -> bool:
        return any(known is parameters[0] for ready, _ in self._open for known in ready.parameters)

    def _is_last(self, bucket: dist.GradBucket) -> bool:  # type: ignore[name-defined]
        if self._num_parameters is None:
            return bool(bucket.is_last())
        return sum(len(ready.parameters) for ready, _ in self._open) == self._num_parameters

    def __reduce__(self) -> tuple[Any, ...]:
        return HookRouter, ()  # a model may be copied or saved; process groups may not

    def __deepcopy__(self, memo: Any) -> "HookRouter":
        return HookRouter()


def _none() -> None:
    return None


def _refuse_training(module: nn.Module, args: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this DDP model has static_graph=True and took local steps, so DDP would stop synchronising in silence; "
            "wrap the module in a fresh DistributedDataParallel"
        )


def _route(state: HookRouter, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    return state(bucket)


def router_of(ddp: DistributedDataParallel) -> HookRouter:
    """This model's router, registered on first use."""
    router = ROUTERS.get(ddp)
    if router is None:
        if isinstance(
            vars(ddp).get("forward"), _Bypass
        ):  # a copy of an attached model: end the local phase it has inherited
            del ddp.forward
            ddp.require_backward_grad_sync = True
        ignored = ignored_names(ddp)
        reduced = [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
        router = HookRouter(ddp.process_group, len(reduced) if ddp.static_graph else None)
        taken = RuntimeError(
            "this DDP model already has a communication hook, and torch allows one; "
            "attach to a fresh DistributedDataParallel without register_comm_hook"
        )
        # A router without a group came along when the model was copied, and is not registered with the copy.
        if any(not isinstance(state, HookRouter) for _, state in getattr(ddp, "_comm_hooks", ())):
            raise taken
        try:
            ddp.register_comm_hook(router, _route)
        except RuntimeError as error:
            raise taken from error
        ROUTERS[ddp] = router
    return router


def under_no_sync(ddp: DistributedDataParallel) -> bool:
    """Whether the loop is inside ``no_sync()``, which stores False; a local phase stores 0."""
    return ddp.require_backward_grad_sync is False


class _Bypass:
    """Stands in for DDP's forward while nothing is communicated."""

    def __init__(self, module: nn.Module, is_stray: bool = False) -> None:
        self.module = module
        self.is_stray = is_stray

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_stray and self.module.training and torch.is_grad_enabled():
            raise RuntimeError(
                "this copy of an attached model would train alone; wrap copy.module in a fresh DistributedDataParallel"
            )
        return self.module(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "_Bypass":
        return _Bypass(copy.deepcopy(self.module, memo), is_stray=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Bypass, (self.module, True)


class LocalPhase:
    """Switches off everything DDP communicates on its own; :meth:`end` puts it back.

    ``keep_gradients``: not their synchronisation, which a hook then does inside the worker's node.
    """

    _SWITCHES = (
        ("require_backward_grad_sync", 0),  # and not False, which is what no_sync() stores
        ("broadcast_buffers", False),
        # With static_graph, the first backward would reduce everything whatever the other switches say.
        ("_static_graph_delay_allreduce_enqueued", True),
    )

    def __init__(self, ddp: DistributedDataParallel, *, bypass: bool, keep_gradients: bool = False) -> None:
        self._ddp = ddp
        switches = self._SWITCHES[1:2] if keep_gradients else self._SWITCHES
        self._before = [(name, getattr(ddp, name)) for name, _ in switches if hasattr(ddp, name)]
        for name, value in switches:
            if hasattr(ddp, name):
                setattr(ddp, name, value)
        # With nothing to communicate, all that DDP's forward still does is to move inputs to its device, where it has one;
        # and its bookkeeping costs as much as all our hooks.
        stock = type(ddp).forward is DistributedDataParallel.forward and "forward" not in vars(ddp)
        self._bypasses = bypass and stock and not ddp.device_ids and not ddp.static_graph and not keep_gradients
        if self._bypasses:
            ddp.forward = _Bypass(ddp.module)  # type: ignore[method-assign]

    def end(self) -> None:
        for name, value in self._before:
            setattr(self._ddp, name, value)
        if self._bypasses:
            del self._ddp.forward


def ignored_names(ddp: DistributedDataParallel | None) -> set[str]:
    """Parameters and buffers the user told DDP to leave alone."""
    return set(getattr(ddp, "parameters_to_ignore", ()))


def unsupported_modules(module: nn.Module, local: bool) -> Iterator[str]:
    """One line for each submodule that cannot be trained this way."""
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, nn.Embedding | nn.EmbeddingBag):
            yield f"{name or 'the model'} has sparse gradients, which are not averaged; use sparse=False"
        if local and isinstance(child, nn.SyncBatchNorm):
            yield (
                f"{name or 'the model'} is a SyncBatchNorm, which communicates in every forward; "
                "use BatchNorm with this algorithm (its statistics are averaged for you)"
            )
