"""One state from those of several workers, for a run that goes on with another number of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cocod_accel.checkpoint import safetree as packing


def merged(files: Sequence[Path], weights: Sequence[float]) -> Any:
    """One state from those of all saved workers: floating values are weighted means, counters the largest."""
    states = [packing.read(file) for file in files]
    parts = [{key: state[key] for key in ("model", "buffers", "optimizers")} for state in states]
    sync = {key: max(state["sync"][key] for state in states) for key in ("attempts", "rounds")}
    others = {key: states[0][key] for key in ("position", "custom", "schedulers", "scaler")}
    return {**_merge(parts, weights), **others, "sync": {**states[0]["sync"], **sync}}


def _merge(nodes: Sequence[Any], weights: Sequence[float], key: Any = None) -> Any:
    first = nodes[0]
    if isinstance(first, dict):
        held = {name: [i for i, node in enumerate(nodes) if name in node] for node in nodes for name in node}
        return {
            name: _merge([nodes[i][name] for i in owners], [weights[i] for i in owners], name)
            for name, owners in held.items()
        }
    if isinstance(first, list | tuple):
        return type(first)(_merge(items, weights, key) for items in zip(*nodes, strict=True))
    if isinstance(first, Tensor):
        if key != "step" and (first.is_floating_point() or first.is_complex()):
            wide = torch.complex128 if first.is_complex() else torch.float64
            total = sum((w * node.to(wide) for w, node in zip(weights, nodes, strict=True)), torch.zeros((), dtype=wide))
            return total.div(math.fsum(weights)).to(first.dtype)
        return functools.reduce(torch.maximum, nodes)
    is_number = isinstance(first, int | float) and not isinstance(first, bool)
    return max(nodes) if is_number else first
