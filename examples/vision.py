"""Classify images with accelerate and CoCoD-SGD: an ordinary script, and the three numbered lines that were added to it.

    accelerate launch --config_file configs/accelerate/cpu_2.yaml examples/vision.py
    accelerate launch --config_file configs/accelerate/cpu_2.yaml examples/vision.py --algorithm ssgd    # to compare
    python examples/vision.py                                                                            # one process

With --data FOLDER it trains on all of Fashion-MNIST, which torchvision downloads; without, on the 5,000 images of it
that come with cocod_accel.
"""

from __future__ import annotations

import argparse
import zlib
from importlib import resources

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from cocod_accel import SSGD, CoCoDSGD, LocalSGD, PipeSGD, attach


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["ssgd", "pipe", "local", "cocod"], default="cocod")
    parser.add_argument("--period", type=int, default=5, help="steps a round, of local and cocod")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="with one worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", metavar="FOLDER", help="torchvision's folder of Fashion-MNIST")
    parser.add_argument("--output", default="runs/vision", metavar="FOLDER", help="gets model.safetensors")
    args = parser.parse_args()
    try:
        local, cocod = LocalSGD(args.period), CoCoDSGD(args.period)
    except ValueError as error:
        parser.error(str(error))
    args.method = {"ssgd": SSGD(), "pipe": PipeSGD(), "local": local, "cocod": cocod}[args.algorithm]
    return args


def load_images(folder: str | None, split: str) -> TensorDataset:
    if folder is not None:
        from torchvision.datasets import FashionMNIST

        data = FashionMNIST(folder, train=split == "train", download=True)
        images, labels = data.data, data.targets
    else:
        embedded = resources.files("cocod_accel.tasks") / "fashion_small.npz"
        with embedded.open("rb") as file, np.load(file) as arrays:
            images, labels = (torch.tensor(arrays[f"{split}_{kind}"]) for kind in ("images", "labels"))
    return TensorDataset((images.view(-1, 1, 28, 28) / 255 - 0.286) / 0.353, labels.long())


def make_model() -> nn.Module:
    def stage(inputs: int, outputs: int) -> nn.Module:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(stage(1, 16), stage(16, 32), stage(32, 64), nn.Flatten(), nn.Linear(64 * 3 * 3, 10))


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], accelerator: Accelerator) -> tuple[float, float]:
    """Mean loss and accuracy; every worker looks at its share of the images."""
    model.eval()
    loss = correct = count = 0.0
    for images, labels in loader:
        scores, truth = accelerator.gather_for_metrics((model(images), labels))
        loss += cross_entropy(scores, truth, reduction="sum").item()
        correct += (scores.argmax(1) == truth).sum().item()
        count += len(truth)
    model.train()
    return loss / count, correct / count


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # without cpu=True, workers on CPUs stay unconnected
    set_seed(args.seed)
    with accelerator.main_process_first():  # one process downloads
        train_images, test_images = (load_images(args.data, split) for split in ("train", "test"))
    accelerator.print(f"{accelerator.num_processes} workers, {len(train_images)} images, {args.method}")

    model = make_model()
    # A step uses the batches of all workers, so it may be as many times as long.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate * accelerator.num_processes, momentum=0.9)
    train_loader = DataLoader(train_images, args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_images, 250)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    # Not prepared: accelerate would move the schedule on by the number of workers in every step.
    scheduler = CosineAnnealingLR(optimizer, args.epochs * len(train_loader))
    sync = attach(model, optimizer, args.method, weight=args.batch_size)  # 1: rounds from here on

    for epoch in range(1, args.epochs + 1):
        for images, labels in tqdm(train_loader, f"epoch {epoch}", disable=not accelerator.is_main_process):
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with sync.averaged():  # 2: inside, the model is the mean of all workers' models
            loss, accuracy = evaluate(model, test_loader, accelerator)
        accelerator.print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.1%}")
    sync.finish()  # 3: every worker now holds the mean model

    accelerator.save_model(model, args.output)
    stats = sync.stats()
    waited = f"waited {stats.exposed_seconds:.1f} s, {stats.hidden_seconds:.1f} s hidden behind computation"
    checksum = zlib.crc32(b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values()))
    sent = f"{stats.rounds} rounds, {stats.bytes / 1e6:.1f} MB sent"
    for line in gather_object([f"worker {accelerator.process_index}: {sent}, {waited}, model {checksum:08x}"]):
        accelerator.print(line)
    accelerator.end_training()


if __name__ == "__main__":
    main()
