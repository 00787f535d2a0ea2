"""How long a round's transfer takes, and its coding; no model is changed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from cocod_accel.averaging.coder import coded_bytes, time_coding
from cocod_accel.averaging.flat import FlatCopy
from cocod_accel.averaging.route import Route
from cocod_accel.comm.device import wait_for_device


def time_transfer(parameters: Sequence[Tensor], extras: Sequence[Tensor], codec: str, route: Route) -> float:
    """Seconds that zeros of the size of a round's payload take to be summed, from here on."""
    comm = route.comm
    if route.is_alone or not parameters:
        return 0.0
    flat = FlatCopy(parameters, extras)
    payload = [torch.zeros_like(buffer) for buffer in flat.buffers]
    if codec != "fp32":  # a coded exchange sends as much as a ring that sums its bytes
        sizes = [coded_bytes(codec, core.numel(), comm.size, comm.num_shards) for core in flat.cores]
        payload = [c.new_zeros(math.ceil(n / c.element_size())) for c, n in zip(flat.cores, sizes, strict=True)]
        payload += [torch.zeros_like(tail) for tail in flat.tails]
    device = parameters[0].device
    wait_for_device(device)
    begin = time.perf_counter()
    comm.launch(payload).wait()
    wait_for_device(device)
    return time.perf_counter() - begin


def time_payload_coding(parameters: Sequence[Tensor], codec: str, route: Route) -> float:
    """Seconds that the main thread takes to code a round's payload; sends nothing."""
    if codec == "fp32" or route.is_alone or not parameters:
        return 0.0
    total = 0.0
    for core in FlatCopy(parameters).cores:
        # A generator of its own: a run must not draw other numbers because something was timed.
        core.normal_(generator=torch.Generator(core.device).manual_seed(0))
        total += time_coding(codec, core, route.comm)
    return total
