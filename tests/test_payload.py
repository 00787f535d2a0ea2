"""Coded payloads: the codecs as pure functions, and whole runs on real processes against an independent serial reference."""

from __future__ import annotations

import gc
import math
import re
import time
import weakref
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, SSGD, AsynLocalSGD, Checkpoints, CoCoDSGD, LocalSGD, PipeSGD, Sync, attach
from cocod_accel.averaging.codecs import TopK, Work, make_codec
from cocod_accel.averaging.coder import Coder, Layout, Wire, coded_bytes, launch_coded
from cocod_accel.averaging.header import Header, Kind
from cocod_accel.comm.emulated import Link
from cocod_accel.comm.in_process import InProcessGroup
from tests import loops, reference, reference_payload, resume
from tests.test_exactness import WEIGHTS, assert_traces_equal
from tests.workers import run_outcomes, run_workers

TINY = 2.0**-126  # the smallest normal float32
CODED = ("bf16", "int8", "int4", "ternary", "topk:0.3")

# ------------------------------------------------------------------------------------------- pure functions

NUMBERS = (
    st.floats(-(2.0**100), 2.0**100, width=32)
    | st.floats(-(2.0**-100), 2.0**-100, width=32)
    | st.sampled_from([0.0, TINY, 2.0**-149, 3e38])
)
BLOCKS = st.integers(1, 9).flatmap(
    lambda size: st.lists(st.lists(NUMBERS, min_size=size, max_size=size), min_size=1, max_size=4)
)


