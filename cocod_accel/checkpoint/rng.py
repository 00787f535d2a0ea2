"""The state of every random number generator that models, dropout and users' own data may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from cocod_accel.comm.device import device_in_use, runs_ahead


def random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    device = device_in_use()
    if runs_ahead(device):
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    device = device_in_use()
    if runs_ahead(device) and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


@contextmanager
def kept_randomness() -> Iterator[None]:
    """Whatever is drawn inside has not been drawn afterwards."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
