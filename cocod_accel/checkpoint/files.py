"""The files of a checkpoint: its manifest, and one file a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cocod_accel.checkpoint import safetree as packing
from cocod_accel.checkpoint.schema import check_manifest

MANIFEST = "checkpoint.json"
_VERSION = 1
_LARGEST_MANIFEST = 100_000_000


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; one line says which and why. Nothing has been changed."""


# --------------------------------------------------------------------------------------- files and folders


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first. A folder without a manifest is none."""
    found = [path for path in folder.glob("*") if (path / MANIFEST).is_file() and not path.name.startswith(".")]
    return sorted(found, key=lambda path: path.name, reverse=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint consists of."""
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"has no {MANIFEST}; give the folder of a checkpoint")
    if file.stat().st_size > _LARGEST_MANIFEST:
        raise ValueError(f"{MANIFEST} is larger than {_LARGEST_MANIFEST:,} bytes")
    try:
        manifest: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from error
    try:
        check_manifest(manifest, _VERSION, worker_file)
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from error
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


def described(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"bytes": path.stat().st_size, "blake2b": packing.digest(path)}


def check_loadable(path: Path) -> None:
    """Whether a file that accelerate writes holds tensors and numbers alone."""
    from accelerate.utils.other import load as load_restricted

    try:
        load_restricted(path, map_location="meta", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path.name} cannot be read ({type(error).__name__})") from error
