"""Flat copies of many tensors, so that averaging is a few passes over memory and one collective.

A model's tensors of any shape, dtype and memory format become one contiguous buffer per device and payload dtype, and back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Tensors are processed in pieces of about this size on CPU, so that consecutive passes over a piece (copy and
# scale; subtract, norm and add) find it in the cache. One large parameter stays one piece. On devices pieces bound what is
# needed beside them, and the elements that one kernel must count.
_CPU_SEGMENT_BYTES = 1 << 20
_DEVICE_SEGMENT_BYTES = 1 << 30
_MOST_ELEMENTS = 1 << 30


def payload_dtype(dtype: torch.dtype) -> torch.dtype:
    """Averages are formed in float32 at least: 16-bit sums lose the small differences between workers."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def local(tensor: Tensor) -> Tensor:
    """This worker's shard of a tensor that its node shares out (a ``DTensor``); others as they are."""
    shard: Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


def as_real(tensor: Tensor) -> Tensor:
    """What this worker holds of a tensor; a complex one as the pairs of reals it consists of."""
    tensor = local(tensor)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def whole_size(tensor: Tensor) -> int:
    """How many reals a tensor has, whatever this worker holds of it: the same on all workers.

    A plain tensor that is a shard says so with an attribute of this name.
    """
    size: int | None = getattr(tensor, "whole_size", None)
    return tensor.numel() * (2 if tensor.is_complex() else 1) if size is None else size


def floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that can be averaged."""
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def numels_of_cores(tensors: Sequence[Tensor]) -> list[int]:
    """Elements of the ``cores`` of a :class:`FlatCopy`, without making one."""
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        key = tensor.device, payload_dtype(as_real(tensor).dtype)
        sizes[key] = sizes.get(key, 0) + as_real(tensor).numel()
    return [size for size in sizes.values() if size]


def copied(tree: Any) -> Any:
    """A state with tensors of its own."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return type(tree)(copied(value) for value in tree) if isinstance(tree, list | tuple) else tree


def square_sums(flat: Tensor) -> list[Tensor]:
    """||flat||^2 in pieces: BLAS counts elements in 32 bits."""
    return [piece.dot(piece) for piece in flat.split(_MOST_ELEMENTS)]


def view_like(piece: Tensor, tensor: Tensor) -> Tensor:
    """``piece`` (flat, same number of elements) shaped like ``tensor``, in its memory order where that is simple."""
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dims and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format):
            return piece.as_strided(tensor.size(), tensor.stride())
    return piece.view(tensor.size())


@dataclass(frozen=True)
class Segment:
    """A stretch of a flat buffer, and the tensors it stands for."""

    flat: Tensor
    views: list[Tensor]
    sources: list[Tensor]
    is_extra: bool

    @cached_property
    def _is_plain(self) -> bool:
        return all(as_real(source) is source for source in self.sources)

    @property
    def tensors(self) -> list[Tensor]:
        # Looked up at every use: a parameter's storage (p.data = ...) or shard may have been replaced meanwhile.
        return self.sources if self._is_plain else [as_real(source) for source in self.sources]


def balanced_cuts(sizes: Sequence[int], num_parts: int) -> list[slice]:
    """Consecutive items in ``num_parts`` parts, none empty, each border as near to its place as whole items allow."""
    sums = [0, *itertools.accumulate(sizes)]
    borders = [0]
    for part in range(1, num_parts):
        possible = range(borders[-1] + 1, len(sizes) - (num_parts - part) + 1)
        place = sums[-1] * part / num_parts
        borders.append(min(possible, key=lambda index: abs(sums[index] - place)))
    return [slice(first, last) for first, last in itertools.pairwise([*borders, len(sizes)])]


