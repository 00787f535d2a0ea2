"""Coded gradients: against a serial reference, unbiased where they are said to be, and resumed bit-exactly."""

from __future__ import annotations

import copy
import hashlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import SSGD, PipeSGD, attach
from cocod_accel.averaging.coder import Coder
from cocod_accel.averaging.flat import FlatCopy
from cocod_accel.averaging.gradients import GradientCoder
from cocod_accel.averaging.header import Header, Kind
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.weights import Weights
from cocod_accel.comm.handles import SoloComm
from cocod_accel.comm.in_process import InProcessGroup
from tests import loops
from tests.reference import shares
from tests.reference_payload import assign, coded_chunks, flattened, weighted_mean
from tests.test_exactness import WEIGHTS, assert_traces_equal
from tests.test_payload import wide_model
from tests.workers import run_outcomes, run_workers

FED_BACK = ("bf16", "int8", "int4", "ternary", "topk:0.2")
RANDOM = ("qsgd:2", "qsgd:3", "qsgd:4", "qsgd:8", "terngrad")
STEPS = 7
KINDS: dict[str, Any] = {"ssgd": SSGD, "pipe": PipeSGD}

# ------------------------------------------------------------------------------------ error feedback, on real processes

ROWS = [(name, codec, weighting) for name in KINDS for codec in FED_BACK for weighting in WEIGHTS]


def traces(rank: int, rows: list[Any]) -> Any:
    found = []
    for name, codec, weighting in rows:
        model = DistributedDataParallel(wide_model())
        optimizer = loops.OPTIMIZERS["momentum"](model)
        sync = attach(model, optimizer, KINDS[name](payload=codec), weight=WEIGHTS[weighting][rank])
        trace = loops.trained(model, optimizer, rank, STEPS)
        found.append((trace, sync.stats().bytes))
        sync.detach()
    return found


def serial(name: str, codec: str, weights: list[float]) -> list[list[list[Tensor]]]:
    """One model for all workers, because they stay equal."""
    w, n = shares(weights), len(weights)
    model = wide_model()
    optimizer = loops.OPTIMIZERS["momentum"](model)
    zero = torch.zeros_like(flattened(model))
    e, owned, previous = [zero] * n, zero, zero
    trace: list[list[Tensor]] = []
    for step in range(STEPS):
        wanted = []
        for rank in range(n):
            model.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
            wanted.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]) + e[rank])
        sent = [coded_chunks(codec, v, n) for v in wanted]
        e = [v - q for v, q in zip(wanted, sent, strict=True)]
        total = weighted_mean(sent, w) + owned
        mean = coded_chunks(codec, total, n)
        owned = total - mean
        gradients = copy.deepcopy(model)
        assign(gradients, previous if name == "pipe" else mean)
        for p, g in zip(model.parameters(), gradients.parameters(), strict=True):
            p.grad = g.detach().clone()
        previous = mean
        optimizer.step()
        trace.append(loops.snapshot(model))
    return [trace] * n


