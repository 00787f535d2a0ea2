"""How numbers are written on the wire: fewer bits for each of them, or only the largest.

A codec is a function on blocks, which are the rows of a tensor; encoding also tells what is dropped. With s the scale of a
block, in float32:

==============  ==================================================================================================
``bf16``        the nearest bfloat16
``int8``        the nearest multiple of s = max |v| / 127; 8 bits each
``int4``        the nearest multiple of s = max |v| / 7; 4 bits each
``ternary``     the nearest of -s, 0 and s, where s = min(max |v|, 1.9 mean |v|); 2 bits each
``topk:SHARE``  the ceil(SHARE x block) largest of a block as they are, with their places; the others are 0; a block is a
                chunk, or an equal part of one that has more than 2^28 elements
``qsgd:BITS``   s = ||v||_2 / (2^(BITS - 1) - 1); v / s is rounded up or down at random, so that its mean is v / s
``terngrad``    of a tensor, clipped at 2.5 standard deviations: -s, 0 or s with s = max |v| at random, with mean v
==============  ==================================================================================================

The first five drop what they round off, so it is kept and sent later (:mod:`cocod_accel.averaging.coder`). The last two are
unbiased instead, and for gradients only: QSGD (Alistarh et al. 2017) and TernGrad (Wen et al. 2017).
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

# Below the normal numbers a scale itself would be rounded too coarsely; zeros are zeros with any scale.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Work:
    """Two tensors like the blocks, to work in; and the number of the chunk that the blocks are of."""

    first: Tensor
    second: Tensor
    row: int


class Codec(ABC):
    """One way of writing numbers. Gradients of one worker use one object, because it may draw random numbers."""

    #: Elements that share a scale, at most; None: a whole chunk is one block.
    max_block: int | None = 256
    #: The elements of a block are a multiple of this.
    multiple: int = 1
    #: What is rounded off is kept and sent later.
    has_feedback: ClassVar[bool] = True
    #: The owner of a chunk sends the mean in full.
    sends_mean_in_full: ClassVar[bool] = False
    #: Type of the codes.
    dtype: torch.dtype = torch.uint8

    def num_scales(self, num_blocks: int) -> int:
        """Of a chunk."""
        return num_blocks

    @abstractmethod
    def num_codes(self, block: int, itemsize: int) -> int:
        """Of a block of so many numbers of ``itemsize`` bytes each."""

    @abstractmethod
    def encode_(self, blocks: Tensor, codes: Tensor, scales: Tensor, dropped: Tensor | None, work: Work) -> None:
        """blocks -> codes and scales; ``dropped`` <- blocks less what decoding gives."""

    @abstractmethod
    def decode_(self, codes: Tensor, scales: Tensor, out: Tensor, work: Work) -> None:
        """codes and scales -> the numbers they stand for, the same to the bit on every worker."""

    def add_(self, codes: Tensor, scales: Tensor, total: Tensor, factor: float, work: Work) -> None:
        """``total`` += ``factor`` times the numbers they stand for."""
        self.decode_(codes, scales, work.first, work)
        total.add_(work.first, alpha=factor)

    def sum_(self, codes: Tensor, scales: Tensor, total: Tensor, factors: Sequence[float], work: Work) -> None:
        """The same for all workers, whose codes are the rows of ``codes``; ``work`` has room for them all."""
        for row, factor in enumerate(factors):
            one = slice(row, row + 1)
            self.add_(codes[one], scales[one], total, factor, Work(work.first[one], work.second[one], work.row))

    def prepare(self, values: Tensor, key: tuple[int, ...]) -> None:  # noqa: B027 - most codecs need nothing
        """Before all blocks of ``values`` are encoded; ``key``: where random numbers begin."""


class Plain(Codec):
    """Numbers of a type of their own, without scales."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def num_scales(self, num_blocks: int) -> int:
        return 0

    def num_codes(self, block: int, itemsize: int) -> int:
        return block

    def encode_(self, blocks: Tensor, codes: Tensor, scales: Tensor, dropped: Tensor | None, work: Work) -> None:
        codes.copy_(blocks)
        if dropped is not None:
            torch.sub(blocks, codes, out=dropped)

    def decode_(self, codes: Tensor, scales: Tensor, out: Tensor, work: Work) -> None:
        out.copy_(codes)

    def add_(self, codes: Tensor, scales: Tensor, total: Tensor, factor: float, work: Work) -> None:
        total.add_(codes, alpha=factor)


