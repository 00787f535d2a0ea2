"""The files of a checkpoint: its manifest, and one file a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cocod_accel.checkpoint import safetree as packing

MANIFEST = "checkpoint.json"
_VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; one line says which and why. Nothing has been changed."""


# --------------------------------------------------------------------------------------- files and folders


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first. A folder without a manifest is none."""
    found = [path for path in folder.glob("*") if (path / MANIFEST).is_file() and not path.name.startswith(".")]
    return sorted(found, key=lambda path: path.name, reverse=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint consists of."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        version, files, weights = manifest["version"], manifest["files"], manifest["weights"]
        well_formed = isinstance(files, dict) and isinstance(weights, list) and bool(weights)
    except FileNotFoundError as error:
        raise ValueError(f"has no {MANIFEST}; give the folder of a checkpoint") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from error
    if version != _VERSION or not well_formed:
        raise ValueError(f"{MANIFEST} has an unknown version ({version}); use the release that wrote it")
    return manifest


def check_files(path: Path, manifest: dict[str, Any], names: set[str]) -> None:
    """Refuse a checkpoint in which one of these files is not what was written."""
    for name in sorted(names):
        expected, file = manifest["files"].get(name), path / name
        if expected is None or Path(name).name != name:
            raise ValueError(f"{name} is not listed in {MANIFEST}")
        if not file.is_file():
            raise ValueError(f"{name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise ValueError(f"{name} is truncated: {file.stat().st_size} of {expected['bytes']} bytes")
        if packing.digest(file) != expected["blake2b"]:
            raise ValueError(f"{name} has been changed since it was written")


def worker_file(rank: int | str) -> str:
    """Its name in a checkpoint."""
    return f"worker_{rank}.safetensors"
