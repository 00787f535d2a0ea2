"""What attaching costs: local step, round end and memory, each as a ratio measured within one run.

    python -m benchmarks.core          (or: make bench-core)

Two gloo processes on this machine. The step is timed on worker 0 alone, between rounds, while worker 1 sleeps in a
barrier; in each block, attached and bare steps alternate one by one, and their medians are compared. The round end is
timed on both workers at once, against three plain copies of the parameters, also on both at once and alternating.
"""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from cocod_accel import CoCoDSGD, attach
from cocod_accel.averaging.coder import Coder
from cocod_accel.averaging.header import Header, Kind
from cocod_accel.comm.in_process import InProcessGroup


def cifar_resnet18() -> nn.Module:
    """ResNet18 with the CIFAR stem: 3x3 convolution, no max-pooling."""
    model: nn.Module = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def mlp() -> nn.Module:
    """Its bare step takes about 5 ms."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def make_stepper(model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    targets = torch.randint(0, 10, (len(inputs),))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def spread(values: list[float]) -> str:
    quartiles = statistics.quantiles(values, n=4)
    return f"{quartiles[0]:.3f} to {quartiles[2]:.3f}"


def step_row(
    rank: int, name: str, make: Callable[[], nn.Module], inputs: Tensor, threads: int, num_steps: int, blocks: int
) -> None:
    torch.manual_seed(0)
    bare = make()
    wrapped = DistributedDataParallel(make())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (bare, wrapped)]
    sync = attach(wrapped, optimizers[1], CoCoDSGD(period=1_000_000), weight=len(inputs))
    if rank == 0:
        torch.set_num_threads(threads)
        steppers = [make_stepper(m, inputs, o) for m, o in zip((bare, wrapped), optimizers, strict=True)]
        for stepper in 3 * steppers:
            stepper()
        ratios, bare_seconds = [], []
        for block in range(blocks):
            seconds: tuple[list[float], list[float]] = ([], [])
            for pair in range(num_steps):
                for which in (0, 1) if (block + pair) % 2 == 0 else (1, 0):
                    seconds[which].append(timed(steppers[which]))
            medians = [statistics.median(values) for values in seconds]
            ratios.append(medians[1] / medians[0])
            bare_seconds.append(medians[0])
        torch.set_num_threads(1)
        print(
            f"local step, {name:22s} {statistics.median(ratios):6.3f}   {spread(ratios):18s} n={blocks:<3d} "
            f"bare step {1e3 * statistics.median(bare_seconds):.1f} ms"
        )
    dist.barrier()
    sync.detach()


def three_copies(source: Tensor, target: Tensor) -> None:
    for _ in range(3):
        target.copy_(source)


def print_cost(what: str, ratios: list[float], milliseconds: list[float], name: str) -> None:
    """A row over three copies."""
    print(
        f"{what:33s} {statistics.median(ratios):6.3f}   {spread(ratios):18s} "
        f"n={len(ratios):<3d} {name} {statistics.median(milliseconds):.1f} ms"
    )


def round_end_row(rank: int, repeats: int) -> None:
    model = DistributedDataParallel(cifar_resnet18())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = attach(model, optimizer, CoCoDSGD(period=1_000_000))
    replica = sync._driver.replica
    num_elements = sum(p.numel() for p in replica.parameters)
    source, target = torch.randn(num_elements), torch.empty(num_elements)
    ratios, milliseconds = [], []
    for repeat in range(repeats + 2):
        dist.barrier()
        copies = timed(lambda: three_copies(source, target))
        dist.barrier()
        begin = time.perf_counter()
        replica.launch()
        launched = time.perf_counter()
        flight: Any = replica.parts[0]._in_flight
        flight.handle.wait()
        dist.barrier()
        landed = time.perf_counter()
        replica.merge()
        work = launched - begin + time.perf_counter() - landed
        if repeat >= 2:
            ratios.append(work / copies)
            milliseconds.append(1e3 * work)
    if rank == 0:
        print_cost("round end / 3 copies, ResNet18", ratios, milliseconds, "round end")
    sync.detach()


def codec_row(rank: int, payload: str, repeats: int) -> None:
    """What coding costs the main thread in one average: encode, combine and decode, over three copies."""
    num_elements = sum(p.numel() for p in cifar_resnet18().parameters())
    source, target = torch.randn(num_elements), torch.empty(num_elements)
    values, centre, mean = torch.randn(num_elements), torch.randn(num_elements), torch.empty(num_elements)
    coder = Coder(payload, values, InProcessGroup(2).member(rank))
    ratios, milliseconds = [], []
    for repeat in range(repeats + 2):
        dist.barrier()
        copies = timed(lambda: three_copies(source, target))
        dist.barrier()
        begin = time.perf_counter()
        coder.encode(values, centre, Header(Kind.ROUND, repeat, (1.0, 1.0), rank))
        coder.combine((1.0, 1.0), 2.0)
        coder.decode(centre, mean)
        work = time.perf_counter() - begin
        if repeat >= 2:
            ratios.append(work / copies)
            milliseconds.append(1e3 * work)
    if rank == 0:
        print_cost(f"coding {payload} / 3 copies", ratios, milliseconds, "coding")


def memory_row(rank: int) -> None:
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(12)]))
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = attach(model, optimizer, CoCoDSGD(period=1_000_000))
    step = make_stepper(nn.Sequential(model, nn.Linear(2000, 10)), torch.randn(2, 2000), optimizer)
    step()
    before = resident_bytes()
    for _ in range(3):
        sync._driver.replica.launch()
        sync._driver.replica.merge()
    in_rounds = (resident_bytes() - before) / parameter_bytes
    with sync.averaged():
        in_averaged = (resident_bytes() - before) / parameter_bytes
    if rank == 0:
        print(f"{'extra memory, flat copies':33s} {in_rounds:6.2f}   in averaged(): {in_averaged:.2f}   resident set, n=1")
    sync.detach()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main(rank: int, store: str, quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    if rank == 0:
        print(f"torch {torch.__version__} on {platform.machine()}; threads: 2 for the ResNet18 step, else 1")
        print(f"{'measured':33s} {'median':>6s}   {'quartiles':18s}")
    blocks = 4 if quick else 20
    step_row(rank, "ResNet18, batch 32", cifar_resnet18, torch.randn(32, 3, 32, 32), 2, 1 if quick else 5, blocks)
    step_row(rank, "MLP, batch 64", mlp, torch.randn(64, 784), 1, 20 if quick else 60, blocks)
    round_end_row(rank, 10 if quick else 40)
    for payload in ("bf16", "int8", "int4", "ternary", "topk:0.01"):
        codec_row(rank, payload, 5 if quick else 20)
    memory_row(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks: a smoke test, not a measurement")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        spawn(main, args=(str(Path(folder) / "store"), quick), nprocs=2)