def encoded(name: str, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and what decoding them gives; the block is filled up with zeros to what the codec needs."""
    codec = make_codec(name)
    width = math.ceil(blocks.shape[1] / codec.multiple) * codec.multiple
    whole = nn.functional.pad(blocks, (0, width - blocks.shape[1]))
    codes = torch.empty(len(blocks), codec.num_codes(width, blocks.element_size()), dtype=codec.dtype)
    scales = torch.empty(len(blocks) if codec.num_scales(1) else 0)
    work = Work(torch.empty_like(whole), torch.empty_like(whole), 0)
    codec.prepare(whole.view(-1), (0,))
    dropped, out, total = torch.empty_like(whole), torch.empty_like(whole), torch.ones_like(whole)
    codec.encode_(whole, codes, scales, dropped, work)
    codec.decode_(codes, scales, out, work)
    codec.add_(codes, scales, total, 0.5, work)
    is_finite = out.isfinite()
    assert torch.equal((whole - dropped).isfinite(), is_finite), "a number that is none stays one, on both sides"
    slack = 1e-6 * max((abs(v) for v in whole[is_finite].tolist()), default=0.0)
    assert torch.allclose((whole - out)[is_finite], dropped[is_finite], 1e-6, slack), "what is kept is what was not said"
    assert torch.allclose(total[is_finite], (1 + out / 2)[is_finite], 1e-6, slack)
    return codes, scales, out[:, : blocks.shape[1]]


@given(BLOCKS, st.sampled_from([torch.float32, torch.float64]), st.sampled_from([("int8", 127), ("int4", 7)]))
def test_integers_are_off_by_half_a_scale_at_most(rows: list[list[float]], dtype: torch.dtype, way: tuple[str, int]) -> None:
    name, levels = way
    blocks = torch.tensor(rows, dtype=dtype)
    _, scales, seen = encoded(name, blocks)
    for block, scale, heard in zip(blocks.tolist(), scales.tolist(), seen.tolist(), strict=True):
        largest = max(abs(v) for v in block)
        assert scale == pytest.approx(max(largest / levels, TINY), rel=1e-6)
        slack = 1 + Fraction(1, 2**16)  # the quotient and the product are rounded, too: 127 * 2^-24 of a scale each
        for value, back in zip(block, heard, strict=True):
            code = round(back / scale)
            assert abs(code) <= levels
            assert abs(Fraction(value) - code * Fraction(scale)) <= Fraction(scale) / 2 * slack
            assert abs(Fraction(back) - code * Fraction(scale)) <= abs(code * Fraction(scale)) / 2**24


@given(BLOCKS, st.sampled_from([torch.float32, torch.float64]))
def test_ternary_is_the_nearest_of_three(rows: list[list[float]], dtype: torch.dtype) -> None:
    blocks = torch.tensor(rows, dtype=dtype)
    _, scales, seen = encoded("ternary", blocks)
    width = math.ceil(blocks.shape[1] / 4) * 4
    for block, scale, heard in zip(blocks.tolist(), scales.tolist(), seen.tolist(), strict=True):
        exact = min(max(abs(v) for v in block), 1.9 * float(sum(Fraction(abs(v)) for v in block) / width))
        assert scale == pytest.approx(max(exact, TINY), rel=1e-5)
        for value, back in zip(block, heard, strict=True):
            assert back in (-scale, 0.0, scale)
            assert abs(value - back) <= min(abs(value - s) for s in (-scale, 0.0, scale)) * (1 + 1e-5)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 1.0])
@given(BLOCKS)
def test_topk_keeps_the_largest(share: float, rows: list[list[float]]) -> None:
    blocks = torch.tensor(rows)
    codes, _, seen = encoded(f"topk:{share}", blocks)
    kept = math.ceil(share * blocks.shape[1])
    assert codes.shape[1] == 8 * kept
    for block, heard in zip(blocks.tolist(), seen.tolist(), strict=True):
        chosen = [v for v, back in zip(block, heard, strict=True) if back != 0]
        dropped = [abs(v) for v, back in zip(block, heard, strict=True) if back == 0]
        assert chosen == [back for back in heard if back != 0]
        assert len(chosen) <= kept
        assert max(dropped, default=0.0) <= min((abs(v) for v in chosen), default=math.inf)
        assert sum(v != 0 for v in block) <= kept or len(chosen) == kept


@given(BLOCKS)
def test_bf16_is_the_nearest(rows: list[list[float]]) -> None:
    _, _, seen = encoded("bf16", torch.tensor(rows))
    assert seen.tolist() == [[reference_payload.as_bfloat16(v) for v in torch.tensor(row).tolist()] for row in rows]


@pytest.mark.parametrize("name", CODED)
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(name: str) -> None:
    _, _, seen = encoded(name, torch.tensor([[0.0, -0.0], [1.0, math.inf], [1.0, math.nan], [1.0, 1.0]]))
    assert seen[0].tolist() == [0, 0]
    assert not seen[1].isfinite().all()
    assert seen[2].isnan().any()
    neighbour = [1, 0] if name.startswith("topk") else [1, 1]
    # The neighbour of a broken block is whole.
    assert sorted(seen[3].tolist(), reverse=True) == pytest.approx(neighbour, rel=0.06)
    huge = torch.full((1, 8), 3e38) * torch.tensor([1, -1] * 4)
    for dtype in (torch.float32, torch.float64):
        _, _, seen = encoded(name, huge.to(dtype))
        expected = 3 if name.startswith("topk") else 8
        assert int((seen != 0).sum()) == expected
        assert torch.allclose(seen[seen != 0], huge.to(dtype)[seen != 0], rtol=0.01)


@given(st.integers(1, 5000), st.integers(1, 9), st.integers(1, 3), st.integers(1, 9000), st.sampled_from([1, 2, 4, 8]))
def test_every_element_is_in_one_tile(size: int, num_workers: int, num_shards: int, limit: int, multiple: int) -> None:
    layout = Layout(size, num_workers, num_shards, multiple=multiple)
    assert layout.block <= 256
    assert layout.block % multiple == 0
    filled = layout.chunk * layout.num_rows - size
    assert 0 <= filled < layout.num_rows * (1 + multiple * layout.num_blocks)
    covered = 0
    for tile in layout.tiles(limit):
        num_rows, num_blocks = tile.shape
        assert tile.start == covered == tile.rows.start * layout.chunk + tile.blocks.start * layout.block
        assert 0 < tile.stop - tile.start <= num_rows * num_blocks * layout.block
        assert num_rows == 1 or num_blocks == layout.num_blocks
        assert num_rows * num_blocks == 1 or num_rows * num_blocks * layout.block <= limit
        assert len({row // num_workers for row in range(tile.rows.start, tile.rows.stop)}) == 1, "of one shard"
        covered = tile.stop
    assert covered == size


@given(st.integers(1, 3000), st.integers(1, 5), st.integers(1, 4))
def test_shards_hold_every_element_once(num_elements: int, num_workers: int, num_shards: int) -> None:
    layout = Layout(num_elements, num_workers, num_shards)
    stretches = [layout.elements_of(shard) for shard in range(num_shards)]
    assert [index for s in stretches for index in range(s.start, s.stop)] == list(range(num_elements))
    for tile in layout.tiles(100):
        (owner,) = [shard for shard in range(num_shards) if tile.rows.start in layout.rows_of(shard)]
        assert stretches[owner].start <= tile.start
        assert tile.stop <= stretches[owner].stop


@given(st.integers(1, 3000), st.integers(1, 5), st.sampled_from(["int8", "int4", "ternary", "topk:0.1", "qsgd:3", "bf16"]))
def test_rows_in_one_tile_are_coded_like_rows_alone(num_elements: int, num_workers: int, name: str) -> None:
    generator = torch.Generator().manual_seed(num_elements)
    values, like = (torch.randn(num_workers, num_elements, generator=generator) for _ in range(2))
    ends = []
    for limit in (1 << 18, 256):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cocod_accel.averaging.coder._CPU_TILE", limit)
            group = InProcessGroup(num_workers)
            coders = [Coder(name, like[0], group.member(rank)) for rank in range(num_workers)]
        headers = [Header(Kind.ROUND, 1, (1.0, 2.0, 3.0, 4.0, 5.0)[:num_workers], rank) for rank in range(num_workers)]
        means = torch.empty_like(values)
        for _ in range(2):
            for rank, coder in enumerate(coders):
                launch_coded([coder], [values[rank]], [like[0]], group.member(rank), headers[rank], 5.0)
            for coder, mean in zip(coders, means, strict=True):
                coder.decode(like[0], mean)
        ends.append([means, *(coder.residual for coder in coders), *(coder.owned_residual for coder in coders)])
    for together, alone in zip(*ends, strict=True):
        assert torch.equal(together, alone)


#: What a codec may take of float32's bytes, scales, places and filling included.
SHARES = {"bf16": 0.51, "int8": 0.27, "int4": 0.14, "ternary": 0.07, "topk:0.01": 0.03, "topk:0.3": 0.61}


@given(st.integers(1, 40_000), st.integers(1, 17), st.sampled_from(list(SHARES)))
def test_codes_are_as_short_as_they_are_said_to_be(num_elements: int, num_workers: int, name: str) -> None:
    coded, chunk = coded_bytes(name, num_elements, num_workers), math.ceil(num_elements / num_workers)
    assert coded <= num_workers * (SHARES[name] * 4 * chunk + (0 if chunk >= 1024 else 8))
    codec = make_codec(name)
    wire = Wire(codec, Layout.of(codec, num_elements, num_workers), num_workers, torch.empty(0, device="meta"))
    assert wire.bytes.numel() == coded + 8 * num_workers, "8 bytes of header a row"


@given(st.integers(1, 5), st.integers(1, 1200), st.integers(0, 2**31), st.sampled_from(CODED))
def test_nothing_is_lost_only_late(num_workers: int, size: int, seed: int, name: str) -> None:
    """Telescoping: sum of the means that were sent + what both residuals still owe == sum of the exact means."""
    generator = torch.Generator().manual_seed(seed)
    factors, total = tuple(float(i + 1) for i in range(num_workers)), num_workers * (num_workers + 1) / 2
    group = InProcessGroup(num_workers)
    centre = torch.randn(size, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopK, "max_block", 100 if seed % 2 else TopK.max_block)  # a chunk in parts, as of very large models
        coders = [Coder(name, centre, group.member(rank)) for rank in range(num_workers)]
    owed = torch.zeros(size, dtype=torch.float64)
    for number in range(4):
        spread = 10 ** torch.randint(-6, 4, (num_workers, 1), generator=generator).double()
        models = centre + spread * torch.randn(num_workers, size, generator=generator, dtype=torch.float64)
        headers = [Header(Kind.ROUND, number, factors, rank) for rank in range(num_workers)]
        for rank, coder in enumerate(coders):
            launch_coded([coder], [models[rank]], [centre], group.member(rank), headers[rank], total)
        means = [torch.empty_like(centre) for _ in coders]
        for rank, (coder, mean) in enumerate(zip(coders, means, strict=True)):
            assert [headers[rank].read_rows(rows) for rows in coder.headers] == [(False, False)] * 2
            coder.decode(centre, mean)
            assert torch.equal(mean, means[0])
        exact = sum(f * (m - centre) for f, m in zip(factors, models, strict=True)) / total
        owed = owed + exact - (means[0] - centre)
        kept = sum(f * coder.residual for f, coder in zip(factors, coders, strict=True)) / total
        kept = kept + torch.cat([coder.owned_residual for coder in coders])[:size]
        assert torch.allclose(owed, kept, rtol=0, atol=1e-9 * float(models.abs().max()))
        centre = means[0].clone()


# ---------------------------------------------------------------------------------- against the serial reference

STEPS = 9


def wide_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """1443 parameters: several blocks a chunk, and a number that nothing divides."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 144), nn.Tanh(), nn.Linear(144, 3)).to(dtype)


def scalar_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Two parameters: fewer than workers."""
    torch.manual_seed(3)

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope, self.shift = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.slope * x[:, :3] + self.shift

    return Line().to(dtype)


MODELS = {"small": loops.make_model, "wide": wide_model, "scalar": scalar_model}
#: (algorithm, codec, model, optimizer, weights, period, dtype)
ROWS = [
    *(
        ("cocod", codec, "small", optimizer, weighting, period, torch.float64)
        for codec in CODED
        for optimizer in ("momentum", "adam")
        for weighting in WEIGHTS
        for period in (1, 3)
    ),
    *(("cocod", codec, model, "momentum", "unequal", 3, torch.float64) for codec in CODED for model in ("wide", "scalar")),
    *(("local", codec, "small", "momentum", "unequal", 3, torch.float64) for codec in CODED),
    ("asynlocal", "int8", "small", "momentum", "equal", 3, torch.float64),
    # Two workers with equal weights: the sum of two is the same in any order, so float32 is compared bit for bit.
    # Not those with scales, whose products are rounded differently where they are fused with a difference.
    *(("cocod", codec, "wide", "momentum", "equal", 3, torch.float32) for codec in ("bf16", "topk:0.3")),
]


def begin(rank: int, algorithm: Any, model: nn.Module, optimizer: str = "momentum", weight: float = 1) -> Any:
    wrapped = DistributedDataParallel(model)
    made = loops.OPTIMIZERS[optimizer](wrapped)
    return wrapped, made, attach(wrapped, made, algorithm, weight=weight)


def step(model: nn.Module, optimizer: Any, rank: int, number: int) -> None:
    dtype = list(model.parameters())[-1].dtype
    optimizer.zero_grad()
    loops.loss_of(model, *loops.make_batch(rank, number, dtype=dtype)).backward()
    optimizer.step()


def centres(sync: Sync) -> list[Tensor]:
    (part,) = sync._driver.replica.parts
    assert part.point is not None
    return [core.clone() for core in part.point.cores]


def residuals(sync: Sync) -> list[Tensor]:
    (part,) = sync._driver.replica.parts
    return [kept.clone() for coder in part._coders for kept in (coder.residual, coder.owned_residual)]


def all_rows(rank: int, rows: list[Any]) -> Any:
    found = []
    for name, codec, model_name, optimizer_name, weighting, period, dtype in rows:
        kind: Any = ALGORITHMS[name]
        weight = WEIGHTS[weighting][rank]
        model, optimizer, sync = begin(rank, kind(period, payload=codec), MODELS[model_name](dtype), optimizer_name, weight)
        trace, common = [], []
        for number in range(STEPS):
            step(model, optimizer, rank, number)
            trace.append(loops.snapshot(model))
            if name != "cocod":
                common.append(centres(sync))
            elif number % 2:
                sync._driver.replica.parts[0].land()  # as a state would; on half of the steps, so that both ways are taken
                common.append(centres(sync))
        found.append((trace, common))
        sync.detach()
    return found


@pytest.mark.parametrize("num_workers", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_every_step_equals_the_serial_reference(num_workers: int) -> None:
    rows = [row for row in ROWS if row[-1] == torch.float64 or num_workers == 2]
    rows = rows[:: 2 if num_workers == 5 else 1]
    results = run_workers(num_workers, all_rows, rows)
    for index, row in enumerate(rows):
        name, codec, model_name, optimizer, weighting, period, dtype = row
        batches = [[loops.make_batch(i, t, dtype=dtype) for t in range(STEPS)] for i in range(num_workers)]
        models = [MODELS[model_name](dtype)] * num_workers
        weights = WEIGHTS[weighting][:num_workers]
        make = loops.OPTIMIZERS[optimizer]
        expected = reference_payload.run(name, codec, models, make, batches, loops.loss_of, weights, period)
        got = [worker[index][0] for worker in results]
        if dtype == torch.float32:
            for ours, theirs in zip(got, expected, strict=True):
                assert all(torch.equal(a, b) for p, q in zip(ours, theirs, strict=True) for a, b in zip(p, q, strict=True))
        else:
            # Rounding to codes is a step function: 1e-16 before it is 1e-16 after it, unless a value lies on the very step.
            assert_traces_equal(got, expected, f"{row}, N={num_workers}")
        common = [worker[index][1] for worker in results]
        for other in common[1:]:
            for mine, theirs in zip(common[0], other, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), "the common mean is not common"


@pytest.mark.parametrize("codec", CODED)
def test_one_worker_is_plain_training_bit_for_bit(codec: str) -> None:
    def trained(with_sync: bool) -> tuple[list[Tensor], int]:
        model = loops.make_model(torch.float32)
        optimizer = loops.OPTIMIZERS["momentum"](model)
        sync = attach(model, optimizer, CoCoDSGD(2, payload=codec)) if with_sync else None
        for number in range(STEPS):
            step(model, optimizer, 0, number)
            if sync is not None and number == 4:
                with sync.averaged():
                    pass
                sync.load_state_dict(sync.state_dict())
        if sync is not None:
            sync.finish()
        return loops.snapshot(model), 0 if sync is None else sync.stats().bytes

    (coded, num_bytes), (plain, _) = trained(True), trained(False)
    assert num_bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(coded, plain, strict=True))


def apart(rank: int, codec: str) -> Any:
    model = loops.make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    wrapped = DistributedDataParallel(model, init_sync=False)
    optimizer = loops.OPTIMIZERS["momentum"](wrapped)
    sync = attach(wrapped, optimizer, CoCoDSGD(3, payload=codec), weight=rank + 1)
    trace = []
    for number in range(STEPS):
        step(wrapped, optimizer, rank, number)
        trace.append(loops.snapshot(wrapped))
        if number + 1 == 5:  # an evaluation, with an average in flight
            sync._driver.replica.route.comm.let_go(10)  # its second half begins, which is when E becomes what it owes
            before = [*centres(sync), *residuals(sync)]
            with sync.averaged():
                shown = loops.snapshot(wrapped)
            assert all(torch.equal(a, b) for a, b in zip(before, [*centres(sync), *residuals(sync)], strict=True))
            assert all(torch.equal(a, b) for a, b in zip(trace[-1], loops.snapshot(wrapped), strict=True))
    return trace, shown


def all_apart(rank: int) -> Any:
    return [apart(rank, codec) for codec in CODED]


def test_different_starts_and_an_evaluation() -> None:
    """The first mean is sent in full; averaged() is exact, and changes nothing that is trained."""
    for codec, *results in zip(CODED, *run_workers(3, all_apart), strict=True):
        check_apart(codec, results)


def check_apart(codec: str, results: Any) -> None:
    models = [loops.make_model() for _ in range(3)]
    with torch.no_grad():
        for rank, model in enumerate(models):
            for parameter in model.parameters():
                parameter.add_(rank)
    batches = [[loops.make_batch(i, t) for t in range(STEPS)] for i in range(3)]
    make = loops.OPTIMIZERS["momentum"]
    expected = reference_payload.run("cocod", codec, models, make, batches, loops.loss_of, [1, 2, 3], 3)
    assert_traces_equal([trace for trace, _ in results], expected, codec)
    for trace, shown in results:
        w = reference.shares([1, 2, 3])
        exact = [sum(wi * r[0][4][p] for wi, r in zip(w, results, strict=True)) for p in range(len(trace[4]))]
        assert all(torch.allclose(a, b, rtol=1e-14, atol=1e-15) for a, b in zip(shown, exact, strict=True))


# ------------------------------------------------------------------------------------------- all that is exact


class Mixed(nn.Module):
    """Parameters of three dtypes, BatchNorm statistics, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide, self.norm = nn.Linear(6, 7).double(), nn.BatchNorm1d(7).double()
        self.out = nn.Linear(7, 3)
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        # gloo of torch 2.7 and 2.8 cannot broadcast a complex one, so DDP cannot be made.
        is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
        self.turn = nn.Parameter(torch.tensor([1.0, 2.0, 0.5] if is_old else [1 + 1j, 2 - 1j, 0.5j]))
        self.last = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.norm(self.wide(x)).float()) + self.shift
        return self.last((y * self.turn).abs().double())  # type: ignore[no-any-return]


