"""The five algorithms of the paper's comparison, and two to compare with, by name; and one with a server."""

from __future__ import annotations

from cocod_accel.algorithms.asgd import ASGD
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

#: Those that take one process more, for a server (:func:`cocod_accel.serve`).
SERVED: dict[str, type[Algorithm]] = {"asgd": ASGD}

#: All that ``algorithm.name`` may be.
NAMED: dict[str, type[Algorithm]] = {**ALGORITHMS, **SERVED}

#: Those that the paper compares.
PAPERS = ("ssgd", "pipe", "local", "cocod", "asynlocal")

__all__ = [
    "ALGORITHMS", "ASGD", "NAMED", "PAPERS", "SERVED", "SSGD", "Algorithm", "AsynLocalSGD", "Bucket", "CoCoDSGD", "DiLoCo",
    "LocalSGD", "PipeSGD", "StreamingDiLoCo",
]  # fmt: skip
