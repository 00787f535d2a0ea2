"""Files of run folders: they may come from anybody, so only regular ones of a bounded size are read, and rows one by one."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

#: Larger ones no run has written.
LARGEST_JSON = 1 << 26
LARGEST_ROWS = 1 << 30
#: A plan of 100,000 workers takes two million bytes.
_LONGEST_ROW = 1 << 23


def opened(path: Path, largest: int) -> BinaryIO:
    """A regular file, to read. ValueError for anything else: a pipe, a device, or one that is too large."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_size <= largest:
        return os.fdopen(handle, "rb")
    os.close(handle)
    is_regular = stat.S_ISREG(found.st_mode)
    size = f"has {found.st_size:,} bytes, and at most {largest:,} are read"
    raise ValueError(f"{path}: {size if is_regular else 'is not a regular file'}; leave it out")


def read_text(path: Path, largest: int) -> str:
    """All of a file; as much as was there when it was opened."""
    with opened(path, largest) as file:
        try:
            return file.read(largest).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not text; leave it out") from error


def read_json(path: Path) -> Any:
    """What a JSON file holds. ValueError, of one line, if it is none."""
    text = read_text(path, LARGEST_JSON)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid JSON ({error}); run it again") from error


def rows_of(path: Path) -> Iterator[dict[str, Any] | None]:
    """The rows of a JSONL file, one by one; None for a line that is none: a killed process may leave half a line."""
    with opened(path, LARGEST_ROWS) as file:
        while file.tell() < LARGEST_ROWS:  # it may grow while it is read
            line = file.readline(_LONGEST_ROW)
            if not line:
                return
            is_whole = line.endswith(b"\n") or len(line) < _LONGEST_ROW
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_LONGEST_ROW)
            try:
                row = json.loads(line) if is_whole else None
            except (ValueError, RecursionError):
                row = None
            yield row if isinstance(row, dict) else None
