"""A loop's model, optimizers and rounds among workers that come and go."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cocod_accel.algorithms import Algorithm, CoCoDSGD, LocalSGD
from cocod_accel.averaging.flat import copied
from cocod_accel.comm.groups import default_group
from cocod_accel.comm.trees import pack
from cocod_accel.extras import require
from cocod_accel.members.entries import Entry
from cocod_accel.members.healing import fetch, to_bytes
from cocod_accel.members.part import MembersEvaluation, MembersPart
from cocod_accel.members.session import Gathering, Presence, Session
from cocod_accel.members.settings import Members
from cocod_accel.sync.driver import Driver
from cocod_accel.sync.preflight import Subject, digest_of


def check_members(members: object, subject: Subject, algorithm: Algorithm, inner: Any) -> None:
    """Refuse what does not work with members, before anything waits."""
    if not isinstance(members, Members):
        raise TypeError(f'members={members!r} is not a Members; pass e.g. Members(lighthouse="127.0.0.1:29510", token=...)')
    if default_group() is not None:
        raise ValueError(
            f"members: each worker is one process of its own, but {dist.get_world_size()} are connected by a process group; "
            "start each without a launcher"
        )
    refused = {
        f"algorithm {algorithm.name}": not isinstance(algorithm, LocalSGD | CoCoDSGD) or not algorithm.same_period,
        "mix": algorithm.mix is not None,
        'period="auto"': algorithm.auto_period,
        f"fragments={algorithm.fragments}": algorithm.fragments > 1,
        'optimizer_state="average"': algorithm.optimizer_state == "average",
        "inner": inner is not None,
        "offload": subject.offloads,
        "a DeepSpeed engine": subject.engine is not None,
        "a sharded model": subject.shards is not None,
        f"a model on {subject.device}": subject.device.type != "cpu",
    }
    for what, is_asked in refused.items():
        if is_asked:
            fix = "use LocalSGD or CoCoDSGD" if what.startswith(("algorithm", "mix")) else (
                "move it to the CPU" if what.startswith("a model on") else "leave it out"
            )  # fmt: skip
            raise ValueError(f"{what} does not work with members; {fix}")
    for optimizer in subject.optimizers:
        pack(optimizer.state_dict(), {})  # raises a TypeError
    require("torchft", "elastic", "members")


class Membership:
    """Ties a session to what is trained. Once :meth:`bind` was called."""

    def __init__(self, members: Members, subject: Subject, algorithm: Algorithm, weight: float) -> None:
        self._members, self._subject = members, subject
        about = {
            "cocod_accel": str(getattr(sys.modules["cocod_accel"], "__version__", "")),
            "algorithm": algorithm.name,
            "period": algorithm.stated_period,
            **{name: str(getattr(algorithm, name)) for name in algorithm.options},
            "model": subject.signature,
            "frozen parameters": digest_of(subject.frozen),
        }
        self.session = Session(members, about, weight, self._answer)
        self._staged: tuple[int, Any] | None = None

    # ---- in the place of the classes of averaging

    def part(self, *args: Any, **options: Any) -> MembersPart:
        return MembersPart(*args, session=self.session, at=self._attempts, **options)

    def evaluation(self, *args: Any) -> MembersEvaluation:
        return MembersEvaluation(*args, session=self.session, at=self._attempts)

    # ---- at the start, and when this worker has been left behind

    def bind(self, driver: Driver) -> None:
        """Meet the others, and begin with them or get the model of those who are there."""
        self._driver = driver
        part = driver.replica.parts[0]
        assert isinstance(part, MembersPart)
        self._part = part
        part.prepare = self._prepare
        if part.point is not None:
            self.session.catch_up = self._catch_up
        equal = self.session.begin(digest_of(self._subject.trainable))
        if equal is None:
            self._join()
        else:
            driver.start(equal=equal)

    # ---- what a loop calls

    def presence(self) -> Presence:
        """Who made the last mean that this worker has merged, and what has happened so far."""
        return self.session.presence()

    def leave(self) -> None:
        """Leave at the end of this round: this worker's steps go into its mean, and nobody waits for it afterwards.

        May be called by a signal handler. The loop goes on until :attr:`has_left`.
        """
        self.session.is_leaving = True

    @property
    def has_left(self) -> bool:
        """Whether this worker has taken part for the last time; its loop may end."""
        return self.session.has_left

    # ---- details

    def close(self, *, wait: bool = True) -> None:
        self._staged = None
        self.session.close(wait=wait)

    def _join(self) -> None:
        if self.session.join(self._take_part) is None and not self._driver.clock.attempts:
            self._driver.start(equal=True)

    def _take_part(self, gathering: Gathering, state: Any) -> None:
        method, replica = self._driver.method, self._driver.replica
        extras = replica.extras_unasked(with_buffers=method.sends_buffers)
        self._part.take_part(gathering, extras, None if state is None else lambda: self._apply(state))

    # ---- what travels from worker to worker

    def _prepare(self) -> bool | None:
        if self.session.is_behind:
            self._join()
            return None
        is_asked, self.session.is_asked = self.session.is_asked, False
        self._staged = (self._attempts(), copied(self._state())) if is_asked else None
        return is_asked

    def _state(self) -> dict[str, Any]:
        """What a worker that comes later needs, beside the mean and the common point."""
        is_donor = self._members.optimizer_state == "donor"
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._subject.optimizers] if is_donor else [],
            "buffers": {name: self._subject.module.get_buffer(name) for name in self._subject.buffer_shapes},
            "attempts": self._driver.clock.attempts,
            "rounds": self._driver.clock.rounds,
            "carried": {name: value.state_dict() for name, value in self._members.carried.items()},
        }

    @torch.no_grad()
    def _apply(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self._subject.optimizers, state["optimizers"], strict=False):
            optimizer.load_state_dict(saved)
        if not state["optimizers"]:
            for optimizer in self._subject.optimizers:
                optimizer.state.clear()
        for name, value in state["buffers"].items():
            buffer: Tensor = self._subject.module.get_buffer(name)
            buffer.copy_(value)
        for name, held in self._members.carried.items():
            if name in state["carried"]:
                held.load_state_dict(state["carried"][name])
        clock = self._driver.clock
        clock.attempts, clock.rounds = state["attempts"], state["rounds"]
        clock.restart()

    def _answer(self, what: str) -> bytes | None:
        """Called by threads that other workers talk to."""
        name, _, number = what.partition(" ")
        staged = self._staged
        if name == "state" and staged is not None and number == str(staged[0]):
            return to_bytes(staged[1])
        if name == "common" and number == str(self.session.merged):
            return to_bytes(self._part.common())
        return None

    def _catch_up(self, other: Entry) -> None:
        state = fetch(other.donor, self._members.token, f"common {other.merged}", self._members.timeout)
        self._part.set_common_point(state)

    def _attempts(self) -> int:
        return self._driver.clock.attempts
