"""What travels instead of float32: bfloat16 or int8 of the change since the last common mean, with error feedback.

With c the last mean that all workers hold, e_i what worker i's rounding dropped so far, and E_j what the owner of chunk j
dropped so far, one average is::

    worker i:           v_i = (x_t^i - c) + e_i        sends q_i = Q(v_i), chunk j to worker j;     e_i <- v_i - q_i
    owner of chunk j:   s   = sum_i w_i q_i + E_j      sends r = Q(s) to all;                       E_j <- s - r
    everybody:          mean_t = c + r                 c <- mean_t

Everybody adds the same r to the same c, the owner too, so c stays the same to the bit on all workers. Chunks go to their
owners and results come back from them, so a worker sends 2 (N - 1) / N of the coded payload, as in a ring, at any N.

Q is a pure function on blocks. ``bf16`` rounds to the nearest bfloat16. ``int8`` rounds to the nearest multiple of
scale = max |v| / 127 of its block, with scale in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cocod_accel.comm.handles import Communicator, Exchange, Handle

#: Elements that share a scale, at most. A scale is 4 bytes: 1.6% of its block.
MAX_BLOCK = 256
# Coded in pieces of about this many elements on CPU, so that the passes over a piece find it in the cache.
_CPU_TILE = 1 << 16
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Codec:
    """How numbers are written: as codes of a narrow type, with or without a scale per block."""

    dtype: torch.dtype
    has_scales: bool

    def encode_(self, blocks: Tensor, codes: Tensor, scales: Tensor, seen: Tensor) -> None:
        """blocks (a row each) -> codes and scales; ``seen`` becomes Q(blocks), which is what decoding them gives."""
        if not self.has_scales:
            codes.copy_(blocks)
            seen.copy_(codes)
            return
        scales.copy_(torch.amax(torch.abs(blocks, out=seen), dim=-1))  # ten times as fast as the norm, or as aminmax
        # Not below the normal numbers, where a scale itself would be rounded too coarsely; zeros are zeros with any scale.
        scales.div_(127).clamp_(min=_SMALLEST_SCALE)
        codes.copy_(torch.div(blocks, scales.unsqueeze(-1), out=seen).round_())
        seen.mul_(scales.unsqueeze(-1))

    def decode_(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """codes and scales -> the numbers they stand for."""
        out.copy_(codes)
        if self.has_scales:
            out.mul_(scales.unsqueeze(-1))


CODECS = {"bf16": Codec(torch.bfloat16, has_scales=False), "int8": Codec(torch.int8, has_scales=True)}


@dataclass(frozen=True)
class Tile:
    """Blocks of one chunk, and the elements they hold."""

    row: int
    blocks: slice
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """A flat buffer in one chunk per worker, and a chunk in blocks of equal size. The end is filled up with zeros."""

    num_elements: int
    num_workers: int

    @property
    def num_blocks(self) -> int:
        """Of one chunk."""
        return math.ceil(self._share / MAX_BLOCK)

    @property
    def block(self) -> int:
        """Elements of one block: as even as can be, so that less than one element a block is filled up."""
        return math.ceil(self._share / self.num_blocks)

    @property
    def chunk(self) -> int:
        return self.block * self.num_blocks

    @property
    def _share(self) -> int:
        return math.ceil(self.num_elements / self.num_workers)

    def tiles(self, limit: int) -> Iterator[Tile]:
        """All elements in order, in tiles of one chunk and at most ``limit`` elements, but at least a block."""
        step = max(1, limit // self.block)
        for row in range(self.num_workers):
            for first in range(0, self.num_blocks, step):
                start = row * self.chunk + first * self.block
                last = min(first + step, self.num_blocks)
                stop = min(row * self.chunk + last * self.block, self.num_elements)
                if start < stop:
                    yield Tile(row, slice(first, last), start, stop)


class Wire:
    """Chunks as bytes, a row each: first the scales, then the codes."""

    def __init__(self, codec: Codec, layout: Layout, num_rows: int, device: torch.device) -> None:
        num_scales = layout.num_blocks if codec.has_scales else 0
        first = 4 * num_scales
        end = first + layout.chunk * codec.dtype.itemsize
        # Rows begin at multiples of 4 bytes, because their scales do.
        self.bytes = torch.zeros(num_rows, math.ceil(end / 4) * 4, dtype=torch.uint8, device=device)
        self.scales = self.bytes[:, :first].view(torch.float32)
        self.codes = self.bytes[:, first:end].view(codec.dtype).unflatten(1, (layout.num_blocks, layout.block))


def coded_bytes(name: str, num_elements: int, num_workers: int) -> int:
    """What a flat buffer takes when it is coded, scales and filling included."""
    return Wire(CODECS[name], Layout(num_elements, num_workers), num_workers, torch.device("meta")).bytes.numel()


class _CodedBuffer:
    """What a worker keeps for one flat buffer: the common mean, both residuals, and the bytes on their way."""

    def __init__(self, codec: Codec, mean: Tensor, rank: int, num_workers: int) -> None:
        self.codec, self.rank = codec, rank
        self.layout = Layout(mean.numel(), num_workers)
        self.centre = mean.clone()
        self.residual = torch.zeros_like(mean)
        self.owned_residual = mean.new_zeros(self.layout.chunk)
        self.outgoing = Wire(codec, self.layout, num_workers, mean.device)
        self.incoming = Wire(codec, self.layout, num_workers, mean.device)
        limit = _CPU_TILE if mean.device.type == "cpu" else self.layout.chunk
        self.tiles = list(self.layout.tiles(limit))
        largest = max(tile.blocks.stop - tile.blocks.start for tile in self.tiles)
        self._scratch = mean.new_empty(2, largest, self.layout.block)

    def centre_on(self, mean: Tensor) -> None:
        self.centre.copy_(mean)
        self.residual.zero_()
        self.owned_residual.zero_()

    def encode(self, values: Tensor) -> None:
        """Q((x - c) + e) -> bytes; e <- what is dropped."""
        for tile in self.tiles:
            wanted, seen = self._two(tile)
            part = slice(tile.start, tile.stop)
            held = wanted.view(-1)[: tile.stop - tile.start]
            torch.sub(values[part], self.centre[part], out=held).add_(self.residual[part])
            wanted.view(-1)[tile.stop - tile.start :].zero_()
            self._code(self.outgoing, tile.row, tile.blocks, wanted, seen)
            torch.sub(held, seen.view(-1)[: tile.stop - tile.start], out=self.residual[part])

    def combine(self, factors: Sequence[float], total: float) -> None:
        """Q(sum_i w_i q_i + E) of this worker's chunk -> bytes; E <- what is dropped."""
        kept = self.owned_residual.view(self.layout.num_blocks, self.layout.block)
        for tile in self.tiles:
            if tile.row != self.rank:
                continue
            wanted, seen = self._two(tile)
            wanted.zero_()
            for i, factor in enumerate(factors):
                self._decode(self.incoming, i, tile.blocks, seen)
                wanted.add_(seen, alpha=factor)
            wanted.div_(total).add_(kept[tile.blocks])
            self._code(self.outgoing, self.rank, tile.blocks, wanted, seen)
            torch.sub(wanted, seen, out=kept[tile.blocks])

    def take(self, mean: Tensor) -> None:
        """mean <- c <- c + r"""
        for tile in self.tiles:
            _, seen = self._two(tile)
            self._decode(self.outgoing, tile.row, tile.blocks, seen)
            part = slice(tile.start, tile.stop)
            self.centre[part].add_(seen.view(-1)[: tile.stop - tile.start])
            mean[part].copy_(self.centre[part])

    def _two(self, tile: Tile) -> tuple[Tensor, Tensor]:
        first, second = self._scratch[:, : tile.blocks.stop - tile.blocks.start]
        return first, second

    def _code(self, wire: Wire, row: int, blocks: slice, values: Tensor, seen: Tensor) -> None:
        self.codec.encode_(values, wire.codes[row, blocks], wire.scales[row, blocks], seen)

    def _decode(self, wire: Wire, row: int, blocks: slice, out: Tensor) -> None:
        self.codec.decode_(wire.codes[row, blocks], wire.scales[row, blocks], out)


