"""DiLoCo and streaming DiLoCo on real processes, with their options, against the serial reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import CoCoDSGD, DiLoCo, LocalSGD, Outer, StreamingDiLoCo, attach
from cocod_accel.averaging.flat import balanced_cuts
from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.trainer.work import Work
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.workers import run_workers

WEIGHTS = [3.0, 1.0]
STEPS = 23
SIZES = [p.numel() for p in loops.make_model().parameters()]
#: Period, fragments, delay, mix, outer.
CASES: list[tuple[int, int, int, float, tuple[float, float]]] = [
    (6, 3, 1, 0.5, (0.7, 0.9)),
    (5, 2, 3, 0.25, (0.4, 0.8)),
    (4, 1, 4, 0.0, (0.7, 0.9)),
    (3, 3, 2, 1.0, (1.0, 0.5)),
]


def parts_of(fragments: int) -> list[list[int]]:
    return [list(range(len(SIZES)))[cut] for cut in balanced_cuts(SIZES, fragments)]


def train(rank: int, algorithms: list[Any]) -> list[Any]:
    found = []
    for algorithm in algorithms:
        model = DistributedDataParallel(loops.make_model())
        optimizer = loops.OPTIMIZERS["momentum"](model)
        sync = attach(model, optimizer, algorithm, weight=WEIGHTS[rank])
        trace = loops.trained(model, optimizer, rank, STEPS)
        sync.finish()
        found.append((trace, loops.snapshot(model)))
        sync.detach()
    return found


def test_streaming_and_blocking_equal_the_serial_reference() -> None:
    streaming = [StreamingDiLoCo(k, p, d, m, Outer(*o, nesterov=True)) for k, p, d, m, o in CASES]
    blocking = [DiLoCo(k, Outer(*o, nesterov=True), fragments=p) for k, p, _, _, o in CASES]
    results = run_workers(2, train, [*streaming, *blocking])
    batches = [[loops.make_batch(i, t) for t in range(STEPS)] for i in range(2)]
    for index, (k, p, d, m, o) in enumerate(CASES):
        for name, place in (("streaming_diloco", index), ("diloco", len(CASES) + index)):
            expected = reference.run(
                name, loops.make_model(), loops.OPTIMIZERS["momentum"], batches, loops.loss_of, WEIGHTS, [k, k],
                parts=parts_of(p), delay=d, mix=m, outer=o,
            )  # fmt: skip
            assert_traces_equal([worker[place][0] for worker in results], expected, f"{name} {CASES[index]}")
    for mine, theirs in zip(results[0], results[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[1], theirs[1], strict=True)), "after finish()"


def test_the_papers_defaults() -> None:
    nesterov = Outer(0.7, 0.9, nesterov=True)
    blocking, streaming = DiLoCo(50), StreamingDiLoCo(50)
    assert (blocking.outer, repr(blocking)) == (nesterov, "DiLoCo(period=50)")
    assert (streaming.outer, streaming.delay, streaming.mix, streaming.fragments) == (nesterov, 1, 0.5, 1)
    assert repr(StreamingDiLoCo(50, 2, mix=0.25)) == "StreamingDiLoCo(period=50, fragments=2, mix=0.25)"
    assert isinstance(blocking, LocalSGD)
    assert isinstance(streaming, CoCoDSGD)


def test_from_yaml() -> None:
    tiny = ["task.name=synthetic", "model.name=mlp"]
    options = ["algorithm.name=streaming_diloco", "algorithm.period=6", "algorithm.fragments=2", "algorithm.mix=0.3"]
    made: Any = Work.of(load_config([*tiny, *options, "algorithm.delay=2", "algorithm.outer={rate: 0.5}"]), 512, 0).algorithm
    assert (made.fragments, made.delay, made.mix, made.outer) == (2, 2, 0.3, Outer(0.5))
    plain: Any = Work.of(load_config([*tiny, "algorithm.name=diloco"]), 512, 0).algorithm
    assert plain.outer == Outer(0.7, 0.9, nesterov=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["algorithm.name=diloco", "algorithm.mix=0.5"], "algorithm.mix=0.5: is not an option of diloco; set it to null"),
        (["algorithm.name=streaming_diloco", "algorithm.mix=2"], "algorithm.mix=2.0: must be in [0, 1]"),
        (["algorithm.name=streaming_diloco", "algorithm.own_share=0.5"], "algorithm.own_share=0.5: is not an option of"),
        (["algorithm.name=diloco", "algorithm.delay=2"], "algorithm.delay=2: is not an option of diloco; set it to null"),
    ],
)
def test_options_of_others_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["task.name=synthetic", "model.name=mlp", *options])
    assert message in str(error.value)
