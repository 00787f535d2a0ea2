"""The five algorithms of the paper's comparison, and two to compare with, by name."""

from __future__ import annotations

from cocod_accel.algorithms.asynlocal import AsynLocalSGD
from cocod_accel.algorithms.base import Algorithm, Bucket
from cocod_accel.algorithms.cocod import CoCoDSGD
from cocod_accel.algorithms.diloco import DiLoCo
from cocod_accel.algorithms.local import LocalSGD
from cocod_accel.algorithms.pipe import PipeSGD
from cocod_accel.algorithms.ssgd import SSGD
from cocod_accel.algorithms.streaming_diloco import StreamingDiLoCo

ALGORITHMS: dict[str, type[Algorithm]] = {
    "ssgd": SSGD,
    "pipe": PipeSGD,
    "local": LocalSGD,
    "cocod": CoCoDSGD,
    "asynlocal": AsynLocalSGD,
    "diloco": DiLoCo,
    "streaming_diloco": StreamingDiLoCo,
}

#: Those that the paper compares.
PAPERS = ("ssgd", "pipe", "local", "cocod", "asynlocal")

__all__ = [
    "ALGORITHMS", "PAPERS", "SSGD", "Algorithm", "AsynLocalSGD", "Bucket", "CoCoDSGD", "DiLoCo", "LocalSGD", "PipeSGD",
    "StreamingDiLoCo",
]  # fmt: skip
