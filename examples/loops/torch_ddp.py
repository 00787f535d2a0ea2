"""A plain torch loop, as in the ImageNet example of torch: DDP, a distributed sampler, a scheduler, joint evaluation."""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from cocod_accel import CoCoDSGD, attach  # cocod
from examples.loops.common import digest, network, num_right, points

dist.init_process_group("gloo")
model = DistributedDataParallel(network())
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
data, held_out = points(512), points(256, seed=1)
sampler: DistributedSampler[int] = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
test_loader = DataLoader(held_out, batch_size=64, sampler=DistributedSampler(held_out, shuffle=False))
sync = attach(model, optimizer, CoCoDSGD(period=4))  # cocod


@torch.no_grad()
def validate() -> float:
    model.eval()
    right = torch.tensor(float(sum(num_right(model, batch) for batch in test_loader)))
    dist.all_reduce(right)
    return right.item() / len(held_out)


for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    with sync.averaged():  # cocod
        accuracy = validate()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}", flush=True)
sync.finish()  # cocod
print(f"rank {dist.get_rank()}: {sync.stats().rounds} rounds, model {digest(model):.12f}", flush=True)
dist.destroy_process_group()
