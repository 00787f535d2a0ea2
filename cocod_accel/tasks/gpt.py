"""A small GPT: a decoder-only transformer over bytes, written for ``torch.compile`` and fused attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class GPTBlock(nn.Module):
    """Attention to what came before, and a layer of four times the width, each added to its normalised input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.attention(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norm_2(x))))
        return out


class GPT(nn.Module):
    """Logits of the next byte at every position."""

    def __init__(self, length: int, vocabulary: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What is added to the residual stream is smaller the more layers add to it.
                is_added = name.endswith(("projection.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt(shape: tuple[int, ...], num_classes: int, layers: int = 4, width: int = 96, heads: int = 4) -> nn.Module:
    """A small GPT for text: model.args = {layers: 4, width: 96, heads: 4}; 0.5 M parameters"""
    for name, value in (("layers", layers), ("width", width), ("heads", heads)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value} must be a whole number of at least 1")
    if width % heads:
        raise ValueError(f"heads={heads} must divide width={width}")
    return GPT(shape[0], num_classes, layers, width, heads)
