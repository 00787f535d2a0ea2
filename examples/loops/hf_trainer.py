"""A Hugging Face Trainer with a model of one's own."""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from cocod_accel.hf import CoCoDCallback  # cocod
from examples.loops.common import digest, network, points


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    inputs, labels = points(count, seed).tensors
    return [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]


args = TrainingArguments(
    output_dir=tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=16, num_train_epochs=2, learning_rate=1e-2,
    report_to=[], save_strategy="no", logging_steps=8, eval_strategy="epoch", disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=Classifier(), args=args, train_dataset=rows(512), eval_dataset=rows(128, seed=1))
trainer.add_callback(callback := CoCoDCallback(trainer, period=4))  # cocod
trainer.train()
figures = [row for row in trainer.state.log_history if "drift" in row]
assert callback.sync is not None
assert trainer.model is not None
rounds, model = callback.sync.stats().rounds, digest(trainer.model)
print(f"rank {args.process_index}: {rounds} rounds, model {model:.12f}, {len(figures)} rows with drift", flush=True)
torch.distributed.destroy_process_group()
