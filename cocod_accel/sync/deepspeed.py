"""The DeepSpeed side: an engine at ZeRO stage 0 keeps whole models and the user's own optimizer, so it can take local steps.

While an algorithm is attached, the engine's own gradient all-reduce is off. Algorithms that reduce gradients do it when the
optimizer is about to step, once for all accumulated backwards. Known by class name: importing deepspeed is expensive.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from cocod_accel.algorithms import Algorithm, Bucket
from cocod_accel.comm.groups import ChannelKey, Channels

ROUTERS: WeakKeyDictionary[Any, EngineRouter] = WeakKeyDictionary()


def is_engine(model: object) -> bool:
    """Whether a model is a DeepSpeed engine."""
    return any(cls.__name__ == "DeepSpeedEngine" for cls in type(model).__mro__)


def prepare_for_cpu() -> None:
    """Let DeepSpeed run on CPUs, without compiling its shared-memory all-reduce for more than a minute: it is not used."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed.ops
    except ImportError:  # whoever needs it says so
        return
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def check_settings(stage: int, fp16: bool, bf16: bool) -> None:
    """Refuse what a DeepSpeed configuration says before an engine is made of it."""
    if stage > 0:
        why = "no worker holds a whole optimizer state, so none can step alone"
        fix = 'use "stage": 0, or shard inside nodes (node_mpu and attach(inner=), or cluster.shard)'
        raise ValueError(f"zero_optimization.stage={stage}: {why}; {fix}")
    for name, is_on in (("fp16.enabled", fp16), ("bf16.enabled", bf16)):
        if is_on:
            why = "the engine trains copies of the parameters and communicates in every step"
            fix = '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}'
            raise ValueError(f"{name}=true: {why}; use {fix}")


def check_engine(engine: Any, algorithm: Algorithm) -> None:
    """Refuse settings under which an engine has no whole model, or communicates on its own."""
    check_settings(int(engine.zero_optimization_stage()), engine.fp16_enabled(), engine.bfloat16_enabled())
    if algorithm.reduces_gradients and getattr(engine, "torch_autocast_z0_gradscaler", None):
        why = "a worker that overflows skips its step, in which gradients are reduced"
        raise ValueError(f'torch_autocast.dtype=float16: {why}; use "bfloat16", or cocod or local')
    if getattr(engine, "pipeline_parallelism", False) or engine.dp_world_size != dist.get_world_size():
        raise ValueError("the engine splits the model over workers; use data parallelism alone")


def router_of(engine: Any) -> EngineRouter:
    """This engine's router, made on first use."""
    router = ROUTERS.get(engine)
    if router is None:
        router = ROUTERS[engine] = EngineRouter(engine)
    return router


class EngineRouter:
    """Puts an algorithm in the place of an engine's gradient all-reduce, and the all-reduce back."""

    barrier = None

    def __init__(self, engine: Any) -> None:
        #: Process groups of this model's own, and what they were opened for.
        self.channels: Channels | None = None
        self.channels_of: ChannelKey | None = None
        self._engine = engine
        self._was_on = bool(engine.enable_backward_allreduce)
        #: The largest norm of a gradient; 0: any.
        self.clipping = 0.0

    def take(self, method: Algorithm) -> None:
        self._was_on = bool(self._engine.enable_backward_allreduce)
        self._engine.enable_backward_allreduce = False
        # The engine would ask all workers for their norms in every step, and clip before gradients are reduced.
        self.clipping = float(self._engine.gradient_clipping())
        self._engine._config.gradient_clipping = 0.0

    def release(self) -> None:
        self._engine.enable_backward_allreduce = self._was_on
        self._engine._config.gradient_clipping = self.clipping

    @torch.no_grad()
    def before_step(self, method: Algorithm, parameters: list[Tensor]) -> None:
        """What the optimizer is to see: reduced gradients, then clipped ones."""
        if method.reduces_gradients and method.replica.route.comm.size > 1:
            reduce_gradients(method, parameters)
        if self.clipping > 0:
            torch.nn.utils.clip_grad_norm_(parameters, self.clipping)

    def retire_static_graph(self, ddp: object) -> None:
        """Nothing to do: an engine counts no hooks."""


@torch.no_grad()
def reduce_gradients(method: Algorithm, parameters: list[Tensor]) -> None:
    """Hand all gradients to an algorithm, and put what it makes of them in their place."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:  # used by another worker perhaps; all must reduce the same
            parameter.grad = torch.zeros_like(parameter)
        by_kind.setdefault((parameter.device, parameter.grad.dtype), []).append(parameter)
    buckets = []
    for members in by_kind.values():
        gradients = [_gradient(parameter) for parameter in members]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        views = [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]
        buckets.append(Bucket(flat, views, list(members)))
        method.reduce(buckets[-1])
    method.send(buckets)
    method.complete(buckets)
    for bucket in buckets:
        torch._foreach_copy_([_gradient(parameter) for parameter in bucket.parameters], bucket.gradients)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


_ENGINE_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def engine_state(engine: Any) -> dict[str, Any] | None:
    """What a DeepSpeed engine counts, and its scheduler."""
    if engine is None:
        return None
    scheduler = engine.lr_scheduler
    state = {name: getattr(engine, name) for name in _ENGINE_COUNTERS}
    return {
        **state,
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "scaler": _numbers_of(getattr(engine.optimizer, "loss_scaler", None)),
    }


def _numbers_of(scaler: Any) -> dict[str, Any] | None:
    """What a loss scaler of DeepSpeed's own counts."""
    if scaler is None:
        return None
    return {name: value for name, value in vars(scaler).items() if isinstance(value, int | float)}


def load_engine_state(engine: Any, state: dict[str, Any] | None) -> None:
    if engine is not None and state is not None:
        for name in _ENGINE_COUNTERS:
            setattr(engine, name, state[name])
        if engine.lr_scheduler is not None and state["scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(state["scheduler"])
        for name, value in (state.get("scaler") or {}).items():
            setattr(engine.optimizer.loss_scaler, name, value)
