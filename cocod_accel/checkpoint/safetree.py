"""Any state as one safetensors file: tensors as they are, everything else as JSON in its header. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_KEY = "cocod_accel"


def write(path: Path, tree: Any) -> None:
    """Write a tree of dicts, lists, tuples, tensors, numbers, strings, booleans and None, and wait until it is on disk."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    skeleton = _pack(tree, tensors, set())
    save_file(tensors, path, metadata={_KEY: json.dumps(skeleton)})
    flush(path)


def check(tree: Any) -> None:
    """Raise a TypeError for what cannot be written."""
    _pack(tree, {}, set())


def read(path: Path, device: str | torch.device = "cpu") -> Any:
    """What :func:`write` has written."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if _KEY not in metadata:
                raise ValueError("is not a file of cocod_accel")
            return _unpack(json.loads(metadata[_KEY]), file)
    except OSError:
        raise
    except Exception as error:  # what a file that was made by hand may lead to
        raise ValueError(f"{path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """A hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _pack(value: Any, tensors: dict[str, Tensor], seen: set[int]) -> Any:
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        stored = value.detach().cpu().contiguous()
        # Each tensor is written by itself: shared memory (tied weights, views of one buffer) cannot be.
        if stored.untyped_storage().data_ptr() in seen or stored.untyped_storage().nbytes() != stored.nbytes:
            stored = stored.clone()
        seen.add(stored.untyped_storage().data_ptr())
        tensors[name] = stored
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_pack(key, tensors, seen), _pack(item, tensors, seen)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(item, tensors, seen) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} cannot be saved; use tensors, numbers, strings, lists and dicts")


def _unpack(node: Any, file: Any) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return file.get_tensor(content)
    if kind == "dict":
        return {_unpack(key, file): _unpack(item, file) for key, item in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is nothing that is saved")
    items = [_unpack(item, file) for item in content]
    return tuple(items) if kind == "tuple" else items
