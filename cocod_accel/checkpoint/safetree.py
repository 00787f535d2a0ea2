"""Any state as one safetensors file: tensors as they are, everything else as JSON in its header. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cocod_accel.comm.agreement import bytes_of
from cocod_accel.comm.trees import DTYPES, pack, unpack

_KEY = "cocod_accel"
_PIECE_ELEMENTS = 1 << 24


def write(path: Path, tree: Any) -> None:
    """Write a tree of dicts, lists, tuples, tensors, numbers, strings, booleans and None, and wait until it is on disk."""
    tensors: dict[str, Tensor] = {}
    skeleton = pack(tree, tensors)
    # Written here, and not by the library: it would first have all of it in the host's memory, and shared memory (tied
    # weights, views of one buffer) twice.
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(skeleton)}}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # so that every tensor is aligned
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for _, tensor in ordered:
            for piece in pieces_of(tensor):
                file.write(piece)
    flush(path)


def pieces_of(tensor: Tensor) -> Iterator[Any]:
    """Its bytes, a piece at a time."""
    return (bytes_of(piece) for piece in tensor.detach().reshape(-1).split(_PIECE_ELEMENTS))


def check(tree: Any) -> None:
    """Raise a TypeError for what cannot be written."""
    pack(tree, {})


def read(path: Path, device: str | torch.device = "cpu") -> Any:
    """What :func:`write` has written."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if _KEY not in metadata:
                raise ValueError("is not a file of cocod_accel")
            return unpack(json.loads(metadata[_KEY]), file.get_tensor)
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