MIXED = [("cocod", "int8"), ("cocod", "bf16"), ("local", "int8"), ("asynlocal", "bf16")]


def all_mixed(rank: int) -> Any:
    return [mixed(rank, name, codec) for name, codec in MIXED]


def mixed(rank: int, name: str, codec: str) -> Any:
    kind: Any = ALGORITHMS[name]
    model, optimizer, sync = begin(rank, kind(2, payload=codec), Mixed(), "sgd", 1 if name == "asynlocal" else rank + 1)
    for number in range(5):
        step(model, optimizer, rank, number)
        if number == 2:
            with torch.inference_mode():  # an evaluation of this worker's own model, in which a second stage may begin
                model.module.eval()(loops.make_batch(rank, 99)[0])
            model.module.train()
    sync._driver.drain()
    local = loops.snapshot(model)
    sync.finish()
    finished = [p.detach().clone() for p in (*model.parameters(), *model.buffers())]
    owed = any(bool(part.any()) for part in residuals(sync))
    loaded = centres(sync)
    for number in range(5, 8):
        step(model, optimizer, rank, number)
    if name != "asynlocal":
        sync.reweight(3 - rank)
        owed = owed or any(bool(part.any()) for part in residuals(sync))
    return local, finished, owed, loaded, loops.snapshot(model)


