"""A small language model from scratch, character by character, with accelerate and CoCoD-SGD.

    accelerate launch --config_file configs/accelerate/cpu_2.yaml examples/language_model.py
    accelerate launch --config_file configs/accelerate/cpu_2.yaml examples/language_model.py --payload int8 --bf16
    python examples/language_model.py --text my_book.txt                                        # one process, another text

Without --text it learns the language reference that comes with every Python. AdamW, clipping, accumulated gradients and a
cosine schedule work as in any accelerate script; attach, averaged and finish are all that was added.
"""

from __future__ import annotations

import argparse
import math
import zlib
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from cocod_accel import SSGD, CoCoDSGD, LocalSGD, attach


class Block(nn.Module):
    """Causal self-attention and two linear layers, each around a shortcut."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each: batch, head, position, feature
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class LanguageModel(nn.Module):
    """Scores of every next character, from those before it."""

    def __init__(self, num_characters: int, context: int, width: int = 64, num_blocks: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(num_characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_characters, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: Tensor = self.head(self.norm(self.blocks(self.characters(tokens) + self.positions(places))))
        return scores


@torch.no_grad()
def write(model: nn.Module, tokens: Tensor, count: int, context: int) -> Tensor:
    """``tokens`` and ``count`` more, each drawn from the model's scores."""
    model.eval()
    for _ in range(count):
        scores = model(tokens[None, -context:])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial(scores.float().softmax(-1), 1)])
    return tokens


def draw_batch(text: Tensor, context: int, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["ssgd", "local", "cocod"], default="cocod")
    parser.add_argument("--period", type=int, default=8, help="steps a round, of local and cocod")
    parser.add_argument("--payload", default="fp32", help="what is sent: fp32, bf16, int8, int4, ternary, topk:0.01")
    parser.add_argument("--steps", type=int, default=300, help="of the optimizer")
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--batch-size", type=int, default=16, help="of each worker, in every backward")
    parser.add_argument("--accumulate", type=int, default=2, metavar="BACKWARDS", help="for one step")
    parser.add_argument("--context", type=int, default=64, metavar="CHARACTERS")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="compute under bfloat16 autocast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, metavar="FILE")
    parser.add_argument("--output", default="runs/language_model", metavar="FOLDER", help="gets model.safetensors")
    args = parser.parse_args()
    try:
        if args.algorithm == "ssgd":
            args.method = SSGD(payload=args.payload)
        else:
            kind = LocalSGD if args.algorithm == "local" else CoCoDSGD
            args.method = kind(args.period, payload=args.payload)
        args.text = args.text.read_text() if args.text else python_reference()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if len(args.text) < 20 * args.context:
        parser.error(f"--text: has {len(args.text)} characters; it takes 20 times the context of {args.context}")
    return args


def python_reference() -> str:
    """What help("topics") shows: some 700,000 characters."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def main() -> None:
    args = parse_arguments()
    precision = "bf16" if args.bf16 else None  # None: what the launcher says
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without cpu=True, workers on CPUs stay unconnected
        mixed_precision=precision,
        gradient_accumulation_steps=args.accumulate,
    )
    set_seed(args.seed)
    alphabet = sorted(set(args.text))
    code = {character: index for index, character in enumerate(alphabet)}
    text = torch.tensor([code[character] for character in args.text])
    train_text, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]

    model = LanguageModel(len(alphabet), args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Not prepared: accelerate would move the schedule on by the number of workers in every step.
    scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
    sync = attach(model, optimizer, args.method)  # batches are of one size, so are the weights
    size = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(f"{accelerator.num_processes} workers, {size} parameters, {len(text)} characters, {args.method}")

    rank, device = accelerator.process_index, accelerator.device

    @torch.no_grad()
    def evaluate() -> float:
        """Mean loss of unseen text, the same in every evaluation; every worker reads a part of its own."""
        model.eval()
        generator = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(8):
            inputs, targets = draw_batch(held_out, args.context, 32, generator)
            losses.append(cross_entropy(model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten()))
        model.train()
        mean: Tensor = accelerator.reduce(torch.stack(losses).mean(), "mean")
        return mean.item()

    generator = torch.Generator().manual_seed(args.seed + 1000 + rank)  # every worker draws windows of its own
    for step in tqdm(range(1, args.steps + 1), disable=not accelerator.is_main_process):
        for _ in range(args.accumulate):
            with accelerator.accumulate(model):
                inputs, targets = draw_batch(train_text, args.context, args.batch_size, generator)
                scores = model(inputs.to(device))
                accelerator.backward(cross_entropy(scores.flatten(0, 1), targets.to(device).flatten()))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        if step % args.evaluate_every == 0 or step == args.steps:
            with sync.averaged():
                loss = evaluate()
            if accelerator.is_main_process:
                tqdm.write(f"step {step}: loss {loss:.3f}")
    sync.finish()

    accelerator.save_model(model, args.output)
    if accelerator.is_main_process:
        written = write(accelerator.unwrap_model(model), train_text[: args.context].to(device), 200, args.context)
        print("".join(alphabet[index] for index in written[args.context :].tolist()))
    stats = sync.stats()
    waited = f"waited {stats.exposed_seconds:.1f} s, {stats.hidden_seconds:.1f} s hidden behind computation"
    checksum = zlib.crc32(b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values()))
    sent = f"{stats.rounds} rounds, {stats.bytes / 1e6:.1f} MB sent"
    for line in gather_object([f"worker {rank}: {sent}, {waited}, model {checksum:08x}"]):
        accelerator.print(line)
    accelerator.end_training()


if __name__ == "__main__":
    main()
