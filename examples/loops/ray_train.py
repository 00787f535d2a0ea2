"""Ray Train: two CPU workers of a local Ray. On a cluster: ``ScalingConfig(num_workers=16, use_gpu=True)``."""

import sys
from typing import Any

import ray.train
import ray.train.torch
from torch import nn, optim
from torch.utils.data import DataLoader

from cocod_accel import CoCoDSGD, attach  # cocod
from examples.loops.common import digest, network, num_right, points


def train(config: dict[str, Any]) -> None:
    model = ray.train.torch.prepare_model(network())
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = ray.train.torch.prepare_data_loader(DataLoader(points(512), batch_size=16, shuffle=True))
    with attach(model, optimizer, CoCoDSGD(period=config["period"])) as sync:  # cocod
        for epoch in range(2):
            if ray.train.get_context().get_world_size() > 1:
                loader.sampler.set_epoch(epoch)
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            with sync.averaged():  # cocod
                right = sum(num_right(model, batch) for batch in DataLoader(points(128, seed=1), batch_size=32))
            ray.train.report({"epoch": epoch + 1, "accuracy": right / 128})
    rank = ray.train.get_context().get_world_rank()
    print(f"rank {rank}: {sync.stats().rounds} rounds, model {digest(model):.12f}", flush=True)


if __name__ == "__main__":
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"period": 4},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=ray.train.RunConfig(storage_path=sys.argv[1]),
    )
    print(trainer.fit().metrics, flush=True)
