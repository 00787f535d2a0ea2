"""The data and the model of these loops: two classes of points, nothing to download."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def points(count: int, seed: int = 0) -> TensorDataset:
    """Points in 20 dimensions; the label is the sign of their sum."""
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))


def digest(model: nn.Module) -> float:
    """A number that is the same on all workers if their models are."""
    return sum(value.detach().double().abs().sum().item() for value in model.parameters())


def num_right(model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    inputs, labels = batch
    return int((model(inputs).argmax(1) == labels).sum())
