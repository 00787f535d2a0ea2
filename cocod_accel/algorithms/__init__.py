"""The five algorithms of the paper's comparison, by name."""

from __future__ import annotations

from cocod_accel.algorithms.asynlocal import AsynLocalSGD
from cocod_accel.algorithms.base import Algorithm, Bucket
from cocod_accel.algorithms.cocod import CoCoDSGD
from cocod_accel.algorithms.local import LocalSGD
from cocod_accel.algorithms.pipe import PipeSGD
from cocod_accel.algorithms.ssgd import SSGD

ALGORITHMS: dict[str, type[Algorithm]] = {
    "ssgd": SSGD,
    "pipe": PipeSGD,
    "local": LocalSGD,
    "cocod": CoCoDSGD,
    "asynlocal": AsynLocalSGD,
}

__all__ = ["ALGORITHMS", "SSGD", "Algorithm", "AsynLocalSGD", "Bucket", "CoCoDSGD", "LocalSGD", "PipeSGD"]