def in_pieces(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Consecutive tensors in pieces of at most ``limit`` bytes once they are flat, but at least one tensor."""
    pieces: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        real = as_real(tensor)
        own = real.numel() * payload_dtype(real.dtype).itemsize
        if pieces[-1] and size + own > limit:
            pieces.append([])
            size = 0
        pieces[-1].append(tensor)
        size += own
    return pieces


class FlatCopy:
    """One flat copy of a list of tensors: a contiguous buffer per device and payload dtype.

    ``extras`` (a model's floating buffers) travel in the same buffers, in segments of their own. The first buffer has room
    for ``header_size`` elements more, which belong to no tensor.
    """

    def __init__(self, sources: Sequence[Tensor], extras: Sequence[Tensor] = (), *, header_size: int = 0) -> None:
        self.sources = [*sources, *extras]
        #: The end of the first buffer.
        self.header: Tensor | None = None
        blocks: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for is_extra, tensors in enumerate((sources, extras)):
            for tensor in tensors:
                key = tensor.device, payload_dtype(as_real(tensor).dtype)
                blocks.setdefault(key, ([], []))[is_extra].append(tensor)
        self.buffers: list[Tensor] = []
        #: The buffers without the header.
        self.payloads: list[Tensor] = []
        #: The stretches of the buffers that stand for ``sources``, and for ``extras``; those that are not empty.
        self.cores: list[Tensor] = []
        self.tails: list[Tensor] = []
        self.segments: list[Segment] = []
        for (device, dtype), parts in blocks.items():
            sizes = [sum(as_real(tensor).numel() for tensor in part) for part in parts]
            room = header_size if self.header is None else 0
            buffer = torch.empty(sum(sizes) + room, device=device, dtype=dtype)
            self.buffers.append(buffer)
            if room:
                self.header = buffer[sum(sizes) :]
            self.payloads.append(buffer[: sum(sizes)])
            for is_extra, piece in enumerate(torch.split(self.payloads[-1], sizes)):
                if piece.numel():
                    (self.tails if is_extra else self.cores).append(piece)
                self.segments.extend(_cut(piece, parts[is_extra], bool(is_extra)))

    def load(self) -> None:
        """tensors -> buffers"""
        for segment in self.segments:
            torch._foreach_copy_(segment.views, segment.tensors)

    def store(self) -> None:
        """buffers -> tensors"""
        for segment in self.segments:
            torch._foreach_copy_(segment.tensors, segment.views)

    def take(self, index: int) -> Tensor:
        """tensors -> buffers, of one segment, which is returned."""
        segment = self.segments[index]
        torch._foreach_copy_(segment.views, segment.tensors)
        return segment.flat

    def each(self) -> Iterator[Tensor]:
        """Segment by segment."""
        return (segment.flat for segment in self.segments)

    def load_cores(self) -> None:
        """tensors -> buffers, without extras"""
        for segment in self.segments:
            if not segment.is_extra:
                torch._foreach_copy_(segment.views, segment.tensors)

    def store_cores(self) -> None:
        """buffers -> tensors, without extras"""
        for segment in self.segments:
            if not segment.is_extra:
                torch._foreach_copy_(segment.tensors, segment.views)

    @property
    def core_sizes(self) -> list[list[int]]:
        """Of the tensors in each of ``cores``, in their order."""
        sizes = iter([view.numel() for segment in self.segments if not segment.is_extra for view in segment.views])
        found: list[list[int]] = []
        for core in self.cores:
            own: list[int] = []
            while sum(own) < core.numel():
                own.append(next(sizes))
            found.append(own)
        return found

    @cached_property
    def views(self) -> dict[Tensor, Tensor]:
        """The stretch of a buffer that stands for each tensor (tensors hash by identity)."""
        return {
            source: view for segment in self.segments for source, view in zip(segment.sources, segment.views, strict=True)
        }

    def fill(self, values: Sequence[Tensor]) -> None:
        """Take the ``buffers`` of another copy of the same tensors."""
        sizes, expected = [value.numel() for value in values], [buffer.numel() for buffer in self.buffers]
        if sizes != expected:
            raise ValueError(f"the saved state has {sizes} elements, this model {expected}; load a state of this model")
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value)


def _cut(buffer: Tensor, members: list[Tensor], is_extra: bool) -> Iterator[Segment]:
    limit = _CPU_SEGMENT_BYTES if buffer.device.type == "cpu" else _DEVICE_SEGMENT_BYTES
    start = offset = 0
    views: list[Tensor] = []
    sources: list[Tensor] = []
    for member in members:
        real = as_real(member)
        views.append(view_like(buffer[offset : offset + real.numel()], real))
        sources.append(member)
        offset += real.numel()
        if (offset - start) * buffer.element_size() >= limit:
            yield Segment(buffer[start:offset], views, sources, is_extra)
            start, views, sources = offset, [], []
    if sources:
        yield Segment(buffer[start:offset], views, sources, is_extra)
