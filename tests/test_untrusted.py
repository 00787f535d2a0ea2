"""Files of others: data, run folders and cluster files with a payload that would leave a mark. It never does."""

from __future__ import annotations

import ast
import gzip
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from cocod_accel import cli
from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.runs.folder import RunFolder
from cocod_accel.simulator.cluster import load_cluster, save_cluster
from cocod_accel.tasks import build_task
from cocod_accel.tasks.cifar import read_cifar_pickle
from cocod_accel.tasks.data import read_idx
from cocod_accel.trainer.resume_policy import find_place
from tests.run_folders import write_run

ROOT = Path(__file__).parents[1]

# ------------------------------------------------------------------------------------------------- pickles


class Mark:
    """What leaves a file behind wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def pixels(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, 3072), dtype=np.uint8)


def write_cifar10(root: Path, **more: Any) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = {"data": pixels(4), "labels": [0, 1, 2, 3], "filenames": ["a.png"] * 4, **more}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


@pytest.mark.parametrize("place", ["data", "labels", "beside", "whole"])
def test_a_batch_of_cifar_cannot_run_code(place: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    folder = write_cifar10(tmp_path, **({place: Mark(mark)} if place in ("data", "labels") else {"beside": Mark(mark)}))
    if place == "whole":
        (folder / "test_batch").write_bytes(pickle.dumps(Mark(mark)))
    config = load_config(["task.name=cifar10", f"task.data_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"is not a batch of CIFAR \(it names posix.mkdir, which no such file needs\)"):
        build_task(config)
    assert not mark.exists()
    pickle.loads((folder / "test_batch").read_bytes())
    assert mark.exists(), "the payload is none"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("as_array", [False, True])
def test_batches_are_read_as_pickle_reads_them(protocol: int, as_array: bool, tmp_path: Path) -> None:
    path, data = tmp_path / "batch", pixels(5)
    labels = np.arange(5) if as_array else list(range(5))
    path.write_bytes(pickle.dumps({"data": data, "fine_labels": labels, "batch_label": b"one"}, protocol=protocol))
    images, found = read_cifar_pickle(path, "fine_labels")
    assert (images.reshape(5, -1) == data).all()
    assert found.tolist() == [0, 1, 2, 3, 4]


BROKEN: dict[str, Any] = {
    "objects": {"data": np.array([[None] * 3072]), "labels": [0]},
    "floats": {"data": np.zeros((1, 3072)), "labels": [0]},
    "too few labels": {"data": pixels(2), "labels": [0]},
    "no labels": {"data": pixels(2)},
    "words": {"data": "ab", "labels": [0]},
    "no dict": [1, 2],
}


@pytest.mark.parametrize("what", [*BROKEN, "bytes", "half"])
def test_a_broken_batch_is_one_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "batch"
    whole = pickle.dumps({"data": pixels(2), "labels": [0, 1]})
    path.write_bytes({"bytes": b"\x80\x05}r\xff\xff", "half": whole[:3000]}.get(what) or pickle.dumps(BROKEN[what]))
    with pytest.raises(ConfigError, match=r"^[^\n]*is not a batch of CIFAR \([^\n]+\); download it again$"):
        read_cifar_pickle(path, "labels")


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\0\x08\xff", b"\x1f\x8b", gzip.compress(b"x", mtime=0)[:-3], gzip.compress(b"\0\0\x08\x03", mtime=0)],
)
@pytest.mark.parametrize("name", ["images.gz", "images"])
def test_a_broken_file_of_mnist_is_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^[^\n]*; download it again$"):
        read_idx(tmp_path / name)


def test_a_dry_run_reads_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_cifar10(tmp_path)
    for path in folder.iterdir():
        path.write_bytes(b"not even a pickle")
    given = ["train", "task.name=cifar10", f"task.data_dir={tmp_path}", f"output={tmp_path / 'runs'}", "cluster.device=cpu"]
    assert cli.main([*given, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("accelerate launch")
    assert cli.main(given) == 2, "a real run reads it before any process starts"
    assert "is not a batch of CIFAR" in capsys.readouterr().err
    (folder / "test_batch").unlink()
    assert cli.main([*given, "--dry-run"]) == 2
    assert "not found; set task.data_dir" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


#: What runs whatever a file says, by the name it is called by; and what allows a call that is listed here.
FORBIDDEN = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "dill.load",
    "joblib.load", "cloudpickle.load", "cloudpickle.loads", "torch.jit.load", "torch.package.PackageImporter",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "torch.load", "eval", "exec", "pickle._Unpickler",
    "pandas.read_pickle", "accelerate.utils.other.load",
}  # fmt: skip
SOURCES = ["cocod_accel", "benchmarks", "examples", "tools", "launch"]


def imported(tree: ast.Module) -> dict[str, str]:
    """What names stand for, by ``import x as y`` and ``from x import y``."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def unpicklings(source: str) -> Iterator[tuple[int, str]]:
    """Lines that name what may run what a file says, but for calls that are told not to."""
    tree = ast.parse(source)
    names = imported(tree)
    safe = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            options = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            name = dotted(node.func, names)
            restricted = name in ("torch.load", "accelerate.utils.other.load") and options.get("weights_only") is True
            if restricted or (name == "numpy.load" and "allow_pickle" not in options and None not in options):
                safe.add(id(node.func))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in safe and dotted(node, names) in FORBIDDEN:
            yield node.lineno, dotted(node, names)


