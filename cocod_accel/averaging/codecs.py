"""What travels instead of float32: bfloat16 or int8 of the change since the last common point, with error feedback.

With c the last point that all workers hold (:mod:`cocod_accel.averaging.rules`), y_i what worker i would send in full, e_i
what its rounding dropped so far, and E_j what the owner of chunk j dropped so far, one average is::

    worker i:           v_i = (y_i - c) + e_i          sends q_i = Q(v_i), chunk j to worker j;     e_i <- v_i - q_i
    owner of chunk j:   s   = sum_i w_i q_i + E_j      sends r = Q(s) to all;                       E_j <- s - r
    everybody:          mean = c + r

Everybody adds the same r to the same c, the owner too, so the mean is the same to the bit on all workers. Chunks go to
their owners and results come back from them, so a worker sends 2 (N - 1) / N of the coded payload, as in a ring, at any N.

Where workers share nodes, worker p of a node does this for the p-th shard of the model, with its peers on the other nodes,
and the node gathers the coded results.

Q is a pure function on blocks. ``bf16`` rounds to the nearest bfloat16. ``int8`` rounds to the nearest multiple of
scale = max |v| / 127 of its block, with scale in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cocod_accel.averaging.header import ROW_BYTES, Header, any_vote
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
    """A flat buffer in one shard for each worker of a node, a shard in one chunk for each node, a chunk in equal blocks.

    Chunks are the rows of what travels, numbered through all shards. The end is filled up with zeros.
    """

    num_elements: int
    num_workers: int
    num_shards: int = 1

    @property
    def num_blocks(self) -> int:
        """Of one chunk."""
        return max(1, math.ceil(self._share / MAX_BLOCK))

    @property
    def block(self) -> int:
        """Elements of one block: as even as can be, so that less than one element a block is filled up."""
        return max(1, math.ceil(self._share / self.num_blocks))

    @property
    def chunk(self) -> int:
        return self.block * self.num_blocks

    @property
    def num_rows(self) -> int:
        return self.num_shards * self.num_workers

    @property
    def _share(self) -> int:
        return math.ceil(self.num_elements / self.num_rows)

    def rows_of(self, shard: int) -> range:
        return range(shard * self.num_workers, (shard + 1) * self.num_workers)

    def elements_of(self, shard: int) -> slice:
        """The stretch of the buffer that a shard holds; the last ones may be short, or empty."""
        length = self.num_workers * self.chunk
        return slice(min(shard * length, self.num_elements), min((shard + 1) * length, self.num_elements))

    def tiles(self, limit: int) -> Iterator[Tile]:
        """All elements in order, in tiles of one chunk and at most ``limit`` elements, but at least a block."""
        step = max(1, limit // self.block)
        for row in range(self.num_rows):
            for first in range(0, self.num_blocks, step):
                start = row * self.chunk + first * self.block
                last = min(first + step, self.num_blocks)
                stop = min(row * self.chunk + last * self.block, self.num_elements)
                if start < stop:
                    yield Tile(row, slice(first, last), start, stop)

    def row_bytes(self, codec: Codec) -> int:
        """What a chunk takes when it is coded, scales and filling included, its header not."""
        scales = 4 * self.num_blocks if codec.has_scales else 0
        # Rows begin at multiples of 4 bytes, because their scales do.
        return math.ceil((scales + self.chunk * codec.dtype.itemsize) / 4) * 4


class Wire:
    """Chunks as bytes, a row each: first the header, then the scales, then the codes."""

    def __init__(self, codec: Codec, layout: Layout, num_rows: int, device: torch.device) -> None:
        first = ROW_BYTES + (4 * layout.num_blocks if codec.has_scales else 0)
        end = first + layout.chunk * codec.dtype.itemsize
        self.bytes = torch.zeros(num_rows, ROW_BYTES + layout.row_bytes(codec), dtype=torch.uint8, device=device)
        self.headers = self.bytes[:, :ROW_BYTES].view(torch.int32)
        self.scales = self.bytes[:, ROW_BYTES:first].view(torch.float32)
        self.codes = self.bytes[:, first:end].view(codec.dtype).unflatten(1, (layout.num_blocks, layout.block))


def coded_bytes(name: str, num_elements: int, num_workers: int, num_shards: int = 1) -> int:
    """What the workers of a node together hand to the link for a flat buffer; headers are not counted."""
    layout = Layout(num_elements, num_workers, num_shards)
    return layout.num_rows * layout.row_bytes(CODECS[name])


class Coder:
    """One worker's coded averages of one flat buffer: what rounding has dropped so far, and the bytes on their way.

    The common point c is the caller's: it is passed in, and never written here.
    """

    def __init__(self, name: str, like: Tensor, comm: Communicator) -> None:
        self._codec, self._rank, self._shard = CODECS[name], comm.rank, comm.shard_index
        self.layout = Layout(like.numel(), comm.size, comm.num_shards)
        self._own = self.layout.elements_of(self._shard)
        #: e, of this worker's shard.
        self.residual = like.new_zeros(self._own.stop - self._own.start)
        #: E, of the chunk that this worker owns.
        self.owned_residual = like.new_zeros(self.layout.chunk)
        self._outgoing = Wire(self._codec, self.layout, comm.size, like.device)
        self._incoming = Wire(self._codec, self.layout, comm.size, like.device)
        #: All shards of the node.
        self._results = self._outgoing
        if comm.num_shards > 1:
            self._results = Wire(self._codec, self.layout, self.layout.num_rows, like.device)
        limit = _CPU_TILE if like.device.type == "cpu" else self.layout.chunk
        self._tiles = list(self.layout.tiles(limit))
        largest = max((tile.blocks.stop - tile.blocks.start for tile in self._tiles), default=1)
        self._scratch = like.new_empty(2, largest, self.layout.block)

    @property
    def num_bytes(self) -> int:
        """What travels for one average: all rows of this worker's shard."""
        return self.layout.num_workers * self.layout.row_bytes(self._codec)

    def clear(self) -> None:
        """An exact mean has been taken: nothing is owed any more."""
        self.residual.zero_()
        self.owned_residual.zero_()

    def encode(self, values: Tensor, centre: Tensor, header: Header) -> None:
        """Q((y - c) + e) -> bytes; e <- what is dropped."""
        header.write_rows(self._outgoing.headers)
        first_row = self.layout.rows_of(self._shard).start
        for tile in self._own_tiles():
            wanted, seen = self._two(tile)
            part, size = slice(tile.start, tile.stop), tile.stop - tile.start
            owed = self.residual[tile.start - self._own.start : tile.stop - self._own.start]
            held = wanted.view(-1)[:size]
            torch.sub(values[part], centre[part], out=held).add_(owed)
            wanted.view(-1)[size:].zero_()
            self._code(self._outgoing, tile.row - first_row, tile.blocks, wanted, seen)
            torch.sub(held, seen.view(-1)[:size], out=owed)

    def exchange(self, factors: tuple[float, ...], total: float) -> Exchange:
        @torch.no_grad()
        def combine() -> None:
            self.combine(factors, total)

        return Exchange(self._outgoing.bytes, self._incoming.bytes, combine, self._results.bytes, self.num_bytes)

    def combine(self, factors: Sequence[float], total: float) -> None:
        """Q(sum_i w_i q_i + E) of this worker's chunk -> bytes; E <- what is dropped."""
        kept = self.owned_residual.view(self.layout.num_blocks, self.layout.block)
        own_row = self.layout.rows_of(self._shard)[self._rank]
        for tile in self._tiles:
            if tile.row != own_row:
                continue
            wanted, seen = self._two(tile)
            wanted.zero_()
            for i, factor in enumerate(factors):
                self._decode(self._incoming, i, tile.blocks, seen)
                wanted.add_(seen, alpha=factor)
            wanted.div_(total).add_(kept[tile.blocks])
            self._code(self._outgoing, self._rank, tile.blocks, wanted, seen)
            torch.sub(wanted, seen, out=kept[tile.blocks])

    def read_headers(self, header: Header) -> tuple[bool, bool]:
        """The votes; raises unless all that has arrived belongs to this average."""
        own = self.layout.rows_of(self._shard)
        results = self._outgoing.headers if self._results is self._outgoing else self._results.headers[own.start : own.stop]
        return any_vote([header.read_rows(self._incoming.headers), header.read_rows(results)])

    def decode(self, centre: Tensor, mean: Tensor) -> None:
        """mean <- c + r; what was exchanged has been waited for."""
        for tile in self._tiles:
            _, seen = self._two(tile)
            self._decode(self._results, tile.row, tile.blocks, seen)
            part = slice(tile.start, tile.stop)
            torch.add(centre[part], seen.view(-1)[: tile.stop - tile.start], out=mean[part])

    def _own_tiles(self) -> Iterator[Tile]:
        rows = self.layout.rows_of(self._shard)
        return (tile for tile in self._tiles if tile.row in rows)

    def _two(self, tile: Tile) -> tuple[Tensor, Tensor]:
        first, second = self._scratch[:, : tile.blocks.stop - tile.blocks.start]
        return first, second

    def _code(self, wire: Wire, row: int, blocks: slice, values: Tensor, seen: Tensor) -> None:
        self._codec.encode_(values, wire.codes[row, blocks], wire.scales[row, blocks], seen)

    def _decode(self, wire: Wire, row: int, blocks: slice, out: Tensor) -> None:
        self._codec.decode_(wire.codes[row, blocks], wire.scales[row, blocks], out)


@torch.no_grad()
def launch_coded(
    coders: Sequence[Coder],
    values: Sequence[Tensor],
    centres: Sequence[Tensor],
    comm: Communicator,
    header: Header,
    total: float,
) -> Handle:
    """Start the mean sum_i factors_i y_i / total in the background."""
    for coder, flat, centre in zip(coders, values, centres, strict=True):
        coder.encode(flat, centre, header)
    return comm.exchange([coder.exchange(header.factors, total) for coder in coders])
