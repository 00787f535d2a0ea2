"""Models that do not fit one worker: the trainer shards them over a node, with FSDP2 or with DeepSpeed's ZeRO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from accelerate.accelerator import Accelerator
from torch import nn

from cocod_accel.config.settings import Config
from cocod_accel.sync.prepare import zero_inside
from cocod_accel.sync.zero import node_mpu
from cocod_accel.tasks import build_optimizer

FSDP = "fsdp"


def stage_of(shard: str | None) -> int:
    """Of ZeRO; 0: it is something else."""
    return int(shard[-1]) if shard is not None and shard.startswith("zero") else 0


def deepspeed_settings(stage: int) -> dict[str, Any]:
    """For the optimizers of torch, which the configuration names."""
    return {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "steps_per_print": None,
    }


def prepared_shards(accelerator: Accelerator, config: Config, model: nn.Module, inner: Any) -> tuple[Any, Any, Any]:
    """Model and optimizer, sharded over this worker's node; and that node, as ``attach`` takes it."""
    if config.cluster.shard != FSDP:
        mpu = node_mpu(config.cluster.workers_per_replica)
        with zero_inside(mpu):
            engine, optimizer = accelerator.prepare(model, build_optimizer(config, model))
        return engine, optimizer, mpu
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model.to(accelerator.device)
    mesh = DeviceMesh.from_group(inner, accelerator.device.type)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = accelerator.prepare_optimizer(build_optimizer(config, model))
    return model, optimizer, inner


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """What is gathered at a time: the entries of outermost lists, unless they share parameters with others."""
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())

    def stands_alone(block: nn.Module) -> bool:
        own = list(block.parameters())
        return bool(own) and all(owners[id(parameter)] == 1 for parameter in own)

    children = model.children()
    if isinstance(model, nn.ModuleList | nn.Sequential):
        yield from (child for child in children if stands_alone(child))
        return
    for child in children:
        yield from _blocks(child)