def test_finish_and_reweight_are_exact_whatever_the_model_is_made_of() -> None:
    for (name, _), *results in zip(MIXED, *run_workers(2, all_mixed), strict=True):
        check_mixed(name, results)


def check_mixed(name: str, results: Any) -> None:
    w = [0.5, 0.5] if name == "asynlocal" else [1 / 3, 2 / 3]
    for _, finished, owed, loaded, last in results:
        for index, pair in enumerate(zip(*(local for local, *_ in results), strict=True)):
            rounding = 2.0**-8 if pair[0].dtype == torch.bfloat16 else 1e-6 if pair[0].dtype != torch.float64 else 1e-14
            assert torch.allclose(finished[index], w[0] * pair[0] + w[1] * pair[1], rtol=rounding, atol=rounding / 10)
        assert all(torch.equal(a, b) for a, b in zip(finished, results[0][1], strict=True))
        assert not owed
        assert [c.dtype for c in loaded] == [torch.float32, torch.float64]
        assert all(torch.equal(a, b) for a, b in zip(loaded, results[0][3], strict=True))
        if name != "asynlocal":
            assert all(torch.equal(a, b) for a, b in zip(last, results[0][4], strict=True))
        assert all(torch.isfinite(torch.view_as_real(p) if p.is_complex() else p).all() for p in finished)