class CodedMean:
    """One worker's coded averages: the last common mean of all its flat buffers, and what rounding has dropped so far.

    Until :meth:`centre_on` there is no common mean, and nothing can be sent.
    """

    def __init__(self, name: str, rank: int, num_workers: int) -> None:
        self.name = name
        self._codec, self._rank, self._num_workers = CODECS[name], rank, num_workers
        self._buffers: list[_CodedBuffer] = []
        self.is_centred = False

    @torch.no_grad()
    def centre_on(self, means: Sequence[Tensor]) -> None:
        """All workers hold ``means``, bit for bit: count changes from there, and owe nothing."""
        if self._buffers:
            for buffer, mean in zip(self._buffers, means, strict=True):
                buffer.centre_on(mean)
        else:
            self._buffers = [_CodedBuffer(self._codec, mean, self._rank, self._num_workers) for mean in means]
        self.is_centred = True

    @torch.no_grad()
    def launch(self, values: Sequence[Tensor], comm: Communicator, factors: Sequence[float], total: float) -> Handle:
        """Start the mean sum_i factors_i x_i / total in the background."""
        assert self.is_centred
        for buffer, flat in zip(self._buffers, values, strict=True):
            buffer.encode(flat)
        return comm.exchange([_exchange(buffer, tuple(factors), total) for buffer in self._buffers])

    @torch.no_grad()
    def take(self, means: Sequence[Tensor]) -> None:
        """What was launched has been waited for: ``means`` become the mean, and so does the common one."""
        for buffer, mean in zip(self._buffers, means, strict=True):
            buffer.take(mean)

    def sent_bytes(self, comm: Communicator) -> int:
        """What this worker sends for one mean, scales included."""
        return comm.sent_bytes([buffer.outgoing.bytes for buffer in self._buffers])

    def state(self) -> dict[str, Any]:
        """What a resumed run needs; nothing may be on its way."""
        kept = self._buffers if self.is_centred else []
        return {
            "name": self.name,
            "centres": [buffer.centre.clone() for buffer in kept],
            "residuals": [buffer.residual.clone() for buffer in kept],
            "owned_residuals": [buffer.owned_residual.clone() for buffer in kept],
        }

    def check_state(self, state: dict[str, Any], like: Sequence[Tensor]) -> None:
        """Refuse a state of other sizes; ``like``: flat buffers of this model."""
        sizes = [[tensor.numel() for tensor in state[key]] for key in ("centres", "residuals", "owned_residuals")]
        whole = [flat.numel() for flat in like]
        expected = [whole, whole, [Layout(size, self._num_workers).chunk for size in whole]]
        if any(sizes) and sizes != expected:
            raise ValueError(f"the saved payload has {sizes} elements, this model {expected}; load a state of this run")

    @torch.no_grad()
    def load(self, state: dict[str, Any] | None, like: Sequence[Tensor]) -> None:
        """Go on from :meth:`state`; None: the next mean is sent in full."""
        self.is_centred = False
        if state is not None and state["centres"]:
            self.centre_on([centre.to(flat) for centre, flat in zip(state["centres"], like, strict=True)])
            for buffer, residual, owned in zip(self._buffers, state["residuals"], state["owned_residuals"], strict=True):
                buffer.residual.copy_(residual)
                buffer.owned_residual.copy_(owned)


def _exchange(buffer: _CodedBuffer, factors: tuple[float, ...], total: float) -> Exchange:
    @torch.no_grad()
    def combine() -> None:
        buffer.combine(factors, total)

    return Exchange(buffer.outgoing.bytes, buffer.incoming.bytes, combine)