@pytest.mark.parametrize("num_workers", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_every_step_equals_the_serial_reference(num_workers: int) -> None:
    results = run_workers(num_workers, traces, ROWS)
    for index, (name, codec, weighting) in enumerate(ROWS):
        expected = serial(name, codec, WEIGHTS[weighting][:num_workers])
        assert_traces_equal([worker[index][0] for worker in results], expected, f"{name} {codec} {weighting}")
        for worker in results:
            assert worker[index][1] == results[0][index][1]


def one_worker(rank: int) -> list[bool]:
    found = []
    for kind in (SSGD, PipeSGD):
        ends = []
        for codec in ("fp32", "ternary", "terngrad"):
            model = wide_model()
            optimizer = loops.OPTIMIZERS["momentum"](model)
            attach(model, optimizer, kind(payload=codec))
            for step in range(4):
                optimizer.zero_grad()
                loops.loss_of(model, *loops.make_batch(0, step)).backward()
                optimizer.step()
            ends.append(flattened(model))
        found += [torch.equal(ends[0], end) for end in ends]
    return found


def test_one_worker_is_plain_training_bit_for_bit() -> None:
    (found,) = run_workers(1, one_worker)
    assert all(found)


# --------------------------------------------------------------------------------------------- rounding at random


def decoded(name: str, values: Tensor, sizes: list[int], key: tuple[int, ...], number: int = 1) -> Tensor:
    """What worker 0 of one says of ``values``."""
    comm = InProcessGroup(1).member(0)
    coder = Coder(name, values, comm, sizes=sizes, seed=key)
    coder.encode(values, None, Header(Kind.GRADIENT, number, (1.0,), 0))
    coder._incoming.bytes.copy_(coder._outgoing.bytes)
    coder.combine((1.0,), 1.0)
    out = torch.empty_like(values)
    coder.decode(None, out)
    return out


def uniform(key: tuple[int, ...], size: int) -> Tensor:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.empty(size, dtype=torch.float64).uniform_(
        generator=torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    )


@given(st.floats(1e-6, 1e6), st.integers(1, 3000), st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_terngrad_sends_equal_numbers_as_they_are(value: float, size: int, dtype: torch.dtype, beside_none: bool) -> None:
    """Their deviation is nothing but what rounding leaves of it, and clipping there would leave nothing of them."""
    values = torch.full((size,), value, dtype=dtype)
    sizes = [0, size, 0] if beside_none else [size]
    assert torch.allclose(decoded("terngrad", values, sizes, (1,)), values, rtol=1e-6)


@given(st.integers(2, 8), st.integers(1, 1500), st.integers(0, 999))
def test_qsgd_is_as_published(bits: int, size: int, seed: int) -> None:
    """Buckets of at most 512 as even as can be, their 2-norm, 2^(bits - 1) - 1 levels."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    multiple = 8 // bits if 8 % bits == 0 else 8
    num_buckets = math.ceil(size / 512)
    bucket = math.ceil(size / num_buckets / multiple) * multiple
    drawn, levels = uniform((seed, 0, 5), num_buckets * bucket), 2 ** (bits - 1) - 1
    expected = []
    for start in range(0, size, bucket):
        part = values[start : start + bucket]
        norm = float(torch.tensor(math.sqrt(math.fsum(v * v for v in part.tolist())) / levels, dtype=torch.float32)) * levels
        for v, u in zip(part.tolist(), drawn[start : start + bucket].tolist(), strict=False):
            expected.append(math.copysign(norm / levels * math.floor(abs(v) / norm * levels + u), v))
    assert torch.allclose(decoded(f"qsgd:{bits}", values, [size], (seed,), 5), torch.tensor(expected, dtype=torch.float64))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 999))
def test_terngrad_is_as_published(sizes: list[int], seed: int) -> None:
    """The maximum of each tensor, clipped at 2.5 standard deviations."""
    values = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    out = decoded("terngrad", values, sizes, (seed,))
    for tensor, said in zip(values.split(sizes), out.split(sizes), strict=True):
        mean = math.fsum(tensor.tolist()) / len(tensor)
        sigma = math.sqrt(math.fsum((v - mean) ** 2 for v in tensor.tolist()) / len(tensor))
        scale = min(float(tensor.abs().max()), 2.5 * sigma) if len(tensor) > 1 else abs(float(tensor))
        for v, q in zip(tensor.tolist(), said.tolist(), strict=True):
            assert q == 0 or q == pytest.approx(math.copysign(scale, v), rel=1e-6)
            assert q != 0 or abs(v) < scale * (1 - 1e-9)  # what is clipped is always sent


@pytest.mark.parametrize("name", RANDOM)
def test_it_is_unbiased(name: str) -> None:
    """Of 4,000 drawings; each number's mean within five standard errors of the one that varies most."""
    values = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values[3], values[5] = 0.0, 1e-3
    sizes, draws = [25, 15], 4000
    said = torch.stack([decoded(name, values, sizes, (seed,)) for seed in range(draws)])
    wanted = values
    if name == "terngrad":
        wanted = torch.cat([t.clamp(-2.5 * t.std(correction=0), 2.5 * t.std(correction=0)) for t in values.split(sizes)])
    error = (said.mean(0) - wanted).abs()
    assert 0 < error.max() <= 5 * said.std(0).max() / math.sqrt(draws)


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 700), st.sampled_from(RANDOM), st.integers(0, 99))
def test_the_mean_of_all_workers_is_sent_in_full(num_workers: int, size: int, name: str, seed: int) -> None:
    """And every worker draws numbers of its own, anew in every step."""
    generator = torch.Generator().manual_seed(seed)
    group = InProcessGroup(num_workers)
    parameters = [torch.zeros(size, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    weights = tuple(float(i + 1) for i in range(num_workers))
    coders = []
    for rank in range(num_workers):
        route = Route(group.member(rank), Weights(weights, rank), SoloComm())
        coders.append(GradientCoder(name, parameters, route, seed))
    for _ in range(2):
        flats = [FlatCopy(parameters) for _ in coders]
        for flat, coder in zip(flats, coders, strict=True):
            flat.buffers[0].copy_(torch.randn(size + 3, generator=generator, dtype=torch.float64))
            coder.launch(flat)
        said = []
        for rank, coder in enumerate(coders):
            own = coder._coders[0]
            parts = torch.zeros(own.layout.num_rows * own.layout.chunk, dtype=torch.float64)
            # What it has sent lies in the others' incoming rows.
            for owner, other in enumerate(coders):
                theirs = other._coders[0]
                for tile in theirs.layout.tiles(1):  # one row and one block at a time
                    if tile.rows.start == owner:
                        out, work = theirs._room(tile.shape, owner)
                        theirs._codec.decode_(*theirs._incoming.at(slice(rank, rank + 1), tile.blocks), out, work)
                        first = owner * own.layout.chunk + tile.blocks.start * own.layout.block
                        parts[first : first + out.numel()] = out.view(-1)
            said.append(parts[: size + 3])
        expected = (torch.tensor(weights, dtype=torch.float64).unsqueeze(-1) * torch.stack(said)).sum(0) / sum(weights)
        for flat, coder in zip(flats, coders, strict=True):
            coder.decode(flat)
            assert torch.equal(flat.buffers[0], flats[0].buffers[0])
            assert torch.allclose(flat.buffers[0], expected, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------------------ states, and refusals


def resumed(rank: int) -> list[bool]:
    same = []
    for kind in (SSGD, PipeSGD):
        for codec in ("int8", "ternary", "topk:0.1", "qsgd:3", "terngrad"):
            ends = []
            for stop in (None, 3):
                model = DistributedDataParallel(wide_model(torch.float32))
                optimizer = loops.OPTIMIZERS["momentum"](model)
                sync = attach(model, optimizer, kind(payload=codec, seed=4))
                for step in range(7):
                    optimizer.zero_grad()
                    loops.loss_of(model, *loops.make_batch(rank, step, dtype=torch.float32)).backward()
                    optimizer.step()
                    if step == stop:
                        saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict(), sync.state_dict()))
                        sync.detach()
                        model = DistributedDataParallel(wide_model(torch.float32))
                        model.module.load_state_dict(saved[0])
                        optimizer = loops.OPTIMIZERS["momentum"](model)
                        optimizer.load_state_dict(saved[1])
                        sync = attach(model, optimizer, kind(payload=codec, seed=4))
                        sync.load_state_dict(saved[2])
                ends.append((flattened(model.module), sync.stats().bytes))
                sync.detach()
            same.append(torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1])
    return same


def test_a_resumed_run_is_bit_exact() -> None:
    for found in run_workers(3, resumed):
        assert all(found), found


def another_seed(rank: int) -> None:
    model = DistributedDataParallel(loops.make_model())
    attach(model, loops.OPTIMIZERS["sgd"](model), SSGD(payload="qsgd:4", seed=rank))


def test_workers_must_agree_on_the_seed() -> None:
    for outcome in run_outcomes(2, another_seed):
        assert outcome.error is not None
        assert "workers differ in seed: rank 0 has 0, rank 1 has 1; pass the same" in outcome.error[1]


def scaled(rank: int) -> str:
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = loops.OPTIMIZERS["sgd"](model)
    attach(model, optimizer, SSGD(payload="int8"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loops.loss_of(model, *loops.make_batch(rank, 0, dtype=torch.float32))).backward()
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)
    return "stepped"


def test_what_is_kept_at_another_scale_is_refused() -> None:
    for said in run_workers(2, scaled):
        assert said.startswith("payload='int8' keeps what rounding dropped for the next step")
    assert not SSGD(payload="qsgd:4").refuses_scaler
