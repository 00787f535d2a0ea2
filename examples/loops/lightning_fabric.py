"""A loop of one's own on Lightning Fabric."""

import torch
from lightning.fabric import Fabric
from torch import nn, optim
from torch.utils.data import DataLoader

from cocod_accel import CoCoDSGD, attach  # cocod
from examples.loops.common import digest, network, num_right, points

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed")
fabric.launch()
model = network()
model, optimizer = fabric.setup(model, optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
loader, test_loader = fabric.setup_dataloaders(
    DataLoader(points(512), batch_size=16, shuffle=True), DataLoader(points(128, seed=1), batch_size=32)
)
sync = attach(model, optimizer, CoCoDSGD(period=4))  # cocod

for epoch in range(4):
    for index, (inputs, labels) in enumerate(loader):
        is_accumulating = index % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(nn.functional.cross_entropy(model(inputs), labels) / 2)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad(), sync.averaged():  # cocod
        right = fabric.all_reduce(float(sum(num_right(model, batch) for batch in test_loader)), reduce_op="sum")
    fabric.print(f"epoch {epoch + 1}: accuracy {right / 128:.3f}")
sync.finish()  # cocod
print(f"rank {fabric.global_rank}: {sync.stats().rounds} rounds, model {digest(model):.12f}", flush=True)
torch.distributed.destroy_process_group()
