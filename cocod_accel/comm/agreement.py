"""What workers tell each other before they train: reports, errors, checksums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def exchange_reports(report: Any, group: Any) -> list[Any]:
    """Every worker's report, in rank order; a group of None is this worker alone."""
    if group is None:
        return [report]
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    return reports


def try_together(call: Callable[[], T], group: Any) -> tuple[list[T], str | None]:
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
    reports: list[tuple[T, str | None]] = exchange_reports((value, error), group)
    for rank, (_, message) in enumerate(reports):
        if message is not None:
            return [], f"rank {rank}: {message}"
    return [result for result, _ in reports], None


def bytes_of(tensor: Tensor) -> Any:
    """The raw bytes of a tensor's values as a buffer object, for checksums."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
