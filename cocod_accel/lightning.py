"""CoCoD-SGD, or another algorithm, in a Lightning ``Trainer``; in Fabric, ``attach`` takes what ``setup`` returns.

    trainer = Trainer(strategy="ddp", callbacks=[CoCoDCallback(period=5)])
    trainer.fit(model, loader)

Needs lightning.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

from cocod_accel.extras import require

require("lightning", "lightning", "cocod_accel.lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from cocod_accel.algorithms import Algorithm, CoCoDSGD
from cocod_accel.algorithms.rounds import PeriodLike
from cocod_accel.sync.attach import attach
from cocod_accel.sync.sync import Sync


class CoCoDCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Attaches an algorithm when fitting begins, and gives every worker the mean model when it ends.

    Validation while fitting sees the averaged model, and so does whoever loads a checkpoint: Lightning writes worker 0's
    optimizer state only, so a run that is resumed from one continues from the mean on all workers. Every
    ``log_every_n_steps`` the trainer's loggers get ``comm_exposed_seconds``, ``comm_hidden_seconds``, ``drift`` and
    ``rounds``. After fitting ``callback.sync`` is still there to be asked: ``stats()``, ``plan()``.

    Args:
        period: steps a round of ``CoCoDSGD``, or "auto".
        algorithm: another algorithm, instead of ``period``.
        weight, inner: as for :func:`~cocod_accel.attach`.
    """

    def __init__(
        self,
        period: PeriodLike | Literal["auto"] | None = None,
        *,
        algorithm: Algorithm | None = None,
        weight: float = 1,
        inner: Any = None,
    ) -> None:
        if (period is None) == (algorithm is None):
            raise TypeError("pass either period=5, for CoCoDSGD, or algorithm=")
        self._algorithm = CoCoDSGD(period) if period is not None else algorithm
        self._weight, self._inner = weight, inner
        #: What ``attach`` returned; None before fitting. Detached after it.
        self.sync: Sync | None = None
        #: The same while it is attached.
        self._attached: Sync | None = None
        self._evaluation = ExitStack()

    # ---- events

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._algorithm is not None
        if not pl_module.automatic_optimization:
            raise ValueError(
                "automatic_optimization=False: steps are yours; attach to trainer.strategy.model in your own on_train_start"
            )
        model, optimizers = trainer.strategy.model, trainer.optimizers
        assert model is not None
        self.sync = attach(model, optimizers, self._algorithm, weight=self._weight, inner=self._inner)
        self.sync.reminder.is_quiet = True  # a checkpoint takes one worker's model, then on_save_checkpoint puts in the mean
        self._attached = self.sync

    def on_train_batch_end(self, trainer: Trainer, *others: Any) -> None:
        if self._attached is None or trainer.global_step % trainer.log_every_n_steps:
            return
        stats = self._attached.stats()
        figures = {
            "comm_exposed_seconds": stats.exposed_seconds, "comm_hidden_seconds": stats.hidden_seconds,
            "drift": stats.drift, "rounds": stats.rounds,
        }  # fmt: skip
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._attached is not None and trainer.state.fn == TrainerFn.FITTING:
            self._evaluation.enter_context(self._attached.averaged())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluation.close()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._attached is None or self._attached.is_averaged:
            return
        with self._attached.averaged():
            state = trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {
                name: value.clone() if hasattr(value, "clone") else value for name, value in state.items()
            }

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sync, self._attached = self._attached, None
        if sync is not None:
            sync.finish()
            sync.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._evaluation.close()
        sync, self._attached = self._attached, None
        if sync is not None:
            sync.__exit__(type(exception), exception, exception.__traceback__)  # nothing may wait for workers elsewhere
