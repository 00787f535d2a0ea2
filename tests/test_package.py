"""The package as a whole: what importing it costs, and who may communicate. `make lint` checks which room imports which."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import cocod_accel

ROOT = Path(cocod_accel.__file__).parent


def test_importing_the_core_needs_torch_alone() -> None:
    code = """
import sys
for name in ("accelerate", "torchvision", "wandb", "deepspeed", "omegaconf"):
    sys.modules[name] = None  # importing it raises
import torch
import cocod_accel
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with cocod_accel.attach(model, optimizer, cocod_accel.CoCoDSGD(period=2)) as sync:
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
print(sync.stats().rounds)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


def test_only_comm_calls_collectives() -> None:
    for path in ROOT.rglob("*.py"):
        if path.parent.name == "comm":
            continue
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {func.attr for func in calls if isinstance(func, ast.Attribute)}
        used = names & {"all_reduce", "all_gather", "all_gather_object", "all_to_all_single", "barrier", "new_group"}
        assert not used, f"{path.name} calls {used}"


def test_every_algorithm_is_registered_under_its_name() -> None:
    assert {name: cls.name for name, cls in cocod_accel.ALGORITHMS.items()} == {
        name: name for name in ("ssgd", "pipe", "local", "cocod", "asynlocal", "diloco", "streaming_diloco")
    }
