"""What a worker says of itself when it asks who is there, and what follows from what all say: the same on each of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cocod_accel.averaging.header import Kind
from cocod_accel.members.engine import Present
from cocod_accel.members.healing import is_proof, proof

#: Waits for others to begin with; takes part; wants to.
NEW, MEMBER, JOINS = "new", "member", "joins"


@dataclass(frozen=True)
class Entry:
    """One worker, at one question."""

    name: str
    stage: str
    #: What it comes for, and after how many steps.
    kind: int
    at: int
    #: Rounds that it has merged, or was given: the age of what all workers have in common.
    merged: int
    weight: float
    #: The group that it is in and that has not failed; "": none.
    group: str = ""
    #: Where a group that it leads finds together, and where it answers others.
    store: str = ""
    donor: str = ""
    #: Whether what a worker that comes later needs is ready here.
    is_ready: bool = False
    #: Whether this is its last average.
    leaves: bool = False
    #: Counts its questions.
    serial: int = 0
    #: Of its parameters, before the first step.
    digest: str = ""
    #: Model, algorithm, options, release.
    about: dict[str, str] = field(default_factory=dict)

    def signed(self, token: str) -> dict[str, Any]:
        text = json.dumps(asdict(self))
        return {"entry": text, "proof": proof(token, "entry", self.name, text)}


@dataclass(frozen=True)
class Answer:
    """All who asked together: those who know the token, how many others, and whether any of those says that it trains."""

    entries: list[Entry]
    num_strangers: int
    are_strangers_training: bool

    @classmethod
    def of(cls, present: Sequence[Present], token: str) -> Answer:
        entries, are_strangers_training = [], False
        for other in sorted(present, key=lambda one: one.name):
            text = other.says.get("entry")
            if isinstance(text, str) and is_proof(other.says.get("proof"), token, "entry", other.name, text):
                entries.append(Entry(**json.loads(text)))
            else:
                are_strangers_training = are_strangers_training or f'"stage": "{MEMBER}"' in str(text)
        return cls(entries, len(present) - len(entries), are_strangers_training)

    def like(self, about: dict[str, str]) -> list[Entry]:
        """Those that train the same."""
        return [entry for entry in self.entries if entry.about == about]


@dataclass(frozen=True)
class Line:
    """The members that are at the same place, and those who join them there."""

    members: list[Entry]
    joiners: list[Entry]

    @property
    def everyone(self) -> list[Entry]:
        return sorted([*self.members, *self.joiners], key=lambda entry: entry.name)

    @property
    def merged(self) -> int:
        return max(entry.merged for entry in self.members)

    @property
    def donor(self) -> Entry:
        """Who hands over what others lack."""
        return min((entry for entry in self.members if entry.merged == self.merged), key=lambda entry: entry.name)


def line_at(entries: Sequence[Entry], kind: int, at: int) -> Line:
    """Who is there; joiners only if somebody is ready for them."""
    members = [entry for entry in entries if entry.stage == MEMBER and (entry.kind, entry.at) == (kind, at)]
    is_open = any(entry.is_ready for entry in members)
    return Line(members, [entry for entry in entries if entry.stage == JOINS] if is_open else [])


def ahead_of(entries: Sequence[Entry], kind: int, at: int) -> bool:
    """Whether other members are at a later state than all that are here, so that whoever is here has to join them."""

    def rank(key: tuple[int, int]) -> tuple[int, int, int, list[str]]:
        there = [entry for entry in entries if entry.stage == MEMBER and (entry.kind, entry.at) == key]
        names = [entry.name for entry in there]
        return -max(entry.merged for entry in there), -key[1], -len(there), sorted(names)

    keys = {(entry.kind, entry.at) for entry in entries if entry.stage == MEMBER and entry.kind == Kind.ROUND}
    return (kind, at) in keys and min(keys, key=rank) != (kind, at)


def open_line(entries: Sequence[Entry]) -> tuple[Line, Entry] | None:
    """Where somebody may join now, and who is ready for that."""
    ready = [entry for entry in entries if entry.stage == MEMBER and entry.is_ready]
    if not ready:
        return None
    best = min(ready, key=lambda entry: (-entry.merged, entry.name))
    return line_at(entries, best.kind, best.at), best