def one_round(rank: int) -> Any:
    found = []
    for codec in ("fp32", *CODED):
        algorithm = LocalSGD(1, optimizer_state="average", payload=codec)
        model, optimizer, sync = begin(rank, algorithm, Mixed(), "momentum", rank + 1)
        step(model, optimizer, rank, 0)
        state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        found.append([value.clone() for value in (*model.buffers(), *state)])
        sync.detach()
    return found


def test_statistics_and_optimizer_state_travel_in_full_beside_the_codes() -> None:
    """After one step from a common start they are what they are without codes, to the bit."""
    for plain, *coded in run_workers(2, one_round):
        assert len(plain) > 8
        for other in coded:
            assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


# ---------------------------------------------------------------------------------------------------- resuming


def stopped(rank: int, folder: str, name: str, codec: str, at: int | None, by_hand: bool) -> Any:
    """Train, save after ``at`` steps and go on from there in new objects; None: never stop, but wait as saving would."""
    kind: Any = ALGORITHMS[name]
    trace = []
    model, optimizer, sync = begin(rank, kind(4, payload=codec), wide_model(torch.float32), "adam", 1 + rank)
    for number in range(12):
        step(model, optimizer, rank, number)
        trace.append(loops.snapshot(model))
        if number + 1 != at:
            continue
        checkpoints = None if by_hand else Checkpoints(folder, sync)
        if checkpoints is None:
            saved = model.state_dict(), optimizer.state_dict(), sync.state_dict()
            torch.save(saved, Path(folder) / f"{rank}.pt")
        else:
            checkpoints.save({"step": at})
        # What was saved must be all there is: everything else is made anew.
        sync.detach()
        model, optimizer, sync = begin(rank, kind(4, payload=codec), wide_model(torch.float32), "adam", 1 + rank)
        if checkpoints is None:
            states = torch.load(Path(folder) / f"{rank}.pt", weights_only=True)
            for thing, state in zip((model, optimizer, sync), states, strict=True):
                thing.load_state_dict(state)
        else:
            resumed = Checkpoints(folder, sync).resume()
            assert resumed is not None
            assert resumed.is_exact
    sync.finish()
    sync.detach()
    return [*trace, loops.snapshot(model)], sync.stats().bytes, sync.stats().rounds


