"""Checkpoints that every worker takes part in, because every worker holds a different model in the middle of a round.

One folder per checkpoint: ``worker_N.safetensors`` with a worker's model, optimizer, average in flight, round position,
random numbers and whatever the caller adds; what accelerate keeps itself (schedulers); and ``checkpoint.json``, written
last, with a hash of every file. A folder gets its name only when all of it is on disk: there is never half a checkpoint.

Nothing is unpickled that is not restricted to tensors and numbers (``weights_only=True``).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cocod_accel.checkpoint import safetree as packing
from cocod_accel.checkpoint.files import (
    _VERSION,
    MANIFEST,
    CheckpointError,
    check_files,
    check_loadable,
    checkpoints_in,
    described,
    read_manifest,
    worker_file,
)
from cocod_accel.checkpoint.merge import merged
from cocod_accel.checkpoint.rng import random_state, set_random_state
from cocod_accel.checkpoint.schema import check_tree
from cocod_accel.checkpoint.sharded import held, load_held, load_optimizer, optimizer_state, whole_optimizers
from cocod_accel.comm.agreement import try_together
from cocod_accel.sync.ddp import unwrap
from cocod_accel.sync.deepspeed import engine_state, load_engine_state
from cocod_accel.sync.states import readable, without_averages
from cocod_accel.sync.sync import Sync

logger = logging.getLogger(__name__)

#: Of what a file says about itself, no more is repeated.
_LONGEST_PROBLEM = 500
_MOST_NAMED = 8


@dataclass(frozen=True)
class Resumed:
    """What training goes on from."""

    path: Path
    #: What this worker passed to ``save``; worker 0's, if the number of workers has changed.
    position: Any
    #: Every worker goes on bit for bit; else all go on from the weighted mean of the saved workers.
    is_exact: bool
    num_workers: int


class Checkpoints:
    """Saves and restores a model that :func:`~cocod_accel.attach` trains, on all workers together.

    Args:
        folder: where checkpoints are kept; on a file system that all workers share.
        sync: what ``attach`` returned.
        accelerator: in accelerate loops; its own ``save_state`` and ``load_state`` then carry every worker's state too.
        keep: how many checkpoints to keep.
        scaler: a GradScaler of the loop's own; an accelerator's is known.
    """

    def __init__(
        self, folder: str | Path, sync: Sync, accelerator: Any = None, *, keep: int = 2, scaler: Any = None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} would delete every checkpoint; use at least 1")
        self.folder = Path(folder)
        self.keep = keep
        self._sync, self._subject = sync, sync.subject
        # accelerate would have DeepSpeed write (and unpickle) worker 0's state, and FSDP gather it; all there is is here.
        # With a server, all processes would have to call it.
        own = (self._subject.engine is not None, self._subject.shards is not None, bool(self._subject.workers))
        is_own = any(own)
        self._accelerator: Any = None if is_own else accelerator
        self._group = self._subject.group
        self._rank, self._num_workers = sync.rank, sync.num_workers
        self._scaler: Any = scaler if scaler is not None else getattr(accelerator, "scaler", None)
        self._position: Any = None
        self._custom_objects: list[Any] = []
        self._is_saving = False
        #: What optimizers take at their next ``load_state_dict``, whatever they are given, by their number.
        self._next_states: dict[int, Any] = {}
        if self._accelerator is not None:
            accelerator.register_save_state_pre_hook(self._save_hook)
            accelerator.register_load_state_pre_hook(self._load_hook)
            sync.reminder.is_quiet = True  # accelerate asks for the model before it asks the hooks
            for number, optimizer in enumerate(self._subject.optimizers):
                optimizer.register_load_state_dict_pre_hook(partial(self._next_state, number))

    # ---- saving

    def save(self, position: Any = None, *, name: str | None = None) -> Path | None:
        """Write a checkpoint; None, with a warning, if that failed on any worker. Collective, at the same step everywhere.

        ``position``: numbers, strings, tensors, lists and dicts that tell the loop where to go on; each worker its own.
        """
        self._position = position

        def prepare() -> str:
            wanted = name or f"attempt_{self._sync.attempts:010d}"
            final = wanted
            if self._rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in self.folder.glob(".*.tmp"):  # of a run that was killed while it wrote
                    shutil.rmtree(left)
                # Never in the place of another one: there would be a moment without either.
                others = (f"{wanted}.{number}" for number in itertools.count(1))
                while (self.folder / final).exists():
                    final = next(others)
                (self.folder / f".{final}.tmp").mkdir()
            return final

        def write() -> dict[str, Any]:
            if self._accelerator is not None:
                self._is_saving = True
                try:
                    with self._without_custom_objects():
                        self._accelerator.save_state(str(temporary))
                finally:
                    self._is_saving = False
            else:
                self._save_hook([], [], str(temporary))
            return {"weight": self._sync.weight, **described(temporary / worker_file(self._rank))}

        def publish(reports: list[dict[str, Any]]) -> None:
            if self._rank != 0:
                return
            missing = [rank for rank in range(self._num_workers) if not (temporary / worker_file(rank)).is_file()]
            if missing:
                raise OSError(f"workers {missing} wrote elsewhere; {self.folder} must be shared by all workers")
            files = {worker_file(rank): report for rank, report in enumerate(reports)}
            for path in sorted(temporary.iterdir()):
                if path.name not in files:
                    packing.flush(path)
                    files[path.name] = described(path)
            manifest = {
                "version": _VERSION,
                "algorithm": self._sync.algorithm,
                "weights": [report.pop("weight") for report in reports],
                "nodes": self._sync.nodes,
                "files": files,
            }
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            packing.flush(temporary / MANIFEST)
            packing.flush(temporary)
            temporary.rename(final)
            packing.flush(self.folder)
            for old in [path for path in self.all() if path != final][self.keep - 1 :]:
                shutil.rmtree(old, ignore_errors=True)

        names, error = try_together(prepare, self._group, self._subject.device)
        final = self.folder / (names[0] if names else "")
        temporary = self.folder / f".{final.name}.tmp"
        reports: list[dict[str, Any]] = []
        if error is None:
            reports, error = try_together(write, self._group, self._subject.device)
        if error is None:
            _, error = try_together(lambda: publish(reports), self._group, self._subject.device)
        self._position = None
        if error is None:
            return final
        if self._rank == 0:
            if names:
                shutil.rmtree(temporary, ignore_errors=True)
            kept = self.all()
            then = f"{kept[0]} is kept" if kept else "there is none yet"
            logger.warning("a checkpoint could not be written in %s (%s); %s", self.folder, error, then)
        return None

    def all(self) -> list[Path]:
        """The checkpoints that are there, the newest first."""
        return checkpoints_in(self.folder)

    def _save_hook(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """On every worker, before accelerate writes its own files."""
        index = self._index_in(models)
        if index is not None and weights:  # accelerate would keep worker 0's model
            if self._is_saving or not self._sync.is_attached:
                del weights[index]
            else:
                weights[index] = self._sync.mean_state_dict()
        self.write_worker(folder)

    def write_worker(self, folder: str | Path) -> None:
        """This worker's part of a checkpoint that somebody else puts together. Not collective."""
        with self._sync.reminder.quiet():
            model, buffers = held(self._subject)
        with whole_optimizers(self._subject):
            optimizers = [optimizer_state(optimizer) for optimizer in self._subject.optimizers]
        tree = {
            "model": model,
            "buffers": buffers,
            "optimizers": optimizers,
            "kinds": [type(optimizer).__name__ for optimizer in self._subject.optimizers],
            "custom": [thing.state_dict() for thing in self._custom_objects],
            "schedulers": [_packable(thing.state_dict()) for thing in getattr(self._accelerator, "_schedulers", [])],
            "sync": self._sync.control.state_to_write(),
            "num_workers": self._num_workers,
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
            "engine": engine_state(self._subject.engine),
            "random": random_state(),
            "position": self._position,
        }
        packing.write(Path(folder) / worker_file(self._rank), tree)

    @contextlib.contextmanager
    def _without_custom_objects(self) -> Iterator[None]:
        """What was registered with accelerate for checkpointing is kept here: accelerate would unpickle anything for it."""
        self._custom_objects = list(self._accelerator._custom_objects)
        self._accelerator._custom_objects.clear()
        try:
            yield
        finally:
            self._accelerator._custom_objects.extend(self._custom_objects)

    def _load_custom_objects(self, tree: Any) -> None:
        for thing, state in zip(self._custom_objects, tree["custom"], strict=True):
            thing.load_state_dict(state)

    # ---- restoring

    def resume(
        self,
        path: str | Path | None = None,
        *,
        is_same: Callable[[Any], bool] | None = None,
        check: Callable[[Any], object] | None = None,
        agree: Callable[[list[Any]], object] = lambda positions: None,
    ) -> Resumed | None:
        """Go on from ``path``, or from the newest checkpoint that is whole; None if there is none. Collective.

        Another number of workers goes on from their weighted mean; so does a position that ``is_same`` says no to.
        ``check`` raises a ValueError for a position that is none, and ``agree`` for positions of all workers that cannot
        be of one run; nothing has been changed then.
        """
        listed, error = try_together(
            lambda: [str(found) for found in self._candidates(path)], self._group, self._subject.device
        )
        if error is not None:
            raise CheckpointError(error)
        candidates = [Path(found) for found in listed[0]]
        if not candidates:
            return None
        problems = []
        for candidate in candidates:
            checked, error = try_together(lambda c=candidate: self._check(c, check), self._group, self._subject.device)  # type: ignore[misc]
            if error is None:  # the same on all workers, from here on
                error = _disagreement(checked, agree)
            if error is None:
                weights, position, has_same_nodes, _ = checked[0]
                is_exact = has_same_nodes and (is_same is None or is_same(position))
                return self._restore(candidate, weights, is_exact)
            error = error if len(error) <= _LONGEST_PROBLEM else f"{error[:_LONGEST_PROBLEM]}..."
            problems.append(f"{candidate}: {error}")
            if self._rank == 0 and candidate != candidates[-1]:
                logger.warning("checkpoint %s cannot be used (%s); trying the one before", candidate, error)
        raise CheckpointError(f"no checkpoint can be used; {problems[0]}")

    def _candidates(self, path: str | Path | None) -> list[Path]:
        """A checkpoint, or those in a folder, or in a run folder; the newest first. Worker 0's list is used."""
        if path is None:
            return self.all()
        given = Path(path)
        if (given / MANIFEST).is_file():
            return [given]
        return checkpoints_in(given) or checkpoints_in(given / "checkpoints") or [given]

    def _check(self, path: Path, check: Callable[[Any], object] | None) -> tuple[list[float], Any, bool, int]:
        """Worker 0 looks at the files that all need, each worker at its own.

        The saved weights, a position, whether the same workers shared nodes, and how many rounds were done.
        """
        manifest = read_manifest(path)
        num_workers = len(manifest["weights"])
        mixed = self._mixed(manifest)
        own = {worker_file(rank) for rank in ([self._rank] if num_workers == self._num_workers else mixed)}
        shared = {name for name in manifest["files"] if not name.startswith("worker_")} if self._rank == 0 else set()
        check_files(path, manifest, own | shared)
        if self._rank == 0:
            extra = {entry.name for entry in path.iterdir()} - set(manifest["files"]) - {MANIFEST}
            if extra:
                raise ValueError(f"holds files that were not written with it: {', '.join(sorted(extra))}")
        for name in self._of_accelerate(manifest):
            check_loadable(path / name)
        saved, attached = manifest["algorithm"], self._sync.algorithm
        if saved != attached:
            raise ValueError(f"was saved with {saved}, but {attached} is attached")
        tree: Any = None
        # All of them are needed for their mean; the first one's is looked at last, because its position counts.
        for rank in [self._rank] if num_workers == self._num_workers else reversed(mixed):
            tree = packing.read(path / worker_file(rank))
            with whole_optimizers(self._subject), self._sync.reminder.quiet():
                check_tree(tree, *held(self._subject), self._subject.optimizers)
            self._check_rest(tree, num_workers)
            if check is not None:
                check(tree["position"])
        return manifest["weights"], tree["position"], manifest["nodes"] == self._sync.nodes, tree["sync"]["rounds"]

    def _mixed(self, manifest: dict[str, Any]) -> list[int]:
        """The workers whose states are mixed for this one: all of them, or those that held the same shard."""
        if self._subject.shards is None:
            return list(range(len(manifest["weights"])))
        here = next(node for node in self._sync.nodes if self._rank in node)
        if any(len(node) != len(here) for node in manifest["nodes"]):
            raise ValueError(
                f"was saved by nodes of {len(manifest['nodes'][0])} workers, here {len(here)} share a model; use nodes of "
                "that size, or start from an exported model"
            )
        return [node[here.index(self._rank)] for node in manifest["nodes"]]

    def _of_accelerate(self, manifest: dict[str, Any]) -> list[str]:
        """The files that accelerate will load on this worker, and unpickle with ``weights_only=True``."""
        if self._accelerator is None:
            return []
        own = f"random_states_{self._rank}.pkl"
        names = [name for name in manifest["files"] if name.endswith((".bin", ".pkl"))]
        return [name for name in names if name == own or not name.startswith("random_states_")]

    def _check_rest(self, tree: Any, num_workers: int) -> None:
        """What this run has besides a model and its optimizers."""
        if tree["num_workers"] != num_workers:
            raise ValueError(f"was saved by {tree['num_workers']} workers, but lists {num_workers}")
        accelerator = self._accelerator
        for key, there in (("custom", "_custom_objects"), ("schedulers", "_schedulers")):
            registered = len(getattr(accelerator, there, []))
            if len(tree[key]) != registered:
                raise ValueError(f"holds {len(tree[key])} registered objects ({key}), but {registered} are registered here")
        if (tree["engine"] is None) != (self._subject.engine is None):
            raise ValueError("was saved with an engine, or is loaded into one, but not both")
        own, saved = (None if self._scaler is None else self._scaler.state_dict()), tree["scaler"]
        if own is not None and (saved is None or own.keys() != saved.keys()):
            raise ValueError("holds no state for the GradScaler of this run")
        if num_workers == self._num_workers:
            self._sync._driver.check_state(readable(tree["sync"]))

    def _restore(self, path: Path, weights: list[float], is_exact: bool) -> Resumed:
        if is_exact:

            def load() -> None:
                if self._accelerator is not None:
                    try:
                        with self._without_custom_objects():
                            self._accelerator.load_state(str(path))
                    finally:
                        self._next_states.clear()
                    self._load_custom_objects(self._loaded)
                else:
                    self._load_hook([], str(path))
                set_random_state(self._loaded["random"])

            _, error = try_together(load, self._group, self._subject.device)
            if error is not None:
                raise CheckpointError(f"{path}: {error}")
            return Resumed(path, self._loaded["position"], True, len(weights))
        trees: list[Any] = []

        def mix() -> None:
            mixed = self._mixed(read_manifest(path))
            tree = merged([path / worker_file(rank) for rank in mixed], [weights[rank] for rank in mixed])
            self._load_merged(tree)
            trees.append(tree)

        _, error = try_together(mix, self._group, self._subject.device)
        if error is not None:
            raise CheckpointError(f"{path}: {error}")
        return Resumed(path, trees[0]["position"], False, len(weights))

    def _load_merged(self, tree: Any) -> None:
        """One state for all workers, who begin a round with it."""
        self._custom_objects = list(getattr(self._accelerator, "_custom_objects", []))
        self._load_custom_objects(tree)
        for scheduler, state in zip(getattr(self._accelerator, "_schedulers", []), tree["schedulers"], strict=True):
            if state is not None:
                scheduler.load_state_dict(state)
        if self._scaler is not None:
            self._scaler.load_state_dict(tree["scaler"])
        load_held(self._subject, tree)
        with whole_optimizers(self._subject):
            for optimizer, state in zip(self._subject.optimizers, tree["optimizers"], strict=True):
                load_optimizer(optimizer, state)
        self._sync.load_state_dict(without_averages(tree["sync"], self._sync.nodes))

    def _load_hook(self, models: list[nn.Module], folder: str) -> None:
        """On every worker, before accelerate reads its own files."""
        index = self._index_in(models)
        if index is not None:
            del models[index]
        self.read_worker(folder)

    def read_worker(self, folder: str | Path) -> None:
        """What :meth:`write_worker` wrote; random numbers are left to the caller. Not collective."""
        tree = packing.read(Path(folder) / worker_file(self._rank))
        load_held(self._subject, tree)
        prepared = [wrapper.optimizer for wrapper in getattr(self._accelerator, "_optimizers", [])]
        with whole_optimizers(self._subject):
            for number, (optimizer, state) in enumerate(zip(self._subject.optimizers, tree["optimizers"], strict=True)):
                if any(optimizer is other for other in prepared):
                    self._next_states[number] = state  # accelerate is about to load worker 0's
                else:
                    load_optimizer(optimizer, state)
        self._sync.load_state_dict(tree["sync"])
        load_engine_state(self._subject.engine, tree["engine"])
        if self._scaler is not None and tree["scaler"] is not None:
            self._scaler.load_state_dict(tree["scaler"])
        self._loaded = tree

    def _next_state(self, number: int, _: torch.optim.Optimizer, given: dict[str, Any]) -> Any:
        return self._next_states.pop(number, None)

    def _index_in(self, models: Sequence[nn.Module]) -> int | None:
        found = [index for index, model in enumerate(models) if unwrap(model)[0] is self._subject.module]
        return found[0] if found else None


def _disagreement(checked: Sequence[tuple[Any, Any, Any, int]], agree: Callable[[list[Any]], object]) -> str | None:
    """Why the states of the workers are not of one moment, in words; None: they are."""
    rounds = [done for *_, done in checked]
    if len(set(rounds)) > 1:
        return f"its workers are in different rounds: {rounds[:_MOST_NAMED]}"
    try:
        agree([position for _, position, *_ in checked])
    except ValueError as error:
        return str(error)
    return None


def _packable(state: Any) -> Any:
    """None for a state that only pickle could keep; accelerate then keeps it, for the same number of workers."""
    try:
        packing.check(state)
    except TypeError:
        return None
    return state
