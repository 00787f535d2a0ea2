"""Any state as JSON and a list of tensors, and back. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A tree of dicts, lists, tuples, tensors, numbers, strings, booleans and None as JSON; tensors go to ``tensors``.

    Raises a TypeError for anything else.
    """
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES:
            raise TypeError(f"a tensor of {value.dtype} cannot be saved; use one of {', '.join(map(str, DTYPES))}")
        name = f"t{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[pack(key, tensors), pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} cannot be saved; use tensors, numbers, strings, lists and dicts")


def unpack(node: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """What :func:`pack` was given."""
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensor_of(content)
    if kind == "dict":
        return {unpack(key, tensor_of): unpack(item, tensor_of) for key, item in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is nothing that is saved")
    items = [unpack(item, tensor_of) for item in content]
    return tuple(items) if kind == "tuple" else items
