"""What a checkpoint must look like, checked as a whole before anything is touched.

Hashes say that files are as they were written, not that they were written by a run like this one: types, sizes and shapes
are compared here with those of the model, the optimizers and the averages that are about to be filled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cocod_accel.averaging.flat import local
from cocod_accel.sync.states import readable

#: Larger counts are no counts, and would not fit where they are going.
_LARGEST = 1 << 62

Check = Callable[[Any, str], None]


def fail(where: str, what: str) -> None:
    raise ValueError(f"{where} {what}")


# ---- the rules, each a function of a value and of its name


def count(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        fail(where, "is not a count")


def number(value: Any, where: str) -> None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
    if not is_one and not (isinstance(value, float) and not math.isfinite(value)):
        fail(where, "is not a number")


def word(value: Any, where: str) -> None:
    if not isinstance(value, str):
        fail(where, "is not a word")


def flag(value: Any, where: str) -> None:
    if not isinstance(value, bool):
        fail(where, "is not true or false")


def tensor(value: Any, where: str) -> None:
    if not isinstance(value, Tensor):
        fail(where, "is not a tensor")


def anything(value: Any, where: str) -> None:
    """Whatever it is: it is looked at elsewhere."""


def optional(rule: Check) -> Check:
    return lambda value, where: None if value is None else rule(value, where)


def either(first: Check, second: Check) -> Check:
    def check(value: Any, where: str) -> None:
        try:
            first(value, where)
        except ValueError:
            second(value, where)

    return check


def each(rule: Check, length: int | None = None) -> Check:
    """A list."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list | tuple):
            fail(where, "is not a list")
        if length is not None and len(value) != length:
            fail(where, f"has {len(value)} entries, not {length}")
        for index, item in enumerate(value):
            rule(item, f"{where}[{index}]")

    return check


def values(rule: Check, key: Check = word) -> Check:
    """A dict with whatever keys."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            fail(where, "is not a dict")
        for name, item in value.items():
            key(name, f"a key of {where}")
            rule(item, f"{where}.{name}")

    return check


def record(rules: dict[str, Check], optional_keys: Sequence[str] = ()) -> Check:
    """A dict with these keys."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            fail(where, "is not a dict")
        for name in rules.keys() - value.keys() - set(optional_keys):
            fail(f"{where}.{name}", "is missing")
        for name in value.keys() - rules.keys():
            fail(f"{where}.{name}", "is unknown")
        for name, item in value.items():
            rules[name](item, f"{where}.{name}")

    return check


# ---- the tree of a worker

_TRAFFIC = record({"num_bytes": number, "exposed_seconds": number, "hidden_seconds": number})
_TENSORS = each(tensor)
_PART = record(
    {
        "number": count,
        "in_flight": optional(_TENSORS),
        "is_coded": flag,
        "drift": each(each(number)),
        "point": optional(record({"z": optional(_TENSORS), "velocity": optional(_TENSORS)})),
        "residuals": _TENSORS,
        "owned_residuals": _TENSORS,
        "left_out": optional(_TENSORS),
    }
)
#: "drift" is what the release before kept of an exact mean.
_AVERAGES = record(
    {"parts": each(_PART), "drifts": each(number, 3), "drift": optional(each(each(number), 2))}, ("drifts", "drift")
)
_OPTIONS = record({"payload": word, "fragments": count, "own_share": number, "outer": each(anything, 3)})
_SYNC = record(
    {
        "version": count,
        "algorithm": word,
        "attempts": count,
        "rounds": count,
        "round_start": count,
        "due": each(each(count, 2)),
        "options": _OPTIONS,
        "method": anything,
        "averages": optional(_AVERAGES),
        "traffic": each(_TRAFFIC),
        "nodes": each(each(count)),
        "plan": optional(record({"period": count, "reason": word, "compute_seconds": number, "comm_seconds": number})),
    },
    optional_keys=("due", "plan"),
)
_TREE = record(
    {
        "model": values(anything),
        "buffers": values(tensor),
        "optimizers": each(anything),
        "kinds": each(word),
        "custom": each(anything),
        "schedulers": each(optional(values(anything))),
        "sync": values(anything),
        "num_workers": count,
        "scaler": optional(values(number)),
        "engine": optional(values(anything)),
        "random": values(anything),
        "position": anything,
    }
)