@dataclass(frozen=True)
class Packing:
    """Integers from -levels to levels, several to a byte.

    Where 8 is a multiple of the bits, a block is cut into as many parts as a byte holds numbers, and byte i holds number i
    of each part, so that packing is a few passes over contiguous memory: with two numbers, byte = first + 16 second. All of
    it is computed in floating point, where a pass is much faster than one of shifts. Other widths pack 8 numbers into
    ``bits`` bytes.
    """

    bits: int

    @property
    def levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def multiple(self) -> int:
        return 8 // self.bits if 8 % self.bits == 0 else 8

    def num_codes(self, block: int) -> int:
        return block * self.bits // 8

    def pack_(self, numbers: Tensor, codes: Tensor, spare: Tensor) -> None:
        """``numbers``: whole, in a floating type."""
        if 8 % self.bits:
            self._pack_words_(numbers, codes)
            return
        total = numbers
        if self.multiple > 1:
            first, second, *others = numbers.chunk(self.multiple, dim=-1)
            total = spare[..., : first.shape[-1]]
            torch.add(first, second, alpha=1 << self.bits, out=total)
            for place, part in enumerate(others, 2):
                total.add_(part, alpha=1 << place * self.bits)
        codes.view(torch.int8).copy_(total)

    def unpack_(self, codes: Tensor, out: Tensor, spare: Tensor) -> None:
        if 8 % self.bits:
            self._unpack_words_(codes, out)
            return
        signed = codes.view(torch.int8)
        if self.multiple == 1:
            out.copy_(signed)
            return
        parts = out.chunk(self.multiple, dim=-1)
        rest = spare[..., : parts[0].shape[-1]]
        rest.copy_(signed)
        for place in range(self.multiple - 1, 0, -1):
            # All lower numbers together are less than half of this place.
            weight = 1 << place * self.bits
            torch.mul(rest, 1 / weight, out=parts[place]).round_()
            torch.sub(rest, parts[place], alpha=weight, out=rest if place > 1 else parts[0])

    def _pack_words_(self, numbers: Tensor, codes: Tensor) -> None:
        parts = numbers.chunk(8, dim=-1)
        words = torch.zeros_like(parts[0], dtype=torch.int64)
        for place, part in enumerate(parts):
            words |= (part.nan_to_num(0.0).to(torch.int64) + self.levels) << (place * self.bits)
        octets = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 8))
        codes.copy_(octets[..., : self.bits].flatten(-2))

    def _unpack_words_(self, codes: Tensor, out: Tensor) -> None:
        octets = codes.unflatten(-1, (-1, self.bits))
        words = torch.zeros(*octets.shape[:-1], dtype=torch.int64, device=codes.device)
        for place in range(self.bits):
            words |= octets[..., place].to(torch.int64) << (8 * place)
        for place, part in enumerate(out.chunk(8, dim=-1)):
            part.copy_((words >> (place * self.bits)) & ((1 << self.bits) - 1))
        out.sub_(self.levels)


class Scaled(Codec):
    """The nearest multiple of a scale per block."""

    def __init__(self, bits: int) -> None:
        self.packing = Packing(bits)
        self.multiple = self.packing.multiple

    def num_codes(self, block: int, itemsize: int) -> int:
        return self.packing.num_codes(block)

    def encode_(self, blocks: Tensor, codes: Tensor, scales: Tensor, dropped: Tensor | None, work: Work) -> None:
        numbers, column = work.first, scales.unsqueeze(-1)
        self._set_scales(torch.abs(blocks, out=numbers), scales)
        torch.div(blocks, column, out=numbers)
        self._round_(numbers, work.second)
        self.packing.pack_(numbers, codes, work.second)
        if dropped is not None:
            torch.addcmul(blocks, numbers, column.to(blocks.dtype), value=-1, out=dropped)

    def decode_(self, codes: Tensor, scales: Tensor, out: Tensor, work: Work) -> None:
        self.packing.unpack_(codes, out, work.second)
        # Multiplied and added one after the other, because a fused step is not rounded in the same way on every machine.
        out.mul_(scales.unsqueeze(-1))

    def add_(self, codes: Tensor, scales: Tensor, total: Tensor, factor: float, work: Work) -> None:
        self.packing.unpack_(codes, work.first, work.second)
        total.addcmul_(work.first, scales.unsqueeze(-1).to(total.dtype), value=factor)

    def sum_(self, codes: Tensor, scales: Tensor, total: Tensor, factors: Sequence[float], work: Work) -> None:
        self.packing.unpack_(codes, work.first, work.second)
        columns = scales.unsqueeze(-1).to(total.dtype)
        for factor, numbers, column in zip(factors, work.first, columns, strict=True):
            total[0].addcmul_(numbers, column, value=factor)

    def _set_scales(self, magnitudes: Tensor, scales: Tensor) -> None:
        """``magnitudes`` may be used up."""
        # Divided before it is rounded to float32: what is a multiple of a scale already has that scale again.
        largest = torch.amax(magnitudes, dim=-1)  # ten times as fast as the norm, or as aminmax
        scales.copy_(largest.div_(self.packing.levels)).clamp_(min=_SMALLEST_SCALE)

    def _round_(self, numbers: Tensor, spare: Tensor) -> None:
        numbers.round_()