def test_nothing_else_unpickles_a_file() -> None:
    found = {
        (str(path.relative_to(ROOT)), what)
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*.py"))
        for _, what in unpicklings(path.read_text())
    }
    assert found == {("cocod_accel/tasks/cifar.py", "pickle.Unpickler")}, "the one that knows no names but its own"


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f)", "torch.load(f, weights_only=False)", "import torch as t; t.load(f)",
        "import numpy as np; np.load(f, allow_pickle=True)", "import numpy as np; np.load(f, **options)",
        "pickle.load(f)", "from pickle import loads; loads(f)", "class A(pickle.Unpickler): pass", "yaml.load(f)",
        "exec(text)",
        "import pickle as p; p.load(f)", "map(pickle.loads, files)", "from accelerate.utils.other import load; load(f)",
    ],
)  # fmt: skip
def test_an_unpickling_is_found(source: str) -> None:
    assert [*unpicklings(source)]
    safe = "import numpy as np; torch.load(f, weights_only=True); np.load(f); yaml.safe_load(f); model.eval()"
    assert not [*unpicklings(safe)]


# --------------------------------------------------------------------------------------------------- links


LINKS = ["metrics.jsonl", ".launcher", "spans", "summary.json.tmp", "checkpoints/.step.tmp", "wandb", "wandb/run-1"]


@pytest.mark.parametrize("name", LINKS)
def test_a_run_is_not_resumed_through_links(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    config = load_config(["name=run", f"output={tmp_path / 'runs'}"])
    folder = RunFolder.create(config)
    (folder / "checkpoints").mkdir()
    if name != "wandb":
        (folder / "wandb").mkdir()
    (folder / name).symlink_to(outside / ("" if name in ("spans", "wandb", "wandb/run-1") else "precious"))
    before = sorted(path.name for path in folder.rglob("*"))
    for resume, is_restart in (("auto", False), ("never", True)):
        config.checkpoint.resume = resume
        with pytest.raises(ConfigError, match=rf"{name} is a symbolic link, through which a resumed run would write"):
            find_place(config, "somebody", is_restart)
    assert sorted(path.name for path in folder.rglob("*")) == before
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "mine"
    (folder / name).unlink()
    config.checkpoint.resume = "auto"
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="run is a symbolic link, through which a resumed run would write"):
        find_place(config, "somebody", False)
    folder.unlink()
    elsewhere.rename(folder)
    if name != "wandb":  # its own links stay inside
        (folder / "wandb" / "run-2").mkdir()
        (folder / "wandb" / "latest-run").symlink_to("run-2")
    assert find_place(config, "somebody", False).path.parent == tmp_path / "runs"


# ------------------------------------------------------------------------------------- what names may steer