STOPS = [("cocod", "int8", 6, True), ("cocod", "int8", 8, False), ("cocod", "bf16", 7, False), ("local", "int8", 6, False)]


def all_stopped(rank: int, folder: str) -> Any:
    return [
        [stopped(rank, f"{folder}/{number}", name, codec, point, by_hand) for point in (None, at)]
        for number, (name, codec, at, by_hand) in enumerate(STOPS)
    ]


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for number in range(len(STOPS)):
        (tmp_path / str(number)).mkdir()
    for worker in run_workers(3, all_stopped, str(tmp_path)):
        for (expected, *counts), (found, *other_counts) in worker:
            assert counts == other_counts
            for row, other in zip(expected, found, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(row, other, strict=True))


@pytest.mark.parametrize("point", [13, resume.EVALUATION])
def test_the_trainer_goes_on_bit_for_bit(point: int, tmp_path: Path) -> None:
    resume.stop_and_go_on(resume.Case("cocod", True, "sgd", point, True, payload="int8"), tmp_path, "run")


def fewer(rank: int, folder: str, save: bool) -> Any:
    model, optimizer, sync = begin(rank, CoCoDSGD(2, payload="int8"), loops.make_model(), "sgd")
    checkpoints = Checkpoints(folder, sync)
    resumed = checkpoints.resume()
    for number in range(5):
        step(model, optimizer, rank, number)
    if save:
        checkpoints.save()
    sync.finish()
    return None if resumed is None else resumed.is_exact, loops.snapshot(model)


def test_another_number_of_workers_goes_on_from_a_mean_sent_in_full(tmp_path: Path) -> None:
    run_workers(3, fewer, str(tmp_path / "c"), True)
    for exact, found in (results := run_workers(2, fewer, str(tmp_path / "c"), False)):
        assert exact is False
        assert all(torch.equal(a, b) for a, b in zip(found, results[0][1], strict=True))


# ------------------------------------------------------------------------------------------ bytes, time, learning


