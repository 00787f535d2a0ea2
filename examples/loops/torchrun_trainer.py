"""A trainer class under torchrun, as in torch's multi-GPU tutorial: snapshots that it resumes from by itself."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from cocod_accel import Checkpoints, CoCoDSGD, attach  # cocod
from examples.loops.common import digest, network, points


class Trainer:
    def __init__(self, model: nn.Module, loader: DataLoader[Any], optimizer: optim.Optimizer, folder: str) -> None:
        self.rank, self.epochs_run = int(os.environ["RANK"]), 0
        self.model, self.loader, self.optimizer = DistributedDataParallel(model), loader, optimizer
        self.sync = attach(self.model, optimizer, CoCoDSGD(period=4))  # cocod
        self.snapshots = Checkpoints(folder, self.sync)  # cocod, in the place of torch.save under "if rank == 0"
        snapshot = self.snapshots.resume()  # cocod, in the place of torch.load
        if snapshot is not None:
            self.epochs_run = snapshot.position["epochs_run"]
            print(f"rank {self.rank}: resumes at epoch {self.epochs_run}", flush=True)

    def run_batch(self, inputs: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()

    def train(self, num_epochs: int) -> None:
        for epoch in range(self.epochs_run, num_epochs):
            self.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for inputs, labels in self.loader:
                self.run_batch(inputs, labels)
            self.snapshots.save({"epochs_run": epoch + 1})  # cocod
        self.sync.finish()  # cocod


dist.init_process_group("gloo")
data = points(512)
network_of_mine = network()
trainer = Trainer(
    network_of_mine,
    DataLoader(data, batch_size=16, sampler=DistributedSampler(data)),
    torch.optim.SGD(network_of_mine.parameters(), lr=0.05),
    sys.argv[1],
)
trainer.train(int(sys.argv[2]))
print(f"rank {trainer.rank}: {trainer.sync.stats().rounds} rounds, model {digest(trainer.model):.12f}", flush=True)
dist.destroy_process_group()