class Ternary(Scaled):
    """The nearest of -s, 0 and s."""

    #: s over the mean magnitude. 1.53 leaves least of a Gaussian distribution, 2 of a Laplacian one.
    ratio: ClassVar[float] = 1.9

    def __init__(self) -> None:
        super().__init__(bits=2)

    def _set_scales(self, magnitudes: Tensor, scales: Tensor) -> None:
        largest = torch.amax(magnitudes, dim=-1)
        # Divided first: a sum of huge numbers would overflow.
        means = magnitudes.mul_(self.ratio / magnitudes.shape[-1]).sum(dim=-1)
        scales.copy_(torch.minimum(largest, means)).clamp_(min=_SMALLEST_SCALE)

    def _round_(self, numbers: Tensor, spare: Tensor) -> None:
        numbers.clamp_(-1, 1).round_()


class TopK(Codec):
    """The largest of a chunk, with their places."""

    max_block = 1 << 28  # places are of 32 bits, and what works on a block takes memory; a larger chunk is several

    def __init__(self, share: float) -> None:
        self.share = share

    def num_scales(self, num_blocks: int) -> int:
        return 0

    def num_kept(self, block: int) -> int:
        return math.ceil(self.share * block)

    def num_codes(self, block: int, itemsize: int) -> int:
        return math.ceil(self.num_kept(block) * (itemsize + 4) / itemsize) * itemsize

    def encode_(self, blocks: Tensor, codes: Tensor, scales: Tensor, dropped: Tensor | None, work: Work) -> None:
        values, places = self._views(codes, blocks)
        chosen = torch.topk(torch.abs(blocks, out=work.first), values.shape[-1], dim=-1, sorted=False).indices
        values.copy_(blocks.gather(-1, chosen))
        places.copy_(chosen)
        if dropped is not None:
            dropped.copy_(blocks).scatter_add_(-1, chosen, -values)  # not 0: what is not a number stays visible

    def decode_(self, codes: Tensor, scales: Tensor, out: Tensor, work: Work) -> None:
        values, places = self._views(codes, out)
        out.zero_().scatter_(-1, places.to(torch.int64), values)

    def add_(self, codes: Tensor, scales: Tensor, total: Tensor, factor: float, work: Work) -> None:
        values, places = self._views(codes, total)
        total.scatter_add_(-1, places.to(torch.int64), values * factor)

    def _views(self, codes: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        num_kept = self.num_kept(like.shape[-1])
        end = num_kept * like.element_size()
        return codes[..., :end].view(like.dtype), codes[..., end : end + 4 * num_kept].view(torch.int32)


class _Random:
    """Uniform random numbers that depend on a key alone."""

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None

    def begin(self, device: torch.device, key: tuple[int, ...]) -> None:
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        self._generator.manual_seed(int.from_bytes(digest, "big") >> 1)

    def fill_(self, out: Tensor) -> Tensor:
        return out.uniform_(generator=self._generator)


class QSGD(Scaled):
    """Rounded at random to multiples of the 2-norm over the levels, so that the mean is right."""

    max_block = 512
    has_feedback: ClassVar[bool] = False
    sends_mean_in_full: ClassVar[bool] = True

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self._random = _Random()

    def prepare(self, values: Tensor, key: tuple[int, ...]) -> None:
        self._random.begin(values.device, key)

    def _set_scales(self, magnitudes: Tensor, scales: Tensor) -> None:
        # Over the largest: squares of huge numbers would overflow, those of tiny ones vanish.
        largest = torch.amax(magnitudes, dim=-1, keepdim=True).clamp_(min=_SMALLEST_SCALE)
        norms = magnitudes.div_(largest).square_().sum(dim=-1).sqrt_().mul_(largest.squeeze(-1))
        scales.copy_(norms).div_(self.packing.levels).clamp_(min=_SMALLEST_SCALE)

    def _round_(self, numbers: Tensor, spare: Tensor) -> None:
        self._random.fill_(spare)
        spare.add_(numbers.abs()).floor_().clamp_(max=self.packing.levels)
        torch.copysign(spare, numbers, out=numbers)


class TernGrad(Codec):
    """Every tensor as -s, 0 or s at random, so that the mean is the tensor clipped at 2.5 standard deviations."""

    max_block = None
    has_feedback: ClassVar[bool] = False
    sends_mean_in_full: ClassVar[bool] = True
    clip: ClassVar[float] = 2.5

    def __init__(self) -> None:
        self._packing = Packing(2)
        self.multiple = self._packing.multiple
        self._random = _Random()
        self._sizes: list[int] = []
        #: Of every row: the first and last element, and the tensor that these belong to.
        self._pieces: list[list[tuple[int, int, int]]] = []
        self._scales: list[Tensor] = []

    def fit(self, sizes: Sequence[int], chunk: int, num_rows: int) -> None:
        """``sizes``: of the tensors that lie in the buffer, one after the other."""
        self._sizes, self._pieces = list(sizes), [[] for _ in range(num_rows)]
        start = 0
        for index, size in enumerate(sizes):
            for row in range(start // chunk, math.ceil((start + size) / chunk)):
                first, last = max(start, row * chunk), min(start + size, (row + 1) * chunk)
                self._pieces[row].append((first - row * chunk, last - row * chunk, index))
            start += size

    def num_scales(self, num_blocks: int) -> int:
        return max((len(pieces) for pieces in self._pieces), default=0)

    def num_codes(self, block: int, itemsize: int) -> int:
        return self._packing.num_codes(block)

    def prepare(self, values: Tensor, key: tuple[int, ...]) -> None:
        self._random.begin(values.device, key)
        self._scales = []
        for tensor in values.split(self._sizes):
            if tensor.numel() == 0:
                self._scales.append(tensor.new_zeros(()))
                continue
            largest, deviation = tensor.abs().amax(), tensor.std(correction=0) * self.clip
            # A tensor of equal numbers is not clipped; what its deviation comes out as is what rounding leaves of it.
            noise = largest * (16 * torch.finfo(tensor.dtype).eps)
            self._scales.append(torch.where(deviation > noise, torch.minimum(largest, deviation), largest))

    def encode_(self, blocks: Tensor, codes: Tensor, scales: Tensor, dropped: Tensor | None, work: Work) -> None:
        numbers = work.first.zero_()
        for number, (first, last, index) in enumerate(self._pieces[work.row]):
            values, drawn = blocks[..., first:last], work.second[..., first:last]
            scale = scales[..., number].copy_(self._scales[index]).clamp_(min=_SMALLEST_SCALE).unsqueeze(-1)
            is_chosen = self._random.fill_(drawn) < torch.div(values.abs(), scale)
            numbers[..., first:last].copy_(torch.where(is_chosen, values.sign(), 0.0))
        self._packing.pack_(numbers, codes, work.second)

    def decode_(self, codes: Tensor, scales: Tensor, out: Tensor, work: Work) -> None:
        self._packing.unpack_(codes, out, work.second)
        for number, (first, last, _) in enumerate(self._pieces[work.row]):
            out[..., first:last].mul_(scales[..., number].unsqueeze(-1))


# --------------------------------------------------------------------------------------------------------- by name

#: What ``payload`` may be, for models and for gradients.
MODEL_PAYLOADS = ("fp32", "bf16", "int8", "int4", "ternary", "topk:SHARE")
GRADIENT_PAYLOADS = (*MODEL_PAYLOADS, "qsgd:BITS", "terngrad")


def check_payload(value: object, *, gradients: bool) -> str:
    """The name of a codec, or fp32."""
    choices = GRADIENT_PAYLOADS if gradients else MODEL_PAYLOADS
    kind, colon, argument = str(value).partition(":")
    shape = next((shape for shape in GRADIENT_PAYLOADS if shape.partition(":")[:2] == (kind, colon)), None)
    if not isinstance(value, str) or shape not in choices:
        problem = "is unknown" if shape is None else "is for gradients (ssgd, pipe)"
        raise ValueError(f"payload={value!r} {problem}; choose from {', '.join(choices)}")
    problem = _argument_problem(kind, argument) if colon else ""
    if problem:
        raise ValueError(f"payload={value!r}: {problem}")
    return value


def _argument_problem(kind: str, argument: str) -> str:
    if kind == "topk":
        try:
            share = float(argument)
        except ValueError:
            share = math.nan
        return "" if 0 < share <= 1 else "the share must be above 0 and at most 1; use e.g. topk:0.01"
    bits = int(argument) if argument.isdecimal() else 0
    return "" if 2 <= bits <= 8 else "the bits must be a whole number from 2 to 8; use e.g. qsgd:4"


def make_codec(name: str) -> Codec:
    """A codec by the name that :func:`check_payload` has accepted."""
    kind, _, argument = name.partition(":")
    match kind:
        case "bf16":
            return Plain(torch.bfloat16)
        case "int8":
            return Scaled(8)
        case "int4":
            return Scaled(4)
        case "ternary":
            return Ternary()
        case "topk":
            return TopK(float(argument))
        case "qsgd":
            return QSGD(int(argument))
        case "terngrad":
            return TernGrad()
    raise ValueError(f"payload {name!r} has no codec")
