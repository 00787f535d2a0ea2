"""The model as one safetensors file, from wherever it lies: of a sharded one, one tensor is whole at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch
from torch import Tensor

from cocod_accel.checkpoint.safetree import flush, pieces_of
from cocod_accel.comm.agreement import try_together
from cocod_accel.comm.trees import DTYPES
from cocod_accel.sync.sync import Sync

#: Its name, dtype and shape, and what makes it whole; collective inside a node that shares the model out.
Gathered: TypeAlias = tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor]]


def export_model(sync: Sync, path: str | Path) -> None:
    """Write this model, as it is now, for ``model.load_state_dict(safetensors.torch.load_file(path))``; after ``finish()``.

    Collective: every worker calls it. The first node gathers its model tensor by tensor, and worker 0 writes them, all of
    them or nothing. A model with 16-bit copies is written as the float32 values that it is trained with.
    """
    shards, module = sync.subject.shards, sync.subject.module
    target = Path(path)
    temporary = target.with_name(f".{target.name}.tmp")

    def write() -> None:
        if sync.rank not in sync.nodes[0] or (shards is None and sync.rank > 0):
            return
        tensors: Iterable[Gathered] = (
            [(name, value.dtype, tuple(value.shape), value.detach) for name, value in module.state_dict().items()]
            if shards is None
            else list(shards.whole())
        )
        problem: Exception | None = None
        file: BinaryIO | None = None
        try:
            if sync.rank == 0:
                file = temporary.open("wb")
                _write_header(file, tensors)
        except OSError as error:
            problem = error
        try:
            for _, _, _, gather in tensors:
                whole = gather()
                try:
                    if file is not None and problem is None:
                        for piece in pieces_of(whole):
                            file.write(piece)
                except OSError as error:  # the node gathers to the end, or the others would wait
                    problem = error
        finally:
            if file is not None:
                file.close()
        if problem is not None:
            temporary.unlink(missing_ok=True)
            raise problem
        if sync.rank == 0:
            flush(temporary)
            temporary.replace(target)

    _, error = try_together(write, sync.subject.group, sync.subject.device)
    if error is not None:
        raise OSError(f"{target}: {error}")


def _write_header(file: BinaryIO, tensors: Iterable[Gathered]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, _ in tensors:
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
