"""Batches of any structure: tensors in tuples, lists and mappings, however deep.

A tuple or list is (inputs..., targets): the model gets the inputs, the loss and the metrics the targets. A mapping is passed
to the model by keyword, as Hugging Face models want it, and the loss gets the mapping; a lone tensor is input and target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def mapped(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The same structure with ``function`` of every tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(mapped(function, value) for value in batch)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    return mapped(lambda tensor: tensor.to(device, non_blocking=True), batch)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def num_samples(batch: Any) -> int:
    """How many samples a batch has: the first dimension of its first tensor."""
    first = next((tensor for tensor in _tensors(batch) if tensor.dim()), None)
    if first is None:
        raise TypeError(f"a batch of type {type(batch).__name__} holds no tensor with a dimension of samples")
    return len(first)


def pieces(batch: Any, count: int) -> list[tuple[Any, float]]:
    """A batch in at most ``count`` pieces of consecutive samples, each with its share of them."""
    if count == 1:
        return [(batch, 1.0)]
    total = num_samples(batch)
    size = -(-total // count)
    result = []
    for start in range(0, total, size):

        def cut(tensor: Tensor, start: int = start) -> Tensor:
            return tensor[start : start + size] if tensor.dim() and len(tensor) == total else tensor

        result.append((mapped(cut, batch), min(size, total - start) / total))
    return result


def outputs_and_targets(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """What the model says to a batch, and what it is compared with."""
    if isinstance(batch, Mapping):
        return model(**batch), batch
    if isinstance(batch, Tensor):
        return model(batch), batch
    *inputs, targets = batch
    return model(*inputs), targets