def counted(rank: int) -> dict[str, int]:
    sent = {}
    for codec in ("fp32", *CODED):
        torch.manual_seed(0)
        model, optimizer, sync = begin(
            rank, CoCoDSGD(1, payload=codec), nn.Sequential(nn.Linear(6, 9000), nn.Linear(9000, 3))
        )
        for number in range(3):
            step(model, optimizer, rank, number)
        sync.state_dict()
        sent[codec] = sync.stats().bytes
        sync.detach()
    return sent


@pytest.mark.parametrize("num_workers", [2, 3])
def test_bytes_are_those_that_are_sent(num_workers: int) -> None:
    sent = run_workers(num_workers, counted)[0]
    size = 90_003
    assert sent["fp32"] == 2 * round(2 * (num_workers - 1) / num_workers * 4 * size)  # two rounds have been merged
    assert 0.25 <= sent["int8"] / sent["fp32"] <= 0.27
    share = math.ceil(size / num_workers)
    num_blocks = math.ceil(share / 256)
    row = (
        math.ceil((4 * num_blocks + num_blocks * math.ceil(share / num_blocks)) / 4) * 4
    )  # scales and codes, in whole words
    assert sent["int8"] == 2 * 2 * (num_workers - 1) * row
    assert sent["bf16"] / sent["fp32"] == pytest.approx(0.5, abs=0.01)


def all_on_slow_link(rank: int) -> Any:
    return [on_slow_link(rank, codec) for codec in ("fp32", "int8")]


def on_slow_link(rank: int, codec: str) -> Any:
    model, optimizer, sync = begin(rank, CoCoDSGD(2, payload=codec), wide_model(torch.float32))
    sync.control.emulate_link(Link(bandwidth_mbit=1.0))
    sync.control.listen()
    sync.control.record_spans()
    if rank == 1:
        sync.control.request(save=True)
    saves = []
    for number in range(8):
        step(model, optimizer, rank, number)
        saves.append(sync.control.agreed().save)
    sync.state_dict()
    lengths = [end - start for name, start, end in sync.control.take_spans() if name == "communicate"]
    return max(lengths), sync.stats().bytes, saves, loops.snapshot(model)


def test_an_emulated_link_is_stretched_to_the_bytes_that_are_sent() -> None:
    results = dict(zip(("fp32", "int8"), zip(*run_workers(2, all_on_slow_link), strict=True), strict=True))
    for codec, workers in results.items():
        for length, num_bytes, saves, _ in workers:
            # The clock is a float, and may round.
            assert length >= 0.999 * num_bytes / 3 * 8 / 1e6, f"{codec}: three means were merged"
            assert saves == workers[0][2], "a wish is known to all after the same step"
            assert sum(saves) == 1
    assert results["int8"][0][1] < 0.3 * results["fp32"][0][1]


