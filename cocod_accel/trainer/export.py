"""The trained model as a file, and as a number that tells two models apart."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from cocod_accel.checkpoint.safetree import flush
from cocod_accel.comm.agreement import bytes_of


class OutputError(RuntimeError):
    """A run has ended, and what it ends with cannot be written; one line says what is left of it."""


def export(model: nn.Module, path: Path) -> None:
    """Write a file for ``model.load_state_dict(safetensors.torch.load_file(path))``, all of it or nothing."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # Copies: safetensors refuses memory that two names share, and load_state_dict expects both names.
        save_file({name: value.detach().cpu().clone() for name, value in model.state_dict().items()}, temporary)
        flush(temporary)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(str(error)) from error


def export_making_room(model: nn.Module, path: Path, older: Sequence[Path]) -> None:
    """The same; if there is no room, ``older`` checkpoints, which the model outdates, are deleted for it."""
    try:
        export(model, path)
    except OSError:
        if not older:
            raise
        for checkpoint in older:
            shutil.rmtree(checkpoint, ignore_errors=True)
        export(model, path)


def model_digest(state: Mapping[str, Tensor]) -> int:
    """48 bits of a hash over parameters and floating buffers of a state_dict: equal models, equal digests."""
    digest = hashlib.blake2b(digest_size=6)
    for value in state.values():
        if value.is_floating_point():
            digest.update(bytes_of(value))
    return int.from_bytes(digest.digest(), "big")
