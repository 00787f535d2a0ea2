"""CoCoD-SGD, or another algorithm, in a Hugging Face ``Trainer`` that stays as it is.

    trainer = Trainer(model=model, args=args, train_dataset=data, ...)
    trainer.add_callback(CoCoDCallback(trainer, period=5))
    trainer.train()

Needs transformers. ``Trainer`` has no events around its evaluation and its checkpoints, so the callback puts itself around
the methods that do these things, of this one trainer.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from cocod_accel.extras import require

require("transformers", "transformers", "cocod_accel.hf")

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from cocod_accel.algorithms import Algorithm, CoCoDSGD
from cocod_accel.algorithms.rounds import PeriodLike
from cocod_accel.checkpoint import safetree as packing
from cocod_accel.checkpoint.checkpoints import Checkpoints
from cocod_accel.checkpoint.files import CheckpointError, worker_file
from cocod_accel.comm.agreement import try_together
from cocod_accel.sync.attach import attach
from cocod_accel.sync.sync import Sync

logger = logging.getLogger(__name__)


class CoCoDCallback(TrainerCallback):
    """Attaches an algorithm when training begins, and gives every worker the mean model when it ends.

    The trainer's logs get four more figures: ``comm_exposed_seconds``, ``comm_hidden_seconds``, ``drift`` and ``rounds``.
    After training ``callback.sync`` is still there to be asked: ``stats()``, ``plan()``.

    Evaluation during training sees the averaged model, and so does whoever reads the model of a checkpoint. Each
    worker's own state lies beside it, and ``trainer.train(resume_from_checkpoint=...)`` goes on bit for bit.

    Args:
        trainer: the trainer this is added to.
        period: steps a round of ``CoCoDSGD``, or "auto".
        algorithm: another algorithm, instead of ``period``.
        weight, inner: as for :func:`~cocod_accel.attach`.
    """

    def __init__(
        self,
        trainer: Trainer,
        period: PeriodLike | Literal["auto"] | None = None,
        *,
        algorithm: Algorithm | None = None,
        weight: float = 1,
        inner: Any = None,
    ) -> None:
        if (period is None) == (algorithm is None):
            raise TypeError("pass either period=5, for CoCoDSGD, or algorithm=")
        self._algorithm = CoCoDSGD(period) if algorithm is None and period is not None else algorithm
        assert self._algorithm is not None
        if not self._algorithm.same_period:
            raise ValueError(f"{self._algorithm!r}: Trainer gives every worker the same number of steps; use LocalSGD")
        self._trainer, self._weight, self._inner = trainer, weight, inner
        #: What ``attach`` returned; None before training. Detached after it.
        self.sync: Sync | None = None
        #: The same while it is attached.
        self._attached: Sync | None = None
        self._resume_from: Path | None = None
        self._settle(trainer)
        for name, around in (
            ("train", self._train),
            ("evaluate", self._evaluate),
            ("predict", self._evaluate),
            ("save_model", self._save_model),
            ("log", self._log),
        ):
            setattr(trainer, name, _around(getattr(trainer, name), around))

    # ---- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        assert self._algorithm is not None
        trainer = self._trainer
        if self._attached is not None:  # auto_find_batch_size begins anew after an error
            self._attached.__exit__(RuntimeError, None, None)
        sync = attach(trainer.model_wrapped, trainer.optimizer, self._algorithm, weight=self._weight, inner=self._inner)
        self.sync = self._attached = sync
        if self._resume_from is not None:
            self._go_on(sync, self._resume_from)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        sync, self._attached = self._attached, None
        if sync is None:
            return
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            sync.state_dict()  # what is in flight arrives and is dropped: all workers have loaded the best mean model
            sync.reminder.are_level()
        else:
            sync.finish()
        sync.detach()

    # ---- around the trainer's own methods

    def _train(
        self, call: Callable[..., Any], resume_from_checkpoint: str | bool | None = None, *args: Any, **named: Any
    ) -> Any:
        found = resume_from_checkpoint
        if found is True:
            found = get_last_checkpoint(self._trainer.args.output_dir)
        self._resume_from = Path(found) if found else None
        try:
            return call(resume_from_checkpoint, *args, **named)
        except BaseException:
            if self._attached is not None:
                self._attached.__exit__(*sys.exc_info())  # nothing may wait for workers that are elsewhere
                self._attached = None
            raise

    def _evaluate(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._attached is None or self._attached.is_averaged:  # with several data sets, evaluate calls itself
            return call(*args, **named)
        with self._attached.averaged():
            return call(*args, **named)

    def _save_model(
        self, call: Callable[..., Any], output_dir: str | None = None, _internal_call: bool = False, *args: Any, **named: Any
    ) -> Any:
        if self._attached is None or not _internal_call or output_dir is None:
            return call(output_dir, _internal_call, *args, **named)
        if not self._trainer.args.save_only_model:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            self._checkpoints(self._attached, output_dir).write_worker(output_dir)
        # Entering takes all workers, so everyone's state is there before the trainer writes what makes a checkpoint of it.
        with self._attached.averaged():
            return call(output_dir, _internal_call, *args, **named)

    def _log(self, call: Callable[..., Any], logs: dict[str, float], *args: Any, **named: Any) -> Any:
        """What synchronizing has cost so far, beside each loss; before other callbacks hear of it."""
        if self._attached is not None and "loss" in logs:
            stats = self._attached.stats()
            logs["comm_exposed_seconds"], logs["comm_hidden_seconds"] = stats.exposed_seconds, stats.hidden_seconds
            logs["drift"], logs["rounds"] = stats.drift, stats.rounds
        return call(logs, *args, **named)

    # ---- details

    def _go_on(self, sync: Sync, folder: Path) -> None:
        """From every worker's own state; what is wrong with one worker's is raised on all."""
        checkpoints = self._checkpoints(sync, folder)
        group, device, now = sync.subject.group, sync.subject.device, sync.num_workers

        def look() -> tuple[int, int] | None:
            path = folder / worker_file(sync.rank)
            if not path.is_file():
                return None
            tree = packing.read(path)
            return tree["num_workers"], tree["sync"]["attempts"]

        found, error = try_together(look, group, device)
        if error is not None:
            raise CheckpointError(f"{folder}: {error}")
        if found[0] is None:
            raise CheckpointError(f"{folder}: was not saved with CoCoDCallback; resume without it, or start a new run")
        saved, _ = found[0]
        if saved != now:
            if sync.rank == 0:
                logger.warning("%s was saved by %d workers, not %d; all resume from their mean", folder, saved, now)
            return
        if len(set(found)) > 1:
            raise CheckpointError(f"{folder}: holds workers' states of different steps; resume from another checkpoint")
        _, error = try_together(lambda: checkpoints.read_worker(folder), group, device)
        if error is not None:
            raise CheckpointError(f"{folder}: {error}")

    def _checkpoints(self, sync: Sync, folder: str | Path) -> Checkpoints:
        return Checkpoints(folder, sync, scaler=getattr(self._trainer.accelerator, "scaler", None))

    def _settle(self, trainer: Trainer) -> None:
        """Set what would make workers meet in every step, and say so."""
        args = trainer.args
        if args.average_tokens_across_devices:
            args.average_tokens_across_devices = False
            self._say("average_tokens_across_devices=False: each worker scales its loss by its own tokens")
        if args.include_num_input_tokens_seen != "no":
            args.include_num_input_tokens_seen = "no"
            self._say("include_num_input_tokens_seen=no: tokens would be counted over all workers in every step")
        handler = trainer.accelerator.ddp_handler
        if self._inner is not None and handler is not None and handler.find_unused_parameters:
            args.ddp_find_unused_parameters = handler.find_unused_parameters = False
            self._say("ddp_find_unused_parameters=False: with nodes, all workers would be asked in every step")
        loading = trainer.accelerator.dataloader_config
        if isinstance(trainer.train_dataset, IterableDataset) and loading.dispatch_batches is not False:
            loading.dispatch_batches = False
            self._say("dispatch_batches=False: each worker reads its own batches, instead of waiting for worker 0's")

    def _say(self, what: str) -> None:
        if self._trainer.args.process_index == 0:
            logger.warning("CoCoDCallback sets %s", what)


def _around(method: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        return around(method, *args, **named)

    return call