class Pause(torch.autograd.Function):
    """In a backward: until what every worker has sent in the first stage has arrived."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, has_arrived: Callable[[], bool]) -> Tensor:
        ctx.has_arrived = has_arrived
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        deadline = time.monotonic() + 60
        while not ctx.has_arrived():
            assert time.monotonic() < deadline, "the first stage never ended"
        return gradient, None


class Paused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 900), nn.Linear(900, 3)
        self.has_arrived: Callable[[], bool] = lambda: True

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Pause.apply(self.first(x), self.has_arrived))  # type: ignore[no-any-return]


def gathers_in_backward(rank: int) -> list[bool]:
    own = Paused()
    model, optimizer, sync = begin(rank, CoCoDSGD(1, payload="int8"), own)

    def handle() -> Any:
        flight = sync._driver.replica.parts[0]._in_flight
        assert flight is not None
        return flight.handle

    found = []
    for number in range(3):
        if number:  # with equal starts nothing travels in the first round
            own.has_arrived = lambda: all(work.is_completed() for work in handle()._inner._works)
        x, y = loops.make_batch(rank, number, dtype=torch.float32)
        optimizer.zero_grad()
        loops.loss_of(model, x, y).backward()
        if number:
            found.append(bool(handle()._has_begun))
        optimizer.step()
    sync.finish()
    return found


def test_the_second_stage_begins_while_the_worker_computes() -> None:
    """Else half of a coded average could never be hidden in rounds of one step."""
    assert run_workers(2, gathers_in_backward) == [[True, True]] * 2


def forgotten(rank: int) -> bool:
    """Whether a model is kept by hooks that nobody took off."""
    model, optimizer, sync = begin(rank, CoCoDSGD(1, payload="int8"), wide_model(torch.float32))
    for number in range(3):
        step(model, optimizer, rank, number)
    sync.finish()
    watched = weakref.ref(model.module[0].weight)
    del model, optimizer, sync
    gc.collect()
    return watched() is not None


def test_a_model_is_freed_without_detach() -> None:
    assert run_workers(2, forgotten) == [False, False]


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(20))

    def forward(self) -> Tensor:
        return self.w * 1


def learning(rank: int) -> list[float]:
    """One coordinate is thrown about by noise; the others move by less than half a scale a round, all in one direction."""
    truth, distances = torch.linspace(-1, 1, 20)[1:], []
    for codec, feedback in (("fp32", True), ("int8", True), ("int8", False)):
        model = DistributedDataParallel(Vector())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = attach(model, optimizer, LocalSGD(2, payload=codec))
        for number in range(600):
            optimizer.zero_grad()
            w = model()
            noise = 20.0 if number // 2 % 2 else -20.0
            ((w[0] - noise) ** 2 + 0.03 * ((w[1:] - truth) ** 2).sum()).div(2).backward()
            optimizer.step()
            if not feedback:
                for coder in sync._driver.replica.parts[0]._coders:
                    coder.clear()
        distances.append(float((model.module.w.detach()[1:] - truth).norm() / truth.norm()))  # not of an exact mean
        sync.detach()
    return distances


def test_int8_learns_what_fp32_learns_because_of_its_feedback() -> None:
    full, coded, forgetful = run_workers(2, learning)[0]
    assert full < 0.2
    assert coded == pytest.approx(full, abs=0.02)
    assert forgetful > 3 * full


# ---------------------------------------------------------------------------------------------------- bad input


def test_what_an_algorithm_cannot_send_is_refused() -> None:
    models = "choose from fp32, bf16, int8, int4, ternary, topk:SHARE"
    for kind in (CoCoDSGD, LocalSGD, AsynLocalSGD):
        for name, rule in {
            "int5": f"payload='int5' is unknown; {models}",
            "topk": f"payload='topk' is unknown; {models}",
            "topk:SHARE": "payload='topk:SHARE': the share must be above 0 and at most 1; use e.g. topk:0.01",
            "topk:0": "payload='topk:0': the share must be above 0 and at most 1; use e.g. topk:0.01",
            "topk:2": "payload='topk:2': the share must be above 0 and at most 1; use e.g. topk:0.01",
            "topk:nan": "payload='topk:nan': the share must be above 0 and at most 1; use e.g. topk:0.01",
            "qsgd:4": f"payload='qsgd:4' is for gradients (ssgd, pipe); {models}",
            "terngrad": f"payload='terngrad' is for gradients (ssgd, pipe); {models}",
        }.items():
            with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
                kind(2, payload=name)
    for sender in (SSGD, PipeSGD):
        for name in ("qsgd:1", "qsgd:9", "qsgd:x", "qsgd:"):
            rule = f"payload={name!r}: the bits must be a whole number from 2 to 8; use e.g. qsgd:4"
            with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
                sender(payload=name)
        with pytest.raises(ValueError, match=r"payload='fp16' is unknown; choose from fp32, .*terngrad"):
            sender(payload="fp16")
        wrong: Any = "1"
        with pytest.raises(TypeError, match="seed='1' is not an int"):
            sender(payload="qsgd:4", seed=wrong)
    assert repr(SSGD()) == "SSGD()"
    assert repr(PipeSGD(payload="qsgd:4", seed=3)) == "PipeSGD(payload='qsgd:4', seed=3)"
    assert repr(CoCoDSGD(2, payload="int8")) == "CoCoDSGD(period=2, payload='int8')"


def disagreeing(rank: int) -> None:
    begin(rank, CoCoDSGD(2, payload=["int8", "fp32"][rank]), loops.make_model())


def test_workers_must_agree() -> None:
    for outcome in run_outcomes(2, disagreeing):
        assert outcome.error is not None
        assert "workers differ in payload: rank 0 has int8, rank 1 has fp32; pass the same" in outcome.error[1]


def refused(rank: int) -> list[str]:
    def attached(codec: str, **options: Any) -> Sync:
        model = DistributedDataParallel(loops.make_model())
        return attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(2, payload=codec), **options)

    plain, other = attached("fp32").state_dict(), attached("bf16").state_dict()
    (part,) = other["averages"]["parts"]
    short = {**part, "point": {"z": [part["point"]["z"][0][:-1]], "velocity": []}}
    shorter = {**part, "residuals": [part["residuals"][0][:-1]]}
    states = [{**other, "averages": {"parts": [changed], "drift": None}} for changed in (short, shorter)]
    messages = []
    for codec, state in (("int8", plain), ("bf16", states[0]), ("bf16", states[1])):
        with pytest.raises(ValueError, match="saved") as error:
            attached(codec).load_state_dict(state)
        messages.append(str(error.value))
    return messages


def test_states_of_other_payloads_are_refused() -> None:
    for other, short, shorter in run_workers(2, refused):
        assert other == "the state was saved with payload=fp32, but attached with int8; use the same"
        assert short == "the saved common point has [52] elements, this model [53]; load a state of this model"
        assert shorter == "the saved payload has [52] elements, this model [53]; load a state of this model"
