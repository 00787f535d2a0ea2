"""Letting accelerate shard inside a node only. What it does of its own accord reduces gradients over all workers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from cocod_accel.sync.zero import NodeMpu


def node_parallelism(workers_per_node: int) -> Any:
    """For ``Accelerator(parallelism_config=...)`` with FSDP2: ``prepare`` shards inside nodes of so many workers.

    Each worker gets data of its own, as with accelerate's own ``ParallelismConfig(dp_replicate_size=R, dp_shard_size=S)``.
    But that one all-reduces gradients between the nodes in every step, and this one leaves nodes to ``attach``.
    """
    from accelerate.parallelism_config import ParallelismConfig

    class NodeParallelism(ParallelismConfig):
        """Nodes are dimension ``dp_replicate`` of the mesh, of which FSDP is not told."""

        @property
        def fsdp_dim_names(self) -> list[str]:
            return ["dp_shard_cp"]

    # Nothing is connected before there is an Accelerator.
    num_workers = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if type(workers_per_node) is not int or workers_per_node < 2 or num_workers % workers_per_node:
        raise ValueError(
            f"workers_per_node={workers_per_node!r}: must be a number above 1 that divides the {num_workers} workers"
        )
    return NodeParallelism(dp_replicate_size=num_workers // workers_per_node, dp_shard_size=workers_per_node)


@contextmanager
def zero_inside(mpu: NodeMpu) -> Iterator[None]:
    """``accelerator.prepare(model, optimizer)`` stands inside: its DeepSpeed engine shards over the node of ``node_mpu``."""
    deepspeed: Any = importlib.import_module("deepspeed")
    usual = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        settings = kwargs.get("config_params") or kwargs.get("config")
        if isinstance(settings, dict):
            # accelerate has counted all workers.
            accumulated = settings.get("gradient_accumulation_steps", 1)
            micro = settings["train_micro_batch_size_per_gpu"]
            settings["train_batch_size"] = micro * accumulated * mpu.get_data_parallel_world_size()
        return usual(*args, **{**kwargs, "mpu": mpu})

    deepspeed.initialize = initialize
    try:
        yield
    finally:
        deepspeed.initialize = usual
