"""The pure parts: weights, flat copies and merge rules, on shapes and values hypothesis makes up."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cocod_accel.averaging import flat
from cocod_accel.averaging.flat import FlatCopy
from cocod_accel.averaging.replica import Replica
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.weights import Weights, check_weight, mean_, negated_delta_
from cocod_accel.comm.handles import Handle, SoloComm, exposed_and_hidden, ring_bytes

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
WEIGHTS = st.lists(st.one_of(st.integers(1, 5000), st.floats(1e-3, 1e3)), min_size=1, max_size=6)


def make_tensor(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    if layout == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, 1)
    if layout == "channels_last" and tensor.dim() == 4:
        return tensor.to(memory_format=torch.channels_last)
    return tensor


TENSORS = st.lists(
    st.tuples(SHAPES, st.sampled_from(DTYPES), st.sampled_from(["plain", "transposed", "channels_last"])), max_size=7
).map(lambda specs: [make_tensor(*spec, seed=i) for i, spec in enumerate(specs)])


@given(TENSORS, TENSORS, st.sampled_from([1, 64, 1 << 20]))
def test_a_flat_copy_restores_every_tensor_bit_for_bit(
    sources: list[Tensor], extras: list[Tensor], segment_bytes: int
) -> None:
    before, flat._CPU_SEGMENT_BYTES = flat._CPU_SEGMENT_BYTES, segment_bytes
    try:
        copy = FlatCopy(sources, extras)
    finally:
        flat._CPU_SEGMENT_BYTES = before
    copy.load()
    tensors = [*sources, *extras]
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    copy.store()
    assert all(torch.equal(tensor, original) for tensor, original in zip(tensors, kept, strict=True))
    num_reals = sum(t.numel() * (2 if t.is_complex() else 1) for t in tensors)
    assert sum(buffer.numel() for buffer in copy.buffers) == num_reals
    assert sum(segment.flat.numel() for segment in copy.segments) == num_reals
    # One buffer per payload dtype: 16-bit tensors travel in float32.
    assert {buffer.dtype for buffer in copy.buffers} <= {torch.float32, torch.float64}
    assert len({buffer.dtype for buffer in copy.buffers}) == len(copy.buffers)


def test_a_flat_copy_follows_a_parameter_whose_storage_was_replaced() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    copy = FlatCopy([parameter])
    parameter.data = torch.ones(3)
    with torch.no_grad():
        copy.load()
        assert copy.buffers[0].tolist() == [1, 1, 1]
        copy.buffers[0].fill_(2)
        copy.store()
    assert parameter.tolist() == [2, 2, 2]


@pytest.mark.parametrize("sizes", [[], [3], [5], [4, 1]])
def test_a_saved_state_that_does_not_fit_is_refused(sizes: list[int]) -> None:
    copy = FlatCopy([torch.zeros(4)])
    copy.load()
    with pytest.raises(ValueError, match="elements, this model"):
        copy.fill([torch.ones(size) for size in sizes])
    assert copy.buffers[0].tolist() == [0, 0, 0, 0]


@given(WEIGHTS)
def test_weights_are_normalised(values: list[float]) -> None:
    floats = tuple(float(value) for value in values)
    exact = sum(Fraction(value) for value in floats)
    views = [Weights(floats, rank) for rank in range(len(floats))]
    for view, value in zip(views, floats, strict=True):
        assert view.share == pytest.approx(float(Fraction(value) / exact), rel=1e-15)
        assert view.factor / view.total == pytest.approx(view.share, rel=1e-15)
    assert math.fsum(view.share for view in views) == pytest.approx(1, rel=1e-15)
    assert sum(Fraction(view.factor) for view in views) == pytest.approx(Fraction(views[0].total), rel=1e-15)


def test_integer_weights_are_reduced_so_that_float32_sums_are_exact() -> None:
    assert [Weights((32, 64, 96), rank).factor for rank in range(3)] == [1, 2, 3]
    assert Weights((32, 64, 96)).total == 6
    assert [Weights((7.5, 7.5), rank).factor for rank in range(2)] == [1, 1]


def test_repeated_averaging_of_equal_models_does_not_make_them_grow() -> None:
    """Multiplying by rounded weights 1/3 in float32 would grow this by 3e-8 a round, 3e-4 in all."""
    weights = [Weights((1, 1, 1), rank) for rank in range(3)]
    x = torch.linspace(0.1, 7, 97)
    start = x.clone()
    for _ in range(10_000):
        total = torch.zeros_like(x)
        for weight in weights:
            total += x * weight.factor
        x = mean_(total, weights[0].total)
    assert torch.allclose(x, start, rtol=1e-6, atol=0)


@given(WEIGHTS, st.integers(0, 40), st.sampled_from([torch.float32, torch.float64]))
def test_the_merge_equals_its_formula(values: list[float], size: int, dtype: torch.dtype) -> None:
    floats = tuple(float(value) for value in values)
    generator = torch.Generator().manual_seed(size)
    snapshots = [torch.randn(size, generator=generator, dtype=dtype) for _ in floats]
    weights = [Weights(floats, rank) for rank in range(len(floats))]
    total = torch.zeros(size, dtype=dtype)
    for snapshot, weight in zip(snapshots, weights, strict=True):
        total += snapshot * weight.factor
    wide = torch.stack([s.double() for s in snapshots])
    mean = (wide * torch.tensor([w.share for w in weights], dtype=torch.float64)[:, None]).sum(0)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    delta = negated_delta_(total.clone(), snapshots[0], weights[0].total)
    assert torch.allclose(delta.double(), snapshots[0].double() - mean, rtol=0, atol=tolerance)
    assert torch.allclose(mean_(total, weights[0].total).double(), mean, rtol=0, atol=tolerance)


class SumOf:
    """A group of workers in one process: every launch is complete when all of them have launched."""

    shard_index, num_shards = 0, 1

    def __init__(self, rank: int, size: int, table: dict[int, list[Tensor]]) -> None:
        self.rank, self.size, self.table = rank, size, table

    def launch(self, tensors: Any) -> Handle:
        self.table[self.rank] = list(tensors)
        if len(self.table) == self.size:
            for column in zip(*self.table.values(), strict=True):
                total = torch.stack(list(column)).sum(0)
                for tensor in column:
                    tensor.copy_(total)
            self.table.clear()
        return Handle((), self.sent_bytes(tensors))

    def sent_bytes(self, tensors: Any) -> int:
        return ring_bytes(tensors, self.size)

    def exchange(self, parts: Any) -> Handle:
        raise AssertionError("nothing here is coded")

    def let_go(self, seconds: float) -> None:
        pass


@given(
    st.lists(st.tuples(SHAPES, st.sampled_from([torch.float64, torch.float32])), min_size=1, max_size=4),
    st.lists(st.integers(1, 99), min_size=2, max_size=4),
)
def test_a_round_of_several_replicas_equals_the_formula(specs: list[Any], values: list[int]) -> None:
    num_workers = len(values)
    table: dict[int, list[Tensor]] = {}
    floats = tuple(float(value) for value in values)
    models = [
        [make_tensor(shape, dtype, "plain", 100 * rank + i) for i, (shape, dtype) in enumerate(specs)]
        for rank in range(num_workers)
    ]
    comms = [SumOf(rank, num_workers, table) for rank in range(num_workers)]
    replicas = [Replica(models[i], list, Route(comms[i], Weights(floats, i), comms[i])) for i in range(num_workers)]
    starts = [[t.double().clone() for t in model] for model in models]
    for replica in replicas:
        replica.launch()
    for rank, model in enumerate(models):  # local steps
        for tensor in model:
            tensor += rank + 1
    for replica in replicas:
        replica.merge()
    for rank, model in enumerate(models):
        for i, tensor in enumerate(model):
            mean = sum(w / sum(values) * starts[j][i] for j, w in enumerate(values))
            expected = starts[rank][i] + (rank + 1) + (mean - starts[rank][i])
            assert torch.allclose(tensor.double(), expected, rtol=1e-5, atol=1e-5)


def test_with_one_worker_nothing_changes_not_even_a_signed_zero() -> None:
    tensor = torch.tensor([-0.0, 1.5])
    replica = Replica([tensor], list, Route(SoloComm(), Weights((3.0,)), SoloComm()))
    replica.launch()
    replica.merge()
    replica.equalise()
    with replica.evaluation.averaged():
        pass
    assert math.copysign(1, tensor[0].item()) == -1
    assert tensor[1] == 1.5


@pytest.mark.parametrize("weight", [0, -1, 0.0, math.nan, math.inf])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight=.* pass this worker's batch size"):
        check_weight(weight)


@pytest.mark.parametrize("weight", [None, "32", True, 1j, [32]])
def test_a_weight_of_the_wrong_type_is_refused(weight: object) -> None:
    with pytest.raises(TypeError, match=r"weight=.* is not a number"):
        check_weight(weight)


def test_time_is_split_where_the_main_thread_blocks() -> None:
    assert exposed_and_hidden([(0, 4), (1, 3), (5, 7)], blocked_from=6) == (1, 5)
    assert exposed_and_hidden([], blocked_from=0) == (0, 0)


def test_bytes_are_counted_as_in_a_ring() -> None:
    assert ring_bytes([torch.zeros(100)], 4) == 600
    assert ring_bytes([torch.zeros(100)], 1) == 0
