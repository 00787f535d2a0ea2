"""Byte-level text of files that are there: sequences to predict the next byte of.

All files are read in a fixed order and joined, each followed by a zero byte; the model predicts every byte from those before
it in its sequence. Every so many files are held out for evaluation. Without files it is the sources of Python's own standard
library, which every machine has; versions of Python differ in them, so a digest of what was read is recorded.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError

#: Bytes are the classes.
NUM_BYTES = 256
#: Parts of the standard library that are not its own prose: tests, and what was installed beside it.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_MOST_BYTES = 8_000_000_000


@dataclass(frozen=True)
class Sequences:
    """Sequences of a text in memory; a batch is (inputs, the byte after each of them)."""

    data: Tensor
    length: int
    #: Where each sequence begins.
    starts: Tensor
    #: Which group of files each sequence begins in, for ``task.label_skew``.
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, device: torch.device, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        places = self.starts[indices][:, None] + torch.arange(self.length + 1)
        found = self.data[places]
        if device.type == "cuda":  # from other memory, a copy waits for the device
            found = found.pin_memory()
        found = found.to(device, non_blocking=True).long()
        return found[:, :-1], found[:, 1:]

    def limited(self, limit: int | None) -> Sequences:
        """So many at most, spread evenly: the first would all be of one source."""
        if limit is None or limit >= len(self):
            return self
        kept = torch.arange(limit) * len(self) // limit
        return replace(self, starts=self.starts[kept], labels=self.labels[kept])


def text_options(config: Config) -> dict[str, Any]:
    """``task.args`` of the text task, checked and completed with defaults."""
    options: dict[str, Any] = {"files": None, "length": 128, "held_out": 20}
    for key, value in config.task.args.items():
        if key not in options:
            raise ConfigError(f"task.args.{key}={value}: is not an option of the text task; it takes {', '.join(options)}")
        options[key] = value
    for key, least in (("length", 1), ("held_out", 2)):
        value = options[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"task.args.{key}={value}: must be a whole number of at least {least}")
    given = options["files"]
    if given is not None:
        entries = [given] if isinstance(given, str) else given
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, str) and entry for entry in entries):
            raise ConfigError(f"task.args.files={given}: must be a file, a folder, a pattern such as data/*.txt, or a list")
        options["files"] = tuple(entries)
    return options


def files_of(config: Config) -> list[Path]:
    """The files of the text, in the order in which they are read."""
    given = text_options(config)["files"]
    if given is None:
        root = Path(sysconfig.get_path("stdlib"))
        inside = ((path.relative_to(root).parts, path) for path in root.rglob("*.py"))
        return [path for parts, path in sorted(inside) if _LEFT_OUT.isdisjoint(parts)]
    found: list[Path] = []
    for entry in given:
        path = Path(entry)
        places = [path] if path.exists() else [Path(place) for place in glob.glob(entry, recursive=True)]
        inside_it = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
        files = sorted(file for file in inside_it if file.is_file())
        if not files:
            raise ConfigError(f"task.args.files={entry}: matches no file; give a file, a folder or a pattern")
        found += files
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Text:
    """What was read."""

    train: Sequences
    test: Sequences
    #: Of all bytes and of which are held out.
    digest: str


def read_text_of(config: Config) -> Text:
    """Read, join and cut the files that ``task`` names."""
    options = text_options(config)
    return _read(tuple(files_of(config)), options["length"], options["held_out"])


@functools.lru_cache(maxsize=2)
def _read(files: tuple[Path, ...], length: int, held_out: int) -> Text:
    if len(files) < held_out:
        raise ConfigError(f"task.args.held_out={held_out}: of {len(files)} files none would be held out; give more files")
    digest, size = hashlib.blake2b(digest_size=16), 0
    groups: dict[str, int] = {}
    parts: dict[bool, list[tuple[bytes, int]]] = {False: [], True: []}
    for index, path in enumerate(files):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"task.args.files: {path} cannot be read ({error.strerror})") from error
        size += len(content)
        if size > _MOST_BYTES:
            raise ConfigError(f"task.args.files: hold more than {_MOST_BYTES:,} bytes; give fewer")
        is_held_out = index % held_out == held_out - 1
        digest.update(b"%d %d " % (is_held_out, len(content)) + content)
        group = groups.setdefault(str(path.parent), len(groups))
        parts[is_held_out].append((content + b"\0", group))
    found = []
    for is_test, which in ((False, "training"), (True, "held-out")):
        data = np.frombuffer(b"".join(content for content, _ in parts[is_test]), np.uint8).copy()
        num_sequences = (len(data) - 1) // length
        if num_sequences < 1:
            raise ConfigError(f"task.args.length={length}: is more than all {len(data)} bytes of the {which} files")
        ends = np.cumsum([len(content) for content, _ in parts[is_test]])
        starts = np.arange(num_sequences) * length
        labels = np.array([group for _, group in parts[is_test]])[np.searchsorted(ends, starts, side="right")]
        found.append(Sequences(torch.from_numpy(data), length, torch.from_numpy(starts), torch.from_numpy(labels)))
    return Text(found[0], found[1], digest.hexdigest())
