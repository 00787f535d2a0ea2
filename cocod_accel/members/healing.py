"""From one worker's memory to another's: what a worker that comes later must know.

Both sides prove that they know the token before anything is sent; the token itself never travels. What travels is JSON and
tensors, nothing is unpickled. It is not encrypted, like the averages themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cocod_accel.comm.regroup import split_address
from cocod_accel.comm.trees import pack, unpack

_NONCE, _MOST_REQUEST = 32, 4096
_HANDSHAKE_SECONDS = 5.0
_PIECE = 1 << 20


class HealingError(RuntimeError):
    """The other worker did not hand over what was asked for."""


def proof(token: str, *what: str | bytes) -> str:
    """That whoever says this knows the token."""
    parts = [part.encode() if isinstance(part, str) else part for part in what]
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest()


def is_proof(given: object, token: str, *what: str | bytes) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(token, *what).encode())


def to_bytes(tree: Any) -> bytes:
    """Raises a TypeError for what cannot travel."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    skeleton = json.dumps(pack(tree, tensors))
    own = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    body = save(own)
    return len(skeleton.encode()).to_bytes(8, "big") + skeleton.encode() + body


def of_bytes(data: bytes) -> Any:
    from safetensors.torch import load

    end = 8 + int.from_bytes(data[:8], "big")
    return unpack(json.loads(data[8:end]), load(data[end:]).__getitem__)


class Donor:
    """Answers other workers' questions, on one address; ``answer`` is called by threads of its own."""

    def __init__(self, host: str, token: str, answer: Callable[[str], bytes | None]) -> None:
        self._token, self._answer = token, answer
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
        )
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="members-donor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        with contextlib.suppress(OSError):  # wakes accept() up
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(1.0)

    def _serve(self) -> None:
        while not self._is_over:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), name="members-donor", daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection:
            connection.settimeout(_HANDSHAKE_SECONDS)
            ours = secrets.token_bytes(_NONCE)
            connection.sendall(ours)
            theirs = _receive(connection, _NONCE)
            length = int.from_bytes(_receive(connection, 8), "big")
            if length > _MOST_REQUEST:
                return
            request = json.loads(_receive(connection, length))
            what = str(request.get("what"))
            if not is_proof(request.get("proof"), self._token, "asks", ours, theirs, what):
                return  # a stranger is told nothing
            connection.settimeout(None)
            found = self._answer(what)
            own = proof(self._token, "answers", ours, theirs, what)
            head = json.dumps({"proof": own, "length": -1 if found is None else len(found)}).encode()
            connection.settimeout(_HANDSHAKE_SECONDS)
            connection.sendall(len(head).to_bytes(8, "big") + head)
            for start in range(0, 0 if found is None else len(found), _PIECE):
                assert found is not None
                connection.sendall(found[start : start + _PIECE])


def fetch(address: str, token: str, what: str, seconds: float) -> Any:
    """What another worker has to hand over; raises a :class:`HealingError`."""
    try:
        with socket.create_connection(split_address(address), timeout=seconds) as connection:
            connection.settimeout(seconds)
            theirs = _receive(connection, _NONCE)
            ours = secrets.token_bytes(_NONCE)
            request = json.dumps({"what": what, "proof": proof(token, "asks", theirs, ours, what)}).encode()
            connection.sendall(ours + len(request).to_bytes(8, "big") + request)
            head = json.loads(_receive(connection, min(_MOST_REQUEST, int.from_bytes(_receive(connection, 8), "big"))))
            if not is_proof(head.get("proof"), token, "answers", theirs, ours, what):
                raise HealingError(f"the worker at {address} does not know the token")
            if head["length"] < 0:
                raise HealingError(f"the worker at {address} has no {what}")
            return of_bytes(_receive(connection, head["length"]))
    except (OSError, ValueError, KeyError) as error:
        raise HealingError(f"the worker at {address} did not hand over {what}: {error}") from error


def _receive(connection: socket.socket, length: int) -> bytes:
    room = bytearray(length)
    view, have = memoryview(room), 0
    while have < length:
        got = connection.recv_into(view[have:], min(_PIECE, length - have))
        if got == 0:
            raise OSError("the connection was closed")
        have += got
    return bytes(room)
