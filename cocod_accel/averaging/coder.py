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
from cocod_accel.averaging.header import ROW_BYTES, Header, Kind
from cocod_accel.averaging.offload import HostTensor
from cocod_accel.averaging.weights import mean_
from cocod_accel.comm.device import wait_for_device
from cocod_accel.comm.handles import Communicator, Exchange, Handle

# Coded in pieces of about this many elements on CPU, so that the passes over a piece find it in the cache. Smaller ones cost
# more in calls than they gain.
_CPU_TILE = 1 << 18
# On devices a piece bounds what working on it takes: 1 GiB of float32, and less than many of their kernels can count.
_DEVICE_TILE = 1 << 28
_NUM_TIMED = 3


@dataclass(frozen=True)
class Tile:
    """Blocks of one chunk, or several whole chunks, and the elements they hold."""

    rows: slice
    blocks: slice
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Chunks, and blocks of each."""
        return self.rows.stop - self.rows.start, self.blocks.stop - self.blocks.start


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
        """All elements in order, in tiles of at most ``limit`` elements, but at least a block.

        Chunks that are much smaller share a tile with others of their shard, if they have blocks that share a scale.
        """
        step = max(1, limit // self.block)
        joined = 1 if self.max_block is None else max(1, limit // self.chunk)
        for shard in range(self.num_shards):
            rows = self.rows_of(shard)
            for row in range(rows.start, rows.stop, joined):
                last_row = min(row + joined, rows.stop, math.ceil(self.num_elements / self.chunk))
                for first in range(0, self.num_blocks, step):
                    start = row * self.chunk + first * self.block
                    last = min(first + step, self.num_blocks)
                    stop = min((last_row - 1) * self.chunk + last * self.block, self.num_elements)
                    if start < stop:
                        yield Tile(slice(row, last_row), slice(first, last), start, stop)

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
        self._is_by_block = codec.num_scales(layout.num_blocks) == layout.num_blocks > 0

    def at(self, rows: slice, blocks: slice) -> tuple[Tensor, Tensor]:
        """Codes and scales there."""
        scales = self._scales[rows]
        return self._codes[rows, blocks], scales[:, blocks] if self._is_by_block else scales.unsqueeze(1)


def coded_bytes(name: str, num_elements: int, num_workers: int, num_shards: int = 1, sizes: Sequence[int] = ()) -> int:
    """What the workers of a node together hand to the link for a flat float32 buffer, in the mean of both stages.

    Headers are not counted. ``sizes``: of the tensors in it, if not one.
    """
    first, second = _stages(name, torch.float32)
    layout = Layout.of(first, num_elements, num_workers, num_shards)
    _fit(first, sizes or [num_elements], layout)
    return layout.num_rows * (layout.row_bytes(first, 4) + layout.row_bytes(second, 4)) // 2


def message_bytes(name: str, num_elements: int, sizes: Sequence[int] = ()) -> int:
    """What one worker sends to a server for a flat float32 buffer, its header not counted."""
    codec = make_codec(name)
    layout = Layout.of(codec, num_elements, 1)
    _fit(codec, sizes or [num_elements], layout)
    return layout.row_bytes(codec, 4)


def _stages(name: str, dtype: torch.dtype) -> tuple[Codec, Codec]:
    codec = make_codec(name)
    return codec, Plain(dtype) if codec.sends_mean_in_full else codec


def _fit(codec: Codec, sizes: Sequence[int], layout: Layout) -> None:
    if isinstance(codec, TernGrad):
        codec.fit(sizes, layout.chunk, layout.num_rows)


@dataclass(frozen=True)
class _Job:
    """One tile of a pass, with all it works on; made once, because views of small tensors cost as much as their numbers."""

    part: slice  # of the flat buffer
    blocks: Tensor  # room for the numbers, in blocks
    held: Tensor  # the same, flat and without what fills the end up
    filling: Tensor | None
    codes: Tensor
    scales: Tensor
    work: Work
    kept: Tensor | None = None  # what is owed, in blocks
    owed: Tensor | None = None  # the same, flat and without the end
    kept_from: int = 0  # where that begins
    incoming: tuple[tuple[Tensor, Tensor, Work], ...] = ()  # what all workers say of it


class Coder:
    """One worker's coded averages of one flat buffer: what rounding has dropped so far, and the bytes on their way.

    The common point c is the caller's: it is passed in, and never written here. ``sizes``: of the tensors in the buffer.
    """

    def __init__(
        self,
        name: str,
        like: Tensor,
        comm: Communicator,
        *,
        sizes: Sequence[int] = (),
        seed: tuple[int, ...] = (),
        offload: bool = False,
    ) -> None:
        self._codec, second = _stages(name, like.dtype)
        self._second = second
        self._rank, self._shard, self._seed = comm.rank, comm.shard_index, seed
        self.layout = layout = Layout.of(self._codec, like.numel(), comm.size, comm.num_shards)
        _fit(self._codec, sizes or [like.numel()], layout)
        own = layout.elements_of(self._shard)
        keeps = self._codec.has_feedback
        self._num_own = own.stop - own.start
        #: E, of the chunk that this worker owns.
        self.owned_residual = like.new_zeros(layout.chunk if keeps else 0)
        self._outgoing = Wire(self._codec, layout, comm.size, like)
        self._incoming = Wire(self._codec, layout, comm.size, like)
        self._made = self._outgoing if second is self._codec else Wire(second, layout, comm.size, like)
        #: All shards of the node.
        self._results = self._made if comm.num_shards == 1 else Wire(second, layout, layout.num_rows, like)
        limit = _CPU_TILE if like.device.type == "cpu" else min(_DEVICE_TILE, layout.chunk)
        tiles = list(layout.tiles(limit))
        all_rows = layout.num_workers * layout.chunk
        self._sums_all = layout.max_block is not None and all_rows <= limit
        largest = max([math.prod(tile.shape) for tile in tiles] + [layout.num_workers * layout.num_blocks] * self._sums_all)
        self._scratch = like.new_empty(3, largest, layout.block)
        rows = layout.rows_of(self._shard)
        # e, with room for what fills the last chunk up; that stays 0. Offloaded, what one tile needs of it is here.
        size = comm.size * layout.chunk if keeps else 0
        self._host = HostTensor(size, like) if offload and keeps else None
        if self._host is not None:
            self._host.value.zero_()
        self._kept = like.new_zeros(min(size, largest * layout.block) if offload else size)
        self._encodings = [self._encoding(tile, self._kept) for tile in tiles if tile.rows.start in rows]
        own_row = rows[self._rank]
        self._sums = [self._sum(own_row, t.blocks) for t in tiles if t.rows.start <= own_row < t.rows.stop]
        self._decodings = [self._decoding(tile) for tile in tiles]

    @property
    def residual(self) -> Tensor:
        """e, of this worker's shard."""
        return (self._kept if self._host is None else self._host.value)[: self._num_own]

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
        for job in self._encodings:
            if centre is None:
                job.held.copy_(values[job.part])
            else:
                torch.sub(values[job.part], centre[job.part], out=job.held)
            if job.filling is not None:
                job.filling.zero_()
            if self._host is not None and job.kept is not None:
                coming = self._host.fetch(job.kept_from, job.kept.view(-1))
                if coming is not None:
                    coming.wait()
            if job.owed is not None:
                job.held.add_(job.owed)
            self._codec.encode_(job.blocks, job.codes, job.scales, job.kept, job.work)
            if self._host is not None and job.kept is not None:
                self._host.store(job.kept_from, job.kept.view(-1))

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
        for job in self._sums:
            job.blocks.zero_()
            if self._sums_all:
                ((codes, scales, work),) = job.incoming
                self._codec.sum_(codes, scales, job.blocks, factors, work)
            else:
                for factor, (codes, scales, work) in zip(factors, job.incoming, strict=True):
                    self._codec.add_(codes, scales, job.blocks, factor, work)
            mean_(job.blocks, total)
            if job.kept is not None:
                job.blocks.add_(job.kept)
            self._second.encode_(job.blocks, job.codes, job.scales, job.kept, job.work)

    @property
    def headers(self) -> list[Tensor]:
        """Of what has arrived in both stages, a row for each worker."""
        own = self.layout.rows_of(self._shard)
        results = self._made.headers if self._results is self._made else self._results.headers[own.start : own.stop]
        return [self._incoming.headers, results]

    def decode(self, centre: Tensor | None, mean: Tensor) -> None:
        """mean <- c + r; what was exchanged has been waited for."""
        for job in self._decodings:
            self._second.decode_(job.codes, job.scales, job.blocks, job.work)
            if centre is None:
                mean[job.part].copy_(job.held)
            else:
                torch.add(centre[job.part], job.held, out=mean[job.part])

    # ---- the first stage alone, where one reads what another has written

    @property
    def message(self) -> Tensor:
        """What :meth:`encode` has written, a row for each worker; one that is filled from elsewhere can be read."""
        return self._outgoing.bytes

    @property
    def message_bytes(self) -> int:
        """Of all rows, without their headers."""
        return len(self.message) * self._outgoing.row_bytes

    def read_message(self, values: Tensor) -> None:
        """values <- what stands in :attr:`message`; of a single worker."""
        for job in self._encodings:
            self._codec.decode_(job.codes, job.scales, job.blocks, job.work)
            values[job.part].copy_(job.held)

    # ---- what each tile works on

    def _encoding(self, tile: Tile, residual: Tensor) -> _Job:
        first_row = self.layout.rows_of(self._shard).start
        rows = slice(tile.rows.start - first_row, tile.rows.stop - first_row)
        blocks, work = self._room(tile.shape, tile.rows.start)
        size, start = tile.stop - tile.start, tile.start - first_row * self.layout.chunk
        held, filling = torch.split(blocks.view(-1), [size, blocks.numel() - size])
        kept = owed = None
        if self._codec.has_feedback:
            here = start if self._host is None else 0
            owed = residual[here : here + size]
            kept = residual[here : here + blocks.numel()].view_as(blocks)
        codes, scales = self._outgoing.at(rows, tile.blocks)
        part = slice(tile.start, tile.stop)
        return _Job(part, blocks, held, filling if filling.numel() else None, codes, scales, work, kept, owed, start)

    def _sum(self, own_row: int, part: slice) -> _Job:
        num_blocks, num_workers = part.stop - part.start, self.layout.num_workers
        blocks, work = self._room((1, num_blocks), own_row)
        kept = None
        if self._codec.has_feedback:
            kept = self.owned_residual.view(1, self.layout.num_blocks, self.layout.block)[:, part]
        codes, scales = self._made.at(slice(self._rank, self._rank + 1), part)
        together = [slice(0, num_workers)] if self._sums_all else [slice(i, i + 1) for i in range(num_workers)]
        incoming = tuple(
            (*self._incoming.at(rows, part), self._room((rows.stop - rows.start, num_blocks), own_row)[1])
            for rows in together
        )
        return _Job(part, blocks, blocks.view(-1), None, codes, scales, work, kept, incoming=incoming)

    def _decoding(self, tile: Tile) -> _Job:
        blocks, work = self._room(tile.shape, tile.rows.start)
        codes, scales = self._results.at(tile.rows, tile.blocks)
        held = blocks.view(-1)[: tile.stop - tile.start]
        return _Job(slice(tile.start, tile.stop), blocks, held, None, codes, scales, work)

    def _room(self, shape: tuple[int, int], row: int) -> tuple[Tensor, Work]:
        first, second, third = self._scratch[:, : math.prod(shape)].unflatten(1, shape)
        return first, Work(second, third, row)


@torch.no_grad()
def time_coding(name: str, values: Tensor, comm: Communicator) -> float:
    """Seconds that this worker's main thread encodes, combines and decodes for one average of ``values``; sends nothing."""
    coder, mean = Coder(name, values, comm), torch.zeros_like(values)
    header = Header(Kind.ROUND, 0, (1.0,) * comm.size, comm.rank)
    seconds = []
    for _ in range(_NUM_TIMED):
        wait_for_device(values.device)
        begin = time.perf_counter()
        coder.encode(values, mean, header)
        coder.combine(header.factors, float(comm.size))
        coder.decode(mean, mean)
        wait_for_device(values.device)
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
