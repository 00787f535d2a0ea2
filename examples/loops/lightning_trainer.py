"""A Lightning Trainer: validation, checkpoints and accumulation stay as they are."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from cocod_accel.lightning import CoCoDCallback  # cocod
from examples.loops.common import digest, network, points


class Classifier(LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        right = (self.network(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


callback = CoCoDCallback(period=4)  # cocod
trainer = Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_progress_bar=False,
    callbacks=[callback, ModelCheckpoint(sys.argv[1], monitor="accuracy")],  # cocod
)  # fmt: skip
model = Classifier()
trainer.fit(model, DataLoader(points(512), batch_size=16), DataLoader(points(128, seed=1), batch_size=32))
assert callback.sync is not None
print(f"rank {trainer.global_rank}: {callback.sync.stats().rounds} rounds, model {digest(model):.12f}", flush=True)
torch.distributed.destroy_process_group()
