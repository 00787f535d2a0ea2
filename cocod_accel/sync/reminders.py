"""Says, once, when a program is about to lose the mean: workers hold different models in a local phase."""

from __future__ import annotations

import atexit
import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from cocod_accel.sync.driver import Driver

_SAVE = "use sync.mean_state_dict(), or save inside sync.averaged() or after sync.finish()"


class Reminder:
    """Of one attached model, which it does not keep alive. Only the first worker speaks: the others would say the same."""

    def __init__(self, module: nn.Module, driver: Driver, *, speaks: bool) -> None:
        method = driver.method
        self._clock, self._has_spoken = driver.clock, not speaks or method.reduces_gradients
        # Where buffers travel, too, models are equal once a blocking mean has been taken.
        self._is_level_between_rounds = method.sends_buffers and method.fragments == 1
        self._level_at = 0
        #: While somebody knows that this is one worker's own model.
        self.is_quiet = False
        self._hook: Any = module.register_state_dict_pre_hook(_StateHook(self._of_saving))
        _open.add(self)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, whoever asks the model for its ``state_dict()`` means this worker's own."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    def are_level(self) -> None:
        """All workers hold the same model now."""
        self._level_at = self._clock.attempts

    def of_detaching(self) -> None:
        """Unless an exception is under way: then it is no surprise."""
        if sys.exc_info()[0] is None:
            self._speak("detach() without finish() leaves every worker with a model of its own; call sync.finish() first")

    def of_ending(self) -> None:
        self._speak("the program ends without sync.finish(), so every worker has a model of its own")

    def remove(self) -> None:
        self._hook.remove()
        self._has_spoken = True
        _open.discard(self)

    # ---- details

    def _of_saving(self) -> None:
        if not self.is_quiet:
            self._speak(f"state_dict() in a local phase is this worker's own model, not the mean; {_SAVE}")

    def _speak(self, line: str) -> None:
        clock = self._clock
        is_level = clock.attempts == self._level_at or (self._is_level_between_rounds and clock.start == clock.attempts)
        if not self._has_spoken and not is_level:
            self._has_spoken = True
            warnings.warn(line, UserWarning, stacklevel=4)


_open: set[Reminder] = set()


@atexit.register
def _at_exit() -> None:
    if getattr(sys, "last_value", None) is None:  # else something else has gone wrong, and is on the screen already
        for reminder in list(_open):
            reminder.of_ending()


class _StateHook(functools.partial[None]):
    """A hook that is left behind when the module it hangs on is copied or saved."""

    def __call__(self, *args: Any) -> None:
        self.func()

    def __reduce__(self) -> tuple[Any, ...]:
        return _StateHook, (_nothing,)

    def __deepcopy__(self, memo: Any) -> _StateHook:
        return _StateHook(_nothing)


def _nothing() -> None:
    pass
