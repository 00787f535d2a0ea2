"""Train a PyTorch model on many workers without waiting for the network or for the slowest machine.

    from cocod_accel import attach, CoCoDSGD

    model, optimizer = accelerator.prepare(model, optimizer)
    sync = attach(model, optimizer, CoCoDSGD(period=5), weight=batch_size)

The training loop stays as it is. See :func:`attach` and :class:`Sync`.
"""

import gc
import os

#: The process that started this one. Noted before torch is imported: that takes seconds, in which it may end.
_parent = os.getppid()

# Importing torch makes a million objects, none of them garbage: looking for some is a fifth of the time that it takes.
_collects = gc.isenabled()
gc.disable()
try:
    from cocod_accel.algorithms import (
        ALGORITHMS,
        ASGD,
        SSGD,
        Algorithm,
        AsynLocalSGD,
        CoCoDSGD,
        DiLoCo,
        LocalSGD,
        PipeSGD,
        StreamingDiLoCo,
    )
    from cocod_accel.averaging.rules import Outer
    from cocod_accel.averaging.server import Served
    from cocod_accel.checkpoint.checkpoints import Checkpoints, Resumed
    from cocod_accel.checkpoint.export import export_model
    from cocod_accel.checkpoint.files import CheckpointError
    from cocod_accel.members.settings import Members, MembersError
    from cocod_accel.sharding.loader import pass_through
    from cocod_accel.sharding.plan import WorkPlan, plan_workers
    from cocod_accel.sharding.sampler import ShardSampler
    from cocod_accel.sharding.speeds import Measured, measure_speeds
    from cocod_accel.sync.attach import attach
    from cocod_accel.sync.prepare import node_parallelism, zero_inside
    from cocod_accel.sync.serve import serve
    from cocod_accel.sync.sync import Stats, Sync
    from cocod_accel.sync.zero import node_mpu
finally:
    if _collects:
        gc.enable()

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "ASGD",
    "SSGD",
    "Algorithm",
    "AsynLocalSGD",
    "CheckpointError",
    "Checkpoints",
    "CoCoDSGD",
    "DiLoCo",
    "LocalSGD",
    "Measured",
    "Members",
    "MembersError",
    "Outer",
    "PipeSGD",
    "Resumed",
    "Served",
    "ShardSampler",
    "Stats",
    "StreamingDiLoCo",
    "Sync",
    "WorkPlan",
    "attach",
    "export_model",
    "measure_speeds",
    "node_mpu",
    "node_parallelism",
    "pass_through",
    "plan_workers",
    "serve",
    "zero_inside",
]
