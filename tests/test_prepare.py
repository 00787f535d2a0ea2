"""accelerate's ``prepare`` with FSDP2 inside a node only."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from cocod_accel import CoCoDSGD, attach, node_parallelism
from tests import loops, reference
from tests.workers import preload, run_workers

preload("torch.distributed.fsdp", "torch.distributed.tensor")

PERIOD, SIZE, BATCHES = 2, 4, 6
WEIGHTS = [1.0, 3.0]


def data() -> torch.utils.data.TensorDataset:
    batches = [loops.make_batch(0, step, size=SIZE, dtype=torch.float32) for step in range(4 * BATCHES)]
    return torch.utils.data.TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))


def prepared(rank: int) -> Any:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    from accelerate import state
    from accelerate.accelerator import Accelerator
    from accelerate.utils.dataclasses import DistributedType, FullyShardedDataParallelPlugin

    # accelerate knows FSDP on devices alone: it is told that these processes have some, and goes on with gloo and CPUs.
    usual = state.PartialState.__init__

    def on_devices(self: Any, *args: Any, **kwargs: Any) -> None:
        usual(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    state.PartialState.__init__ = on_devices  # type: ignore[method-assign]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=node_parallelism(2))
    model = loops.make_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data(), batch_size=SIZE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sync = attach(model, optimizer, CoCoDSGD(PERIOD), weight=WEIGHTS[rank // 2])
    seen, trace = [], []
    for x, y in loader:
        seen.append((x, y))
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        trace.append([p.full_tensor().detach().clone() for p in model.parameters()])
    sync.finish()
    return sync.nodes, seen, trace


@pytest.mark.filterwarnings("ignore")
def test_prepare_shards_inside_the_node_and_deals_data_to_all() -> None:
    results = run_workers(4, prepared, fresh=True)
    x, _ = data().tensors
    dealt = torch.cat([batch for step in range(BATCHES) for _, seen, _ in results for batch, _ in [seen[step]]])
    assert torch.equal(dealt, x), "every worker has batches of its own, in order"
    batches: Any = [
        [
            ([results[r][1][step][0].double() for r in node], [results[r][1][step][1].double() for r in node])
            for step in range(BATCHES)
        ]
        for node in ([0, 1], [2, 3])
    ]
    expected = reference.run(
        "cocod", loops.make_model(torch.float32).double(), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), batches,
        lambda m, xs, ys: sum((loops.loss_of(m, a, b) / 2 for a, b in zip(xs, ys, strict=True)), torch.zeros(())),
        WEIGHTS, [PERIOD, PERIOD],
    )  # fmt: skip
    for rank, (nodes, _, trace) in enumerate(results):
        assert nodes == [[0, 1], [2, 3]]
        for row, wanted in zip(trace, expected[rank // 2], strict=True):
            for ours, theirs in zip(row, wanted, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [1, 3, 2.0])
def test_a_size_of_nodes_that_cannot_be_is_one_line(size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ValueError, match=r"workers_per_node=.* must be a number above 1 that divides the 4 workers"
    ) as caught:
        node_parallelism(size)
    assert "\n" not in str(caught.value)
