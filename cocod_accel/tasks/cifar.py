"""CIFAR's files: the official binary layout, and torchvision's pickled batches, read without the power of pickle.

A pickle is a program, and a data folder may come from anybody. The few names that CIFAR's batches use are answered here by
classes that only keep what they are given; any other name is refused, so nothing in such a file can run.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocod_accel.config.strict import ConfigError, first_line

_PIXELS = 3 * 32 * 32


def read_cifar_binary(path: Path, label_bytes: int) -> tuple[Any, Any]:
    """Images and labels of CIFAR's official binary layout; the last label byte is the fine one."""
    data = np.frombuffer(path.read_bytes(), np.uint8)
    record = label_bytes + _PIXELS
    if data.size == 0 or data.size % record:
        raise ConfigError(f"{path}: {data.size} bytes is not a multiple of the record size {record}; download it again")
    rows = data.reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64)


def read_cifar_pickle(path: Path, key: str) -> tuple[Any, Any]:
    """Images and labels of one of torchvision's files: a pickled dict of an array and lists."""
    try:
        with path.open("rb") as file:
            content = _Reader(file, encoding="latin1").load()
        data, labels = content["data"], content[key]
        images = data.array() if isinstance(data, _Array) else None
        numbers = labels.array() if isinstance(labels, _Array) else np.asarray(labels, np.int64)
        if images is None or images.dtype != np.uint8 or numbers.ndim != 1 or images.shape != (len(numbers), _PIXELS):
            raise ValueError(f"data and {key} are not images and their labels")
    except Exception as error:  # a broken file may raise whatever it likes
        raise ConfigError(f"{path}: is not a batch of CIFAR ({first_line(error)}); download it again") from error
    return images.reshape(-1, 3, 32, 32), numbers.astype(np.int64)


class _DType:
    """What stands for ``numpy.dtype`` in a file: plain integers only."""

    __slots__ = ("_code", "_order")

    def __init__(self, code: str, *_: object) -> None:
        if re.fullmatch(r"\|?[iu][1248]", code) is None:
            raise ValueError(f"holds an array of {code!r}")
        self._code, self._order = code, "<"

    def __setstate__(self, state: Any) -> None:
        self._order = ">" if state[1] == ">" else "<"

    @property
    def real(self) -> np.dtype[Any]:
        return np.dtype(self._code).newbyteorder(">" if self._order == ">" else "<")


class _Array:
    """What stands for a numpy array: its bytes, which become an array only when somebody asks for it."""

    __slots__ = ("_state",)

    def __init__(self, *_: object) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        _, *self._state = state

    def array(self) -> NDArray[Any]:
        shape, dtype, is_fortran, data = self._state
        if not isinstance(dtype, _DType) or not isinstance(data, str | bytes | bytearray):
            raise ValueError("holds an array of objects")
        values = np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, dtype.real)
        return values.reshape(shape, order="F" if is_fortran else "C")


class _Buffer(_Array):
    """The same, as protocol 5 writes it."""

    __slots__ = ()

    def __init__(self, data: Any, dtype: Any, shape: Any, order: Any) -> None:
        self._state = shape, dtype, order == "F", data


class _Bytes:
    """What stands for ``_codecs.encode``, by which protocol 2 keeps bytes."""

    __slots__ = ()

    def __new__(cls, text: str, encoding: str) -> Any:
        return text.encode("latin1")

    def __setstate__(self, state: Any) -> None:
        raise ValueError("bytes have no state")


_NAMES: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _Bytes,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Buffer for core in ("core", "_core")},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such file needs") from None

    def persistent_load(self, given: Any) -> Any:
        raise pickle.UnpicklingError("it refers to another file")
