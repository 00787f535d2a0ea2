"""Who is there: the thin interface to an engine of membership, and torchft's lighthouse behind it.

Of torchft only the lighthouse and its client are used, which are the same in 0.2.0 and in the nightlies. Its manager may
commit a round whose transfer has failed, listens on all interfaces, and unpickles what it is sent.
"""

from __future__ import annotations

import importlib
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from cocod_accel.extras import require

_HEARTBEAT_SECONDS = 0.2
_CONNECT_SECONDS = 2.0


class UnreachableError(RuntimeError):
    """The engine does not answer."""


class NoAnswerError(RuntimeError):
    """The engine answers, but it could not say in time who is there."""


@dataclass(frozen=True)
class Present:
    """One of those who asked together, and what it says of itself."""

    name: str
    says: dict[str, Any]


class Engine(Protocol):
    """What is needed of an engine of membership."""

    #: Seconds after which it no longer counts on whoever has gone.
    forgets_after: float

    @property
    def is_up(self) -> bool:
        """Whether it has answered lately."""

    def ask(self, says: dict[str, Any], seconds: float) -> list[Present]:
        """Wait for whoever else is alive to ask as well; all who ask together get the same list, in one order.

        Raises :class:`UnreachableError` or :class:`NoAnswerError`.
        """

    def close(self) -> None:
        """This worker is gone."""


class TorchftEngine:
    """A torchft lighthouse."""

    forgets_after = 6.0  # by default it waits 5 s for a heartbeat

    def __init__(self, address: str, name: str) -> None:
        require("torchft", "elastic", "members")
        os.environ.setdefault("RUST_LOG", "error")  # else it reports every question
        self._client_of: Any = importlib.import_module("torchft.coordination").LighthouseClient
        self.name, self._address = name, f"http://{address}"
        self._client: Any = None
        self.is_up = True
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="members-heartbeat", daemon=True)
        self._thread.start()

    def ask(self, says: dict[str, Any], seconds: float) -> list[Present]:
        if not self.is_up:  # trying would take as long as connecting may
            raise UnreachableError(f"cannot reach the lighthouse {self._address}")
        try:
            if self._client is None:
                self._client = self._connected()
            quorum = self._client.quorum(
                self.name,
                timedelta(seconds=seconds),
                address="",
                store_address="",
                step=0,
                world_size=1,
                shrink_only=False,
                data=says,
            )
        except TimeoutError as error:
            raise NoAnswerError(f"the lighthouse {self._address} did not answer within {seconds:g} s") from error
        except Exception as error:
            self._client = None
            if _is_deadline(error):
                raise NoAnswerError(f"the lighthouse {self._address} did not answer within {seconds:g} s") from error
            raise UnreachableError(f"cannot reach the lighthouse {self._address}") from error
        return [Present(member.replica_id, member.data or {}) for member in quorum.participants]

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(_CONNECT_SECONDS)

    def _connected(self) -> Any:
        return self._client_of(self._address, timedelta(seconds=_CONNECT_SECONDS))

    def _beat(self) -> None:
        client: Any = None
        while not self._is_over.wait(_HEARTBEAT_SECONDS):
            try:
                client = self._connected() if client is None else client
                client.heartbeat(self.name, timedelta(seconds=_CONNECT_SECONDS))
                self.is_up = True
            except Exception:  # it may be back a moment later
                client, self.is_up = None, False


def _is_deadline(error: Exception) -> bool:
    text = str(error).lower()
    return "deadline" in text or "timeout expired" in text or "cancelled" in text