def renamed(folder: Path, name: str) -> Path:
    return folder.rename(folder.with_name(name))


def set_keys(folder: Path, **values: Any) -> None:
    """What the configuration of a run says, whether it could be given or not."""
    tree = OmegaConf.load(folder / "config.yaml")
    for key, value in values.items():
        OmegaConf.update(tree, key, value, force_add=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(tree))


ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def test_names_cannot_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = renamed(write_run(tmp_path, "run"), f"run{ESCAPE}\r\u202egnp")
    set_keys(folder, **{"task.name": ESCAPE, "algorithm.payload": ESCAPE})
    set_keys(write_run(tmp_path, "other"), **{"task.args": {ESCAPE: ESCAPE}})
    (tmp_path / f"broken{ESCAPE}").mkdir()
    (tmp_path / f"broken{ESCAPE}" / "config.yaml").write_text(f"a: 1\nname: '{ESCAPE}'\n")
    for command in (
        ["compare", str(tmp_path)],
        ["compare", str(tmp_path), "--out", str(tmp_path / "report")],
        ["watch", str(folder), "--once"],
        ["trace", str(folder)],
        ["watch", str(tmp_path / f"broken{ESCAPE}"), "--once"],
        ["compare", f"{tmp_path}/gone{ESCAPE}"],
        ["train", f"model.name={ESCAPE}", "--dry-run"],
        ["train", str(folder / "config.yaml"), "--dry-run"],
        ["train", f"name={ESCAPE}", "cluster.device=cpu", "--dry-run"],
    ):
        cli.main(command)
        said = "".join(capsys.readouterr())
        assert said.strip(), command
        assert not set(said) & {"\x1b", "\x07", "\r", "\u202e"}, (command, said)
        assert "owned" in said or command[1] == str(tmp_path)
    for name in ("results.md", "results.csv", "runs.csv"):
        assert "\x1b" not in (tmp_path / "report" / name).read_text()


@pytest.mark.parametrize("begin", ["=", "+", "-", "@"])
def test_a_table_holds_no_formula(begin: str, tmp_path: Path) -> None:
    set_keys(renamed(write_run(tmp_path, "run"), f"{begin}cmd|'!A1'"), **{"algorithm.name": f"{begin}cmd|'!A2'"})
    assert cli.main(["compare", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    for name in ("results.csv", "runs.csv"):
        cells = (tmp_path / "out" / name).read_text().replace("\n", ",").split(",")
        assert sum(cell.startswith(f"'{begin}cmd|") for cell in cells) >= 2
        assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)


# ----------------------------------------------------------------------------------------------- secrets


CLUSTER = """
name: ${oc.env:COCOD_TEST_SECRET}
description: from ${oc.env:COCOD_TEST_SECRET}
step_seconds: ${oc.decode:${oc.env:COCOD_TEST_SECONDS}}
batch_size: 8
payload_bytes: ${.batch_size}
workers: [{name: "${name}", count: 2}]
"""


def test_a_reference_to_the_environment_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCOD_TEST_SECRET", "hunter2")
    monkeypatch.setenv("COCOD_TEST_SECONDS", "0.34567")
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    cluster = load_cluster(file)
    assert cluster.step_seconds == 0.34567
    for found in (cluster, cluster.resized(3)):
        save_cluster(found, tmp_path / "saved.yaml")
        assert load_cluster(tmp_path / "saved.yaml") == found
    given = ["model.name=mlp", "task.name=synthetic", "algorithm.name=local", f"--out={tmp_path / 'runs'}", "--steps", "20"]
    assert cli.main(["simulate", str(file), *given]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert "hunter2" not in run.name
    assert json.loads((run / "summary.json").read_text())["steps"] == 20
    for path in run.rglob("*"):
        if path.is_file():
            assert "hunter2" not in path.read_text(), path
            assert "0.34567" not in path.read_text(), path
    assert "step_seconds: ${oc.decode:${oc.env:COCOD_TEST_SECONDS}}" in (run / "cluster.yaml").read_text()
    assert cli.main(["compare", str(run)]) == 0
