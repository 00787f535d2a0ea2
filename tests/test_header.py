"""What every average says of itself, and what happens when averages meet that do not belong together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import LocalSGD, attach
from cocod_accel.averaging.header import SUM_SIZE, Header, Kind
from cocod_accel.comm.meeting import TransferError
from tests import loops
from tests.workers import run_outcomes

DTYPES = st.sampled_from([torch.float32, torch.float64])
FACTORS = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=6).map(tuple)


def summed(headers: list[Header], dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(SUM_SIZE, dtype=dtype)
    for header in headers:
        slot = torch.empty(SUM_SIZE, dtype=dtype)
        header.write(slot)
        total += slot
    return total


@given(
    FACTORS,
    st.integers(0, 10**6),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_like_headers_agree_and_carry_votes(factors: Any, number: int, votes: list[bool], dtype: torch.dtype) -> None:
    headers = [Header(Kind.ROUND, number, factors, rank, (int(votes[rank]), 0)) for rank in range(len(factors))]
    total = summed(headers, dtype)
    expected = any(votes[: len(factors)]), False
    assert all(header.read(total) == expected for header in headers)
    rows = torch.zeros(len(factors), 2, dtype=torch.int32)
    for rank, header in enumerate(headers):
        header.write_rows(rows[rank : rank + 1])
    assert all(header.read_rows(rows) == expected for header in headers)


@given(FACTORS.filter(lambda factors: len(factors) > 1), st.data())
def test_one_that_differs_is_found_by_all(factors: Any, data: st.DataObject) -> None:
    headers = [Header(Kind.ROUND, 7, factors, rank) for rank in range(len(factors))]
    odd = data.draw(st.integers(0, len(factors) - 1))
    kind, number = data.draw(
        st.sampled_from([(Kind.EVALUATION, 7), (Kind.FINISH, 7), (Kind.ROUND, 8), (Kind.EVALUATION, 1)])
    )
    headers[odd] = Header(kind, number, factors, odd)
    total = summed(headers, torch.float32)
    for header in headers:
        with pytest.raises(TransferError, match="on all workers at the same step"):
            header.read(total)


def test_other_weights_are_found() -> None:
    headers = [Header(Kind.ROUND, 1, (1.0, 2.0), 0), Header(Kind.ROUND, 1, (1.0, 5.0), 1)]
    with pytest.raises(TransferError, match=r"add up to 6, but this worker expects 3; call reweight\(\) on all workers"):
        headers[0].read(summed(headers, torch.float32))
    rows = torch.zeros(2, 2, dtype=torch.int32)
    for rank, header in enumerate(headers):
        header.write_rows(rows[rank : rank + 1])
    with pytest.raises(TransferError, match="worker 1 sends the weight 5, this worker expects 2"):
        headers[0].read_rows(rows)


def one_evaluates(rank: int) -> None:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, LocalSGD(2))
    for step in range(6):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        if rank == 0 and step == 3:
            with sync.averaged():
                pass
        optimizer.step()


def test_an_evaluation_on_one_worker_is_no_round_of_another() -> None:
    """Both are sums of one size, and would be added up in silence."""
    for outcome in run_outcomes(2, one_evaluates):
        assert outcome.error is not None
        assert outcome.error[0] in ("TransferError", "RuntimeError")
        assert "averaged()" in outcome.error[1]
