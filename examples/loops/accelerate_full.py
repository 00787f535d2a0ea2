"""A whole accelerate script, as in accelerate's complete example: scheduler, evaluation, checkpoints, resuming."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn, optim
from torch.utils.data import DataLoader

from cocod_accel import Checkpoints, CoCoDSGD, attach  # cocod
from examples.loops.common import digest, network, points

folder, num_epochs = sys.argv[1], int(sys.argv[2])
set_seed(0)
shuffling = DataLoaderConfiguration(use_seedable_sampler=True)  # so that a resumed run shuffles like one that never stopped
accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False, dataloader_config=shuffling)
loader = DataLoader(points(512), batch_size=16, shuffle=True, drop_last=True)
test_loader = DataLoader(points(250, seed=1), batch_size=50)
model = network()
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64)
model, optimizer, loader, test_loader, scheduler = accelerator.prepare(model, optimizer, loader, test_loader, scheduler)
sync = attach(model, optimizer, CoCoDSGD(period=2))  # cocod
checkpoints = Checkpoints(folder, sync, accelerator)  # cocod: accelerator.save_state keeps worker 0's model only
resumed = checkpoints.resume()  # cocod
first = 0 if resumed is None else resumed.position["epoch"]

for epoch in range(first, num_epochs):
    model.train()
    loader.set_epoch(epoch)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    found = []
    with torch.no_grad(), sync.averaged():  # cocod
        for inputs, labels in test_loader:
            predicted, labels = accelerator.gather_for_metrics((model(inputs).argmax(1), labels))
            found.append(predicted == labels)
    accelerator.print(f"epoch {epoch + 1}: accuracy {torch.cat(found).float().mean():.3f} of {len(torch.cat(found))}")
    checkpoints.save({"epoch": epoch + 1})  # cocod
sync.finish()  # cocod
print(f"rank {accelerator.process_index}: {sync.stats().rounds} rounds, model {digest(model):.12f}", flush=True)
accelerator.end_training()
