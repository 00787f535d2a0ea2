"""An independent serial reference of coded payloads, written from the definition in docs/library.md and nothing else.

It shares no code with the package: plain lists of blocks, one worker after the other, one chunk after the other.
"""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

from tests.reference import MakeOptimizer, Trace, shares, values


def as_float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def as_bfloat16(number: float) -> float:
    """The upper half of a float32, rounded to nearest, ties to even."""
    (bits,) = struct.unpack("I", struct.pack("f", number))
    kept = bits >> 16
    rest = bits & 0xFFFF
    kept += rest > 0x8000 or (rest == 0x8000 and kept & 1)
    return float(struct.unpack("f", struct.pack("I", kept << 16))[0])


def coded(codec: str, block: Tensor) -> Tensor:
    """Q of one block."""
    if codec == "bf16":
        return torch.tensor([as_bfloat16(v) for v in block.tolist()], dtype=block.dtype)
    if codec.startswith("topk:"):
        kept = sorted(range(len(block)), key=lambda i: -abs(float(block[i])))[: math.ceil(float(codec[5:]) * len(block))]
        return torch.tensor([float(v) if i in kept else 0.0 for i, v in enumerate(block)], dtype=block.dtype)
    largest = max(abs(v) for v in block.tolist())
    if codec == "ternary":
        mean = math.fsum(abs(v) for v in block.tolist()) / len(block)
        scale = max(as_float32(min(largest, 1.9 * mean)), 2.0**-126)
        signs = [0.0 if abs(v) <= scale / 2 else math.copysign(1, v) for v in block.tolist()]
        return torch.tensor(signs, dtype=block.dtype) * scale
    divided = torch.tensor(largest, dtype=block.dtype) / {"int8": 127, "int4": 7}[codec]
    scale = max(as_float32(float(divided)), 2.0**-126)
    return torch.round(block / scale) * scale


def cut(codec: str, flat: Tensor, num_workers: int) -> list[list[Tensor]]:
    """chunk -> blocks: one chunk per worker, each of equal blocks of at most 256 elements, filled up with zeros.

    The elements of a block are a multiple of 2 (int4) or 4 (ternary); topk takes a chunk as one block.
    """
    share = math.ceil(flat.numel() / num_workers)
    num_blocks = 1 if codec.startswith("topk:") else math.ceil(share / 256)
    multiple = {"int4": 2, "ternary": 4}.get(codec, 1)
    block = math.ceil(share / num_blocks / multiple) * multiple
    chunk = num_blocks * block
    whole = torch.cat([flat, torch.zeros(num_workers * chunk - flat.numel(), dtype=flat.dtype)])
    return [[whole[j * chunk + b * block :][:block] for b in range(num_blocks)] for j in range(num_workers)]


def joined(chunks: Sequence[Sequence[Tensor]], size: int) -> Tensor:
    return torch.cat([block for chunk in chunks for block in chunk])[:size]


def coded_chunks(codec: str, flat: Tensor, num_workers: int) -> Tensor:
    return joined([[coded(codec, block) for block in chunk] for chunk in cut(codec, flat, num_workers)], flat.numel())


def weighted_mean(rows: Sequence[Tensor], w: Sequence[float]) -> Tensor:
    """sum_i w_i x_i, formed with whole numbers and divided once.

    Sums of codes are multiples of few numbers, so that scales of such sums lie on the border between two float32 now and
    then: there the last bit of a sum matters.
    """
    whole = [Fraction(wi).limit_denominator(10_000) for wi in w]
    denominator = math.lcm(*(wi.denominator for wi in whole))
    total = torch.zeros_like(rows[0])
    for wi, row in zip(whole, rows, strict=True):
        total = total + int(wi * denominator) * row
    return total / denominator


class CodedMean:
    """mean_t = c + Q(sum_i w_i Q(x_i - c + e_i) + E), and what is left for the next time."""

    def __init__(self, codec: str, start: Tensor, w: Sequence[float]) -> None:
        self.codec, self.w = codec, w
        self.c = start.clone()
        self.e = [torch.zeros_like(start) for _ in self.w]
        self.owned = torch.zeros_like(start)  # E of all owners, side by side

    def mean(self, models: Sequence[Tensor]) -> Tensor:
        n = len(self.w)
        wanted = [(x - self.c) + e for x, e in zip(models, self.e, strict=True)]
        sent = [coded_chunks(self.codec, v, n) for v in wanted]
        self.e = [v - q for v, q in zip(wanted, sent, strict=True)]
        total = weighted_mean(sent, self.w) + self.owned
        result = coded_chunks(self.codec, total, n)
        self.owned = total - result
        self.c = self.c + result
        return self.c


def flattened(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assign(model: nn.Module, flat: Tensor) -> None:
    offset = 0
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


def run(
    name: str,
    codec: str,
    models: Sequence[nn.Module],
    make_optimizer: MakeOptimizer,
    batches: Sequence[Sequence[tuple[Tensor, Tensor]]],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    weights: Sequence[float],
    period: int,
) -> Trace:
    """Every worker's parameters after every step; ``models``: what each begins with."""
    w = shares(weights)
    models = [copy.deepcopy(model) for model in models]
    optimizers = [make_optimizer(m) for m in models]
    trace: Trace = [[] for _ in models]

    def exact() -> Tensor:
        return sum((wi * flattened(m) for wi, m in zip(w, models, strict=True)), torch.zeros(()))

    means = CodedMean(codec, exact(), w)  # equal starts: the start; else the first mean, which is sent in full
    snapshots, mean_t = [flattened(m) for m in models], means.c
    for t in range(len(batches[0])):
        for m, optimizer, worker in zip(models, optimizers, batches, strict=True):
            m.zero_grad()
            loss_of(m, *worker[t]).backward()
            optimizer.step()
        if (t + 1) % period == 0:
            if name == "cocod":
                for m, x_t in zip(models, snapshots, strict=True):
                    assign(m, flattened(m) - (x_t - mean_t))
                snapshots = [flattened(m) for m in models]
                mean_t = means.mean(snapshots)
            else:
                mean = means.mean([flattened(m) for m in models])
                for m in models:
                    assign(m, mean)
        for i, m in enumerate(models):
            trace[i].append(values(m))
    return trace