def check_tree(
    tree: Any, model: dict[str, Any], buffers: dict[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Refuse what one worker has written, if it does not fit what this one holds of a model, and its optimizers."""
    _TREE(tree, "its state")
    check_model(model, tree["model"])
    check_model(buffers, tree["buffers"])
    here = [type(optimizer).__name__ for optimizer in optimizers]
    if tree["kinds"] != here:
        raise ValueError(f"was saved with {', '.join(tree['kinds'])}, but this run has {', '.join(here)}")
    each(anything, len(here))(tree["optimizers"], "optimizers")
    for index, (optimizer, state) in enumerate(zip(optimizers, tree["optimizers"], strict=True)):
        _check_optimizer(optimizer, state, f"optimizers[{index}]")
    _SYNC(readable(tree["sync"]), "sync")
    _check_random(tree["random"])


def check_model(own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse the state of another model."""
    here, there = ({name: _looks(value) for name, value in state.items()} for state in (own, saved))
    for name in here.keys() | there.keys():
        if here.get(name) != there.get(name):
            raise ValueError(
                f"is for a different model: {name} has shape {there.get(name, 'none')}, here {here.get(name, 'none')}"
            )


def _looks(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _check_optimizer(optimizer: torch.optim.Optimizer, state: Any, where: str) -> None:
    own = optimizer.state_dict()
    record(dict.fromkeys(own, anything))(state, where)
    groups = own["param_groups"]
    each(values(anything), len(groups))(state["param_groups"], f"{where}.param_groups")
    for index, (group, saved) in enumerate(zip(groups, state["param_groups"], strict=True)):
        name = f"{where}.param_groups[{index}]"
        if saved.get("params") != group["params"] or not all(type(i) is int for i in saved["params"]):
            fail(name, "is for other parameters")
        for key, value in saved.items():
            if not _is_kind_of(value, group.get(key)):
                fail(f"{name}.{key}", f"is a {type(value).__name__}")
        missing = group.keys() - saved.keys() - {"initial_lr"}
        if missing:
            fail(f"{name}.{sorted(missing)[0]}", "is missing")
    shapes = {
        index: local(parameter).shape
        for group, real in zip(groups, optimizer.param_groups, strict=True)
        for index, parameter in zip(group["params"], real["params"], strict=True)
    }
    values(values(anything), count)(state["state"], f"{where}.state")
    is_torchs = type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    for index, entries in state["state"].items():
        if index not in shapes:
            fail(f"{where}.state[{index}]", "is for no parameter")
        for key, value in entries.items():
            fits = not isinstance(value, Tensor) or value.numel() == 1 or value.shape == shapes[index]
            if is_torchs and not (fits and (value is None or isinstance(value, Tensor | int | float))):
                fail(f"{where}.state[{index}].{key}", f"is {_looks(value)}, for a parameter of {tuple(shapes[index])}")
        if is_torchs and entries and entries.keys() != _keys_of(optimizer, index, entries):
            fail(f"{where}.state[{index}]", f"has {', '.join(map(str, entries))}")


def _keys_of(optimizer: torch.optim.Optimizer, index: int, entries: dict[str, Any]) -> set[str]:
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"}
    return {"step", "exp_avg", "exp_avg_sq"} | (entries.keys() & {"max_exp_avg_sq"})


def _is_kind_of(value: Any, own: Any) -> bool:
    """Whether one option of an optimizer may stand in the place of another."""
    if isinstance(own, bool) or isinstance(value, bool):
        return type(value) in (bool, type(None)) and type(own) in (bool, type(None))
    if isinstance(own, int | float | Tensor) and not isinstance(value, list | tuple | dict | str):
        is_scalar = isinstance(value, Tensor) and value.numel() == 1
        return is_scalar or (isinstance(value, int | float) and math.isfinite(value))
    if isinstance(own, list | tuple) and isinstance(value, list | tuple):
        return len(own) == len(value) and all(map(_is_kind_of, value, own))
    return own is None or type(value) is type(own)


def _check_random(state: dict[str, Any]) -> None:
    """Refuse what is no state of a generator, on generators that nobody uses."""
    for name in ("python", "numpy", "torch"):
        if name not in state:
            fail(f"random.{name}", "is missing")
    try:
        random.Random().setstate(state["python"])
        name, keys, *rest = state["numpy"]
        np.random.RandomState().set_state((name, keys.numpy().astype(np.uint32), *rest))
        check_generator(state["torch"], "random.torch")
    except Exception as error:
        raise ValueError(f"random is no state of random numbers ({str(error).splitlines()[0]})") from error


def check_generator(state: Any, where: str) -> None:
    tensor(state, where)
    torch.Generator().set_state(state)


# ---- the manifest


def check_manifest(manifest: Any, version: int, name_of: Callable[[int], str]) -> None:
    """Refuse a list of files that no run has written."""
    if isinstance(manifest, dict) and manifest.get("version") != version:
        raise ValueError(f"has an unknown version ({str(manifest.get('version'))[:20]}); use the release that wrote it")
    file = record({"bytes": count, "blake2b": word})
    rules: dict[str, Check] = {
        "version": count,
        "algorithm": word,
        "weights": each(number),
        "nodes": each(each(count)),
        "files": values(file),
    }
    record(rules)(manifest, "it")
    weights = manifest["weights"]
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        fail("weights", "are not positive numbers, one for each worker")
    if sorted(rank for members in manifest["nodes"] for rank in members) != list(range(len(weights))):
        fail("nodes", "do not hold every worker once")
    missing = [name_of(rank) for rank in range(len(weights)) if name_of(rank) not in manifest["files"]]
    if missing:
        fail(missing[0], "is not listed")
