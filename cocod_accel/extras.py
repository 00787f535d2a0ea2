"""Packages that are not installed with this one: each belongs to an extra in ``pyproject.toml``."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version


def install_command(extra: str) -> str:
    """What installs an extra, into this environment. A torchvision belongs to one torch, which pip would else replace."""
    keep = ""
    if extra == "vision":
        try:
            keep = f" torch=={version('torch').partition('+')[0]}"
        except PackageNotFoundError:  # torch, but not from a package
            keep = ""
    return f"pip install 'cocod-accel[{extra}]'{keep}"


def require(module: str, extra: str, door: str) -> None:
    """Raise one line if the package that ``door`` is a door to is not installed."""
    absent = missing(module, extra)
    if absent is not None:
        raise ModuleNotFoundError(f"{door}: {absent}")


def missing(module: str, extra: str) -> str | None:
    """One line if the package of ``module`` is not installed; None if it is."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"{module} is not installed; {install_command(extra)}"
