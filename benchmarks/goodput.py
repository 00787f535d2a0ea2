"""What workers that are killed cost: those who are left go on, or all of them start again from a checkpoint.

Four workers on this machine take steps of a fixed length, by sleeping, so that four on two cores mean something. One after
the other is killed at random moments and is back some seconds later. Goodput: steps that are in the model at the end, as a
share of those of an undisturbed run that is as long::

    python -m benchmarks.goodput --seconds 600 --kills 20
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cocod_accel import CoCoDSGD, Members, attach

PERIOD = 5


def make_loop() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seconds: float) -> None:
    x = torch.randn(32, 20)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    time.sleep(seconds)
    optimizer.step()


def go_on(name: str, lighthouse: str, seconds: float, begin_with: int) -> None:
    """A worker among others that come and go: after every merged round a line with how far it is."""
    model, optimizer = make_loop()
    others = Members(lighthouse, os.environ["COCOD_TOKEN"], name=name, begin_with=begin_with)
    sync = attach(model, optimizer, CoCoDSGD(PERIOD), members=others)
    first, last = sync.attempts, 0
    while True:
        step(model, optimizer, seconds)
        now = sync.members.presence()
        if now.step > last:
            last = now.step
            row = {"first": first, "step": now.step, "there": sum(map(bool, now.weights)), "lost": now.lost_rounds}
            print(json.dumps({**row, "blocked": sync.stats().exposed_seconds}), flush=True)


def start_again(rank: int, size: int, port: int, seconds: float, folder: Path, every: int) -> None:
    """A worker that ends if another one is gone; all of them start again from what each saved last."""
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    model, optimizer = make_loop()
    saves = sorted(int(path.stem) for path in folder.glob("*.pt"))
    wrapped = DistributedDataParallel(model)
    sync = attach(wrapped, optimizer, CoCoDSGD(PERIOD))
    if saves:
        saved: Any = torch.load(folder / f"{saves[-1]}.pt", weights_only=True)
        model.load_state_dict(saved)
        sync.finish()
        sync.control.start_at(saves[-1])
    sync.watch(20)
    print(json.dumps({"step": sync.attempts}), flush=True)
    while True:
        step(wrapped, optimizer, seconds)
        if sync.attempts % every == 0:
            state = sync.mean_state_dict()
            if rank == 0:
                torch.save(state, folder / "next")
                os.replace(folder / "next", folder / f"{sync.attempts}.pt")
            print(json.dumps({"step": sync.attempts}), flush=True)


@dataclass
class Fleet:
    """Processes and what they wrote."""

    folder: Path
    started: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)

    def start(self, *arguments: str) -> int:
        path = self.folder / f"{len(self.started)}.log"
        with path.open("wb") as log, (self.folder / f"{len(self.started)}.err").open("wb") as errors:
            command = [sys.executable, "-m", "benchmarks.goodput", *arguments]
            self.started.append((subprocess.Popen(command, stdout=log, stderr=errors), path))
        return len(self.started) - 1

    def kill(self, index: int) -> None:
        process = self.started[index][0]
        process.kill()
        process.wait()

    def rows(self, index: int) -> list[dict[str, float]]:
        lines = self.started[index][1].read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for_rows(self, indices: list[int], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not all(self.rows(index) for index in indices):
            if time.monotonic() > end:
                raise RuntimeError("a worker did not begin")
            time.sleep(0.05)

    def close(self) -> None:
        for index in range(len(self.started)):
            self.kill(index)


def moments(kills: int, seconds: float, seed: int) -> list[float]:
    """When to kill: once in each of as many equal stretches, so that failures do not overlap."""
    draw = random.Random(seed)
    return [(number + 0.1 + 0.3 * draw.random()) * seconds / kills for number in range(kills)]


def run_members(options: argparse.Namespace, kills: int, seconds: float, folder: Path) -> dict[str, float]:
    folder.mkdir()
    fleet = Fleet(folder)
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        fleet.start("--lighthouse", address)
        time.sleep(3)
        names = [f"w{number}" for number in range(options.workers)]
        arguments = [str(options.step), str(options.workers)]
        now = {name: fleet.start("--go-on", name, address, *arguments) for name in names}
        members = list(now.values())
        fleet.wait_for_rows(members)
        began, draw = time.monotonic(), random.Random(options.seed)
        done = {index: fleet.rows(index)[-1]["step"] for index in members}
        for moment in moments(kills, seconds, options.seed) if kills else ():
            time.sleep(max(0.0, began + moment - time.monotonic()))
            name = draw.choice(names)
            fleet.kill(now[name])
            time.sleep(options.back)
            now[name] = fleet.start("--go-on", name, address, *arguments)
            members.append(now[name])
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        rows = {index: fleet.rows(index) for index in members}
        elapsed = time.monotonic() - began
    finally:
        fleet.close()
    steps = sum(found[-1]["step"] - done.get(index, found[-1]["first"]) for index, found in rows.items() if found)
    whole = [rows[index] for index in members[: options.workers] if rows[index] and index in now.values()]
    return {
        "steps": steps,
        "seconds": elapsed,
        "least_there": min(row["there"] for found in rows.values() for row in found),
        "most_rounds_lost": max(found[-1]["lost"] for found in rows.values() if found),
        "most_blocked": max((found[-1]["blocked"] for found in whole), default=float("nan")),
    }


def run_restarts(options: argparse.Namespace, kills: int, seconds: float, folder: Path) -> dict[str, float]:
    folder.mkdir()
    fleet = Fleet(folder)
    try:

        def start_all() -> list[int]:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            fixed = [str(options.workers), str(port), str(options.step), str(folder), str(options.save)]
            return [fleet.start("--start-again", str(rank), *fixed) for rank in range(options.workers)]

        now = start_all()
        fleet.wait_for_rows(now)
        began, draw = time.monotonic(), random.Random(options.seed)
        for moment in moments(kills, seconds, options.seed):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            fleet.kill(draw.choice(now))
            time.sleep(options.back)  # the others have noticed by then, or are ended here
            for index in now:
                fleet.kill(index)
            now = start_all()
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        elapsed = time.monotonic() - began
        steps = max((row["step"] for index in now for row in fleet.rows(index)), default=0.0)
    finally:
        fleet.close()
    return {"steps": steps * options.workers, "seconds": elapsed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--back", type=float, default=5, help="seconds until a killed worker is started again")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a step")
    parser.add_argument("--save", type=int, default=100, help="steps between two checkpoints of those who start again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("members", "restarts"))
    for name, count in (("lighthouse", 1), ("go-on", 4), ("start-again", 6)):
        parser.add_argument(f"--{name}", nargs=count, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.lighthouse:
        from cocod_accel.cli import main as cocod

        cocod(["lighthouse", "--bind", options.lighthouse[0], "--heartbeat", "2"])
    elif options.go_on:
        name, address, seconds, workers = options.go_on
        go_on(name, address, float(seconds), int(workers))
    elif options.start_again:
        rank, size, port, seconds, folder, every = options.start_again
        start_again(int(rank), int(size), int(port), float(seconds), Path(folder), int(every))
    else:
        os.environ["COCOD_TOKEN"] = secrets.token_hex(16)
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary)
            calm = run_members(options, 0, min(60.0, options.seconds), root / "calm")
            pace = calm["steps"] / calm["seconds"]
            print(f"undisturbed: {pace:.1f} steps a second by {options.workers} workers", flush=True)
            for kind, what, run in (
                ("members", "the others go on", run_members),
                ("restarts", "all start again", run_restarts),
            ):
                if options.only not in (None, kind):
                    continue
                found = run(options, options.kills, options.seconds, root / kind)
                goodput = found["steps"] / found["seconds"] / pace
                print(f"{what}: goodput {goodput:.3f} {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
