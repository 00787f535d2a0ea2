"""A loop in the style of small GPT repositories: autocast, accumulation by hand, clipping, evaluation by everybody."""

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import CoCoDSGD, attach  # cocod
from examples.loops.common import digest

VOCABULARY, BLOCK, ACCUMULATED, STEPS = 32, 16, 4, 24


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 24), nn.Linear(24, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embedding(tokens))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
rank = dist.get_rank()
is_master = rank == 0
torch.manual_seed(1337)
model = DistributedDataParallel(Bigrams())
optimizer = optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
text = torch.arange(4096).mul(7).remainder(VOCABULARY)
generator = torch.Generator().manual_seed(1337 + rank)
sync = attach(model, optimizer, CoCoDSGD(period=3))  # cocod


def batch() -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - BLOCK - 1, (8,), generator=generator).tolist()
    rows = torch.stack([text[start : start + BLOCK + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def estimate_loss() -> float:
    model.eval()
    loss = torch.stack([model(*batch())[1] for _ in range(4)]).mean().item()
    model.train()
    return loss


for step in range(STEPS):
    if step % 8 == 0:
        with sync.averaged():  # cocod; everybody, not under "if is_master"
            loss_now = estimate_loss()
        if is_master:
            print(f"step {step}: loss {loss_now:.4f}", flush=True)
    for micro_step in range(ACCUMULATED):
        model.require_backward_grad_sync = micro_step == ACCUMULATED - 1
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(*batch())
        (loss / ACCUMULATED).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
sync.finish()  # cocod
print(f"rank {rank}: {sync.stats().rounds} rounds, model {digest(model):.12f}", flush=True)
dist.destroy_process_group()
