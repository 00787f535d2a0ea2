"""Coded averages, with what rounding dropped sent later.

With c the last point that all workers hold (:mod:`cocod_accel.averaging.rules`), y_i what worker i would send in full, e_i
what its rounding dropped so far, E_j what the owner of chunk j dropped so far, and Q a codec
(:mod:`cocod_accel.averaging.codecs`), one average is::

    worker i:           v_i = (y_i - c) + e_i          sends q_i = Q(v_i), chunk j to worker j;     e_i <- v_i - q_i
    owner of chunk j:   s   = sum_i w_i q_i + E_j      sends r = Q(s) to all;                       E_j <- s - r
    everybody:          mean = c + r

Everybody adds the same r to the same c, the owner too, so the mean is the same to the bit on all workers. Chunks go to
their owners and results come back from them, so a worker sends 2 (N - 1) / N of the coded payload, as in a ring, at any N.

Of gradients c is 0. Codecs that are unbiased have neither e nor E, and the owner sends s as it is.

Where workers share nodes, worker p of a node does this for the p-th shard of the model, with its peers on the other nodes,
and the node gathers the coded results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cocod_accel.averaging.codecs import Codec, Plain, TernGrad, Work, make_codec
from cocod_accel.averaging.header import ROW_BYTES, Header, Kind, any_vote
from cocod_accel.comm.handles import Communicator, Exchange, Handle, wait_for_device

# Coded in pieces of about this many elements on CPU, so that the passes over a piece find it in the cache. Smaller ones cost
# more in calls than they gain.
_CPU_TILE = 1 << 18
_NUM_TIMED = 3


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
    #: Elements of a block, at most; None: a chunk is one block.
    max_block: int | None = 256
    #: The elements of a block are a multiple of this.
    multiple: int = 1

    @classmethod
    def of(cls, codec: Codec, num_elements: int, num_workers: int, num_shards: int = 1) -> Layout:
        return cls(num_elements, num_workers, num_shards, codec.max_block, codec.multiple)

    @property
    def num_blocks(self) -> int:
        """Of one chunk."""
        return 1 if self.max_block is None else max(1, math.ceil(self._share / self.max_block))

    @property
    def block(self) -> int:
        """Elements of one block: as even as can be, so that less than ``multiple`` elements a block are filled up."""
        return max(1, math.ceil(self._share / self.num_blocks / self.multiple)) * self.multiple

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

    def row_bytes(self, codec: Codec, itemsize: int) -> int:
        """What a chunk takes when it is coded, scales and filling included, its header not."""
        num_codes = self.num_blocks * codec.num_codes(self.block, itemsize)
        # Rows begin at multiples of 4 bytes, because their scales do, or of 8, if numbers of 8 bytes lie in them.
        unit = max(4, codec.dtype.itemsize, itemsize if codec.dtype == torch.uint8 and itemsize == 8 else 0)
        return math.ceil((4 * codec.num_scales(self.num_blocks) + num_codes * codec.dtype.itemsize) / unit) * unit


class Wire:
    """Chunks as bytes, a row each: first the header, then the scales, then the codes."""

    def __init__(self, codec: Codec, layout: Layout, num_rows: int, like: Tensor) -> None:
        num_codes = codec.num_codes(layout.block, like.element_size())
        first = ROW_BYTES + 4 * codec.num_scales(layout.num_blocks)
        end = first + layout.num_blocks * num_codes * codec.dtype.itemsize
        self.row_bytes = layout.row_bytes(codec, like.element_size())
        self.bytes = torch.zeros(num_rows, ROW_BYTES + self.row_bytes, dtype=torch.uint8, device=like.device)
        self.headers = self.bytes[:, :ROW_BYTES].view(torch.int32)
        self._scales = self.bytes[:, ROW_BYTES:first].view(torch.float32)
        self._codes = self.bytes[:, first:end].view(codec.dtype).unflatten(1, (layout.num_blocks, num_codes))
        self._codec, self._is_by_block = codec, codec.num_scales(layout.num_blocks) == layout.num_blocks > 0

    def encode(self, row: int, tile: Tile, values: Tensor, dropped: Tensor | None, work: Work) -> None:
        self._codec.encode_(values, *self._at(row, tile), dropped, work)

    def decode(self, row: int, tile: Tile, out: Tensor, work: Work) -> None:
        self._codec.decode_(*self._at(row, tile), out, work)

    def add(self, row: int, tile: Tile, total: Tensor, factor: float, work: Work) -> None:
        self._codec.add_(*self._at(row, tile), total, factor, work)

    def _at(self, row: int, tile: Tile) -> tuple[Tensor, Tensor]:
        scales = self._scales[row]
        return self._codes[row, tile.blocks], scales[tile.blocks] if self._is_by_block else scales.unsqueeze(0)


def coded_bytes(name: str, num_elements: int, num_workers: int, num_shards: int = 1, sizes: Sequence[int] = ()) -> int:
    """What the workers of a node together hand to the link for a flat float32 buffer, in the mean of both stages.

    Headers are not counted. ``sizes``: of the tensors in it, if not one.
    """
    first, second = _stages(name, torch.float32)
    layout = Layout.of(first, num_elements, num_workers, num_shards)
    _fit(first, sizes or [num_elements], layout)
    return layout.num_rows * (layout.row_bytes(first, 4) + layout.row_bytes(second, 4)) // 2


def _stages(name: str, dtype: torch.dtype) -> tuple[Codec, Codec]:
    codec = make_codec(name)
    return codec, Plain(dtype) if codec.sends_mean_in_full else codec


def _fit(codec: Codec, sizes: Sequence[int], layout: Layout) -> None:
    if isinstance(codec, TernGrad):
        codec.fit(sizes, layout.chunk, layout.num_rows)


class Coder:
    """One worker's coded averages of one flat buffer: what rounding has dropped so far, and the bytes on their way.

    The common point c is the caller's: it is passed in, and never written here. ``sizes``: of the tensors in the buffer.
    """

    def __init__(
        self, name: str, like: Tensor, comm: Communicator, *, sizes: Sequence[int] = (), seed: tuple[int, ...] = ()
    ) -> None:
        self._codec, second = _stages(name, like.dtype)
        self._rank, self._shard, self._seed = comm.rank, comm.shard_index, seed
        self.layout = Layout.of(self._codec, like.numel(), comm.size, comm.num_shards)
        _fit(self._codec, sizes or [like.numel()], self.layout)
        self._own = self.layout.elements_of(self._shard)
        keeps = self._codec.has_feedback
        #: e, of this worker's shard.
        self.residual = like.new_zeros(self._own.stop - self._own.start if keeps else 0)
        #: E, of the chunk that this worker owns.
        self.owned_residual = like.new_zeros(self.layout.chunk if keeps else 0)
        self._outgoing = Wire(self._codec, self.layout, comm.size, like)
        self._incoming = Wire(self._codec, self.layout, comm.size, like)
        self._made = self._outgoing if second is self._codec else Wire(second, self.layout, comm.size, like)
        #: All shards of the node.
        self._results = self._made if comm.num_shards == 1 else Wire(second, self.layout, self.layout.num_rows, like)
        limit = _CPU_TILE if like.device.type == "cpu" else self.layout.chunk
        self._tiles = list(self.layout.tiles(limit))
        largest = max((tile.blocks.stop - tile.blocks.start for tile in self._tiles), default=1)
        self._scratch = like.new_empty(3, largest, self.layout.block)

    @property
    def num_bytes(self) -> int:
        """What travels for one average, in the mean of both stages: all rows of this worker's shard."""
        return self.layout.num_workers * (self._outgoing.row_bytes + self._made.row_bytes) // 2

    def clear(self) -> None:
        """An exact mean has been taken: nothing is owed any more."""
        self.residual.zero_()
        self.owned_residual.zero_()

    def encode(self, values: Tensor, centre: Tensor | None, header: Header) -> None:
        """Q((y - c) + e) -> bytes; e <- what is dropped."""
        header.write_rows(self._outgoing.headers)
        self._codec.prepare(values, (*self._seed, self._rank, header.number))
        first_row = self.layout.rows_of(self._shard).start
        for tile in self._own_tiles():
            wanted, work = self._room(tile)
            part, size = slice(tile.start, tile.stop), tile.stop - tile.start
            held = wanted.view(-1)[:size]
            if centre is None:
                held.copy_(values[part])
            else:
                torch.sub(values[part], centre[part], out=held)
            if size < wanted.numel():
                wanted.view(-1)[size:].zero_()
            if not self._codec.has_feedback:
                self._outgoing.encode(tile.row - first_row, tile, wanted, None, work)
                continue
            owed = self.residual[tile.start - self._own.start : tile.stop - self._own.start]
            held.add_(owed)
            if size == wanted.numel():
                self._outgoing.encode(tile.row - first_row, tile, wanted, owed.view_as(wanted), work)
            else:
                self._outgoing.encode(tile.row - first_row, tile, wanted, wanted, work)
                owed.copy_(held)

    def exchange(self, factors: tuple[float, ...], total: float) -> Exchange:
        @torch.no_grad()
        def combine() -> None:
            self.combine(factors, total)

        wires = (self._outgoing, self._incoming, self._made, self._results)
        outgoing, incoming, made, results = (wire.bytes for wire in wires)
        return Exchange(outgoing, incoming, combine, made, results, self.num_bytes)

    def combine(self, factors: Sequence[float], total: float) -> None:
        """Q(sum_i w_i q_i + E) of this worker's chunk -> bytes; E <- what is dropped."""
        if self._made is not self._outgoing:
            self._made.headers[self._rank].copy_(self._outgoing.headers[self._rank])
        own_row = self.layout.rows_of(self._shard)[self._rank]
        for tile in self._tiles:
            if tile.row != own_row:
                continue
            wanted, work = self._room(tile)
            wanted.zero_()
            for i, factor in enumerate(factors):
                self._incoming.add(i, tile, wanted, factor, work)
            wanted.div_(total)
            kept = None
            if self._codec.has_feedback:
                kept = self.owned_residual.view(self.layout.num_blocks, self.layout.block)[tile.blocks]
                wanted.add_(kept)
            self._made.encode(self._rank, tile, wanted, kept, work)

    def read_headers(self, header: Header) -> tuple[bool, bool]:
        """The votes; raises unless all that has arrived belongs to this average."""
        own = self.layout.rows_of(self._shard)
        results = self._made.headers if self._results is self._made else self._results.headers[own.start : own.stop]
        return any_vote([header.read_rows(self._incoming.headers), header.read_rows(results)])

    def decode(self, centre: Tensor | None, mean: Tensor) -> None:
        """mean <- c + r; what was exchanged has been waited for."""
        for tile in self._tiles:
            out, work = self._room(tile)
            self._results.decode(tile.row, tile, out, work)
            part = slice(tile.start, tile.stop)
            result = out.view(-1)[: tile.stop - tile.start]
            if centre is None:
                mean[part].copy_(result)
            else:
                torch.add(centre[part], result, out=mean[part])

    def _own_tiles(self) -> Iterator[Tile]:
        rows = self.layout.rows_of(self._shard)
        return (tile for tile in self._tiles if tile.row in rows)

    def _room(self, tile: Tile) -> tuple[Tensor, Work]:
        first, second, third = self._scratch[:, : tile.blocks.stop - tile.blocks.start]
        return first, Work(second, third, tile.row)


@torch.no_grad()
def time_coding(name: str, values: Tensor, comm: Communicator) -> float:
    """Seconds that this worker's main thread encodes, combines and decodes for one average of ``values``; sends nothing."""
    coder, mean = Coder(name, values, comm), torch.zeros_like(values)
    header = Header(Kind.ROUND, 0, (1.0,) * comm.size, comm.rank)
    seconds = []
    for _ in range(_NUM_TIMED):
        wait_for_device()
        begin = time.perf_counter()
        coder.encode(values, mean, header)
        coder.combine(header.factors, float(comm.size))
        coder.decode(mean, mean)
        wait_for_device()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)  # the first one also warms caches up


@torch.no_grad()
def launch_coded(
    coders: Sequence[Coder],
    values: Sequence[Tensor],
    centres: Sequence[Tensor | None],
    comm: Communicator,
    header: Header,
    total: float,
) -> Handle:
    """Start the mean sum_i factors_i y_i / total in the background."""
    for coder, flat, centre in zip(coders, values, centres, strict=True):
        coder.encode(flat, centre, header)
    return comm.exchange([coder.exchange(header.factors, total) for coder in coders])
