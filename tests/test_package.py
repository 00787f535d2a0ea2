"""The package as a whole: what importing it costs, and that imports go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cocod_accel

ROOT = Path(cocod_accel.__file__).parent

#: Left to right: a module may import what stands before it.
LIBRARY = [
    "theory",
    "rounds",
    "weights",
    "comm",
    "traffic",
    "flat",
    "payload",
    "anchor",
    "averaging",
    "leaving",
    "nodes",
    "algorithms",
    "attempts",
    "engine",
    "ddp",
    "checks",
    "attach",
    "sharding",
    "pace",
    "loading",
    "randomness",
    "packing",
    "merging",
    "checkpoint",
    "hf",
]
TRAINER = [
    "schedule", "tables", "periods", "strict", "settings", "validation", "config", "cluster", "runtime", "tasks",
    "calibration", "faults", "metrics", "trackers", "work", "steps", "autoperiod", "trainer", "simulator", "report", "train",
    "plan", "reproduce", "lab", "bench", "cli",
]  # fmt: skip
ORDER = LIBRARY + TRAINER
#: Within report/, likewise.
REPORT = [
    "runs", "wandb_files", "groups", "tables", "spans", "look", "curves", "figures", "markup", "page", "trace", "watch",
    "writing",
]  # fmt: skip
#: Within simulator/, likewise.
SIMULATOR = [
    "fleet", "payloads", "rules", "sampling", "timeline", "times", "inprocess", "lockstep", "turns", "learning", "simulate",
    "folders", "command",
]  # fmt: skip


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


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("cocod_accel.")}


def test_imports_go_one_way() -> None:
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        module = parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        assert module in ORDER, f"{module} has no place in the order of imports"
        for name in imported(path):
            assert ORDER.index(name) <= ORDER.index(module), f"{module} imports {name}, which stands to its right"


@pytest.mark.parametrize(("package", "order"), [("report", REPORT), ("simulator", SIMULATOR)])
def test_imports_within_a_package_go_one_way(package: str, order: list[str]) -> None:
    for path in (ROOT / package).glob("*.py"):
        if path.stem == "__init__":
            continue
        assert path.stem in order, f"{package}/{path.name} has no place in the order of imports"
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        modules = [node.module for node in nodes if node.module and node.module.startswith(f"cocod_accel.{package}.")]
        for name in (module.split(".")[2] for module in modules):
            assert order.index(name) < order.index(path.stem), f"{path.stem} imports {name}, which stands to its right"


def test_only_comm_calls_collectives() -> None:
    for path in ROOT.rglob("*.py"):
        if path.name == "comm.py" or path.parent.name == "bench":  # a benchmark drives others' loops
            continue
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {func.attr for func in calls if isinstance(func, ast.Attribute)}
        used = names & {"all_reduce", "all_gather", "all_gather_object", "all_to_all_single", "barrier", "new_group"}
        assert not used, f"{path.name} calls {used}"


def test_every_algorithm_is_registered_under_its_name() -> None:
    assert {name: cls.name for name, cls in cocod_accel.ALGORITHMS.items()} == {
        name: name for name in ("ssgd", "pipe", "local", "cocod", "asynlocal")
    }
