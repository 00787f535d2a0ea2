"""What workers tell each other before they train: reports, errors, checksums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cocod_accel.comm.device import current
from cocod_accel.comm.meeting import Seat

T = TypeVar("T")


def exchange_reports(
    report: Any, group: Any, device: torch.device | None = None, *, what: str = "exchanging figures"
) -> list[Any]:
    """Every worker's report, in rank order; a group of None is this worker alone.

    ``device``: what this worker trains on. NCCL sends objects through the current device, which is everybody's first one
    in a loop that never called ``set_device``. ``what``: this worker is doing; workers that do different things raise.
    """
    if group is None:
        return [report]
    seat = Seat.for_calls(group)
    if seat is not None:
        seat.meets(what)
    reports: list[Any] = [None] * dist.get_world_size(group)
    with current(torch.device("cpu") if device is None else device):
        dist.all_gather_object(reports, report, group=group)
    return reports


def try_together(call: Callable[[], T], group: Any, device: torch.device | None = None) -> tuple[list[T], str | None]:
    """Call something that may fail on every worker; what it returned on each, or the first worker's error in words.

    Whatever goes wrong on one worker, the others hear of it before anybody waits.
    """
    value: T | None = None
    error: str | None = None
    try:
        value = call()
    except Exception as problem:
        lines = str(problem).splitlines() or [type(problem).__name__]
        error = lines[0] if isinstance(problem, ValueError | OSError) else f"{type(problem).__name__}: {lines[0]}"
    reports: list[tuple[T, str | None]] = exchange_reports((value, error), group, device)
    for rank, (_, message) in enumerate(reports):
        if message is not None:
            return [], f"rank {rank}: {message}"
    return [result for result, _ in reports], None


def bytes_of(tensor: Tensor) -> Any:
    """The raw bytes of a tensor's values as a buffer object, for checksums."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
