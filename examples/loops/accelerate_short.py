"""A short accelerate loop, as in accelerate's example of local SGD: accumulation, and nothing else."""

from accelerate import Accelerator
from torch import nn, optim
from torch.utils.data import DataLoader

from cocod_accel import CoCoDSGD, attach  # cocod
from examples.loops.common import digest, network, points

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = DataLoader(points(512), batch_size=16, shuffle=True)
model = network()
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
sync = attach(model, optimizer, CoCoDSGD(period=2))  # cocod

for _epoch in range(2):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
sync.finish()  # cocod
print(f"rank {accelerator.process_index}: {sync.stats().rounds} rounds, model {digest(model):.12f}", flush=True)
accelerator.end_training()
