"""Runs from wandb's offline files: ``offline-run-*/run-*.wandb``.

The file is a LevelDB log (blocks of 32 kB; fragments of checksum, length and type) of protobuf records behind a header of 7
bytes. wandb publishes no reader of it, so the frames are read here and the records by wandb's own protobuf classes. A run
that went on after a stop has several files with one id: what a later one begins anew replaces what earlier ones had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cocod_accel.report.runs import Run, checked, text_config

_BLOCK_BYTES = 32768
_HEADER_BYTES = 7
#: wandb's key begins with the kind of the row it came from; communication is the training rows'.
_KINDS = {"train": "train/", "eval": "eval/"}
_COMM = "comm/"


@dataclass
class _File:
    """One file's records, as far as they matter here."""

    path: Path
    run_id: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def find_wandb_files(folder: Path) -> list[Path]:
    """Every run file below a folder, oldest first: wandb puts the time into the names of their folders."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give one that holds wandb's offline-run-* folders")
    files = sorted(folder.rglob("run-*.wandb"), key=lambda path: (path.parent.name, str(path)))
    if not files:
        raise ValueError(f"{folder}: holds no wandb run files; give one that holds offline-run-*/run-*.wandb")
    return files


def read_wandb_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """The runs below a folder, and one line for each that cannot be compared."""
    by_id: dict[str, list[_File]] = {}
    problems = []
    for path in find_wandb_files(folder):
        try:
            file = _read(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        by_id.setdefault(file.run_id, []).append(file)
    runs = []
    for files in by_id.values():
        try:
            runs.append(_joined(files))
        except ValueError as error:
            problems.append(str(error))
    return runs, problems


def records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, until the first that is not whole: a killed run ends in the middle of one."""
    position, part = _HEADER_BYTES, b""
    while position + 7 <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < 7:  # too little for a fragment: the rest of the block is padding
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        fragment = data[position + 7 : position + 7 + length]
        if len(fragment) < length or kind not in (1, 2, 3, 4):
            return
        part = fragment if kind in (1, 2) else part + fragment  # whole, first, middle, last
        position += 7 + length
        if kind in (1, 4):
            yield part


def _read(path: Path) -> _File:
    from wandb.proto import wandb_internal_pb2

    record_type: Any = vars(wandb_internal_pb2)["Record"]
    file = _File(path)
    for payload in records(path.read_bytes()):
        record = record_type()
        try:
            record.ParseFromString(payload)
        except Exception as error:
            raise ValueError(f"{path}: is not a wandb run file, or of another version ({error})") from error
        kind = record.WhichOneof("record_type")
        if kind == "run":
            file.run_id, file.name = record.run.run_id, record.run.display_name
            file.config.update(_items(record.run.config.update))
        elif kind == "config":
            file.config.update(_items(record.config.update))
        elif kind == "history":
            file.history.append(_items(record.history.item))
        elif kind == "summary":
            file.summary.update(_items(record.summary.update))
    if not file.run_id:
        raise ValueError(f"{path}: holds no run; it was killed before it began, or is no wandb file")
    return file


def _items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _joined(files: list[_File]) -> Run:
    """One run from its files, oldest first."""
    rows: list[dict[str, Any]] = []
    for file in files:
        new = [row for values in file.history for row in _rows(values)]
        if new:
            rows = [row for row in rows if row["step"] < new[0]["step"]] + new
    last = files[-1]
    config = {key: value for key, value in last.config.items() if not key.startswith("_")}
    if "algorithm.name" not in config:
        raise ValueError(f"{last.path}: is not a run of cocod train; its configuration has no algorithm.name")
    summary = _summary(last.summary) if "final_accuracy" in last.summary else None
    return checked(Run(last.name or last.run_id, last.path, text_config(config), rows, summary))


def _rows(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row of wandb's is one step, in which the trainer may have written a training row and an evaluation."""
    for kind, prefix in _KINDS.items():
        own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        if not own:
            continue
        if kind == "train":
            own.update({key.removeprefix(_COMM): value for key, value in values.items() if key.startswith(_COMM)})
        label = {"emulated": True} if values.get("emulated") else {}
        yield {"kind": kind, "step": int(values["_step"]), **own, **label}


def _summary(values: Mapping[str, Any]) -> dict[str, Any]:
    """``summary.json`` again: targets in a dictionary of their own; a target that was never reached has no key."""
    prefix = "time_to_accuracy."
    times = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    plain = {key: None if value == "None" else value for key, value in values.items() if not key.startswith(prefix)}
    return {**plain, "time_to_accuracy": {target: None if s == "None" else s for target, s in times.items()}}
