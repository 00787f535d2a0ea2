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

_KEY = "cocod_accel"
_PIECE_ELEMENTS = 1 << 24
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def write(path: Path, tree: Any) -> None:
    """Write a tree of dicts, lists, tuples, tensors, numbers, strings, booleans and None, and wait until it is on disk."""
    tensors: dict[str, Tensor] = {}
    skeleton = _pack(tree, tensors)
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
    _pack(tree, {})


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


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES:
            raise TypeError(f"a tensor of {value.dtype} cannot be saved; use one of {', '.join(map(str, DTYPES))}")
        name = f"t{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_pack(key, tensors), _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(item, tensors) for item in value]}
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
