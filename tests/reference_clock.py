"""A small cluster in plain Python, second by second: what the simulator's arrays must agree with.

Shares no code with the package. Every worker is a coroutine that says what it does next; the clock goes from event to event,
and everybody who computes does so at the rate that holds until the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

#: ("compute", seconds), ("join", number), ("wait", number), ("meet", seconds), ("mark",)
Deed = tuple[str, float]


@dataclass
class Setting:
    algorithm: str
    #: seconds[worker][step]
    seconds: Sequence[Sequence[float]]
    #: Of every worker: the length of each of its rounds, as many as are needed.
    rounds: Sequence[Sequence[int]]
    steps: Sequence[int]
    gradient_seconds: float = 0.0
    part_seconds: Sequence[float] = (0.0,)
    final_seconds: float = 0.0
    interference: float = 0.0
    #: What a worker computes before it joins the sum of a step's gradients, or of a part.
    coding_seconds: float = 0.0
    #: Steps after which a mean is merged, at most its round's; None: where its part is launched again.
    delay: int | None = None
    #: Workers next to each other that meet after every step, and for how long.
    node_size: int = 1
    inside_seconds: float = 0.0


@dataclass
class Worker:
    deeds: Iterator[Deed]
    #: What is left to compute, the transfer that is waited for, or neither: it has ended.
    left: float | None = None
    awaited: int | None = None
    blocked_seconds: float = 0.0
    #: How long the meeting takes for whose end it waits, from when the last of its node has come.
    meets: float | None = None
    #: When it came to each of them, and when that ended.
    meetings: list[tuple[float, float]] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    #: (transfer, when) in the order of joining; and from when to when it was blocked.
    joins: dict[int, float] = field(default_factory=dict)
    blocks: list[tuple[float, float]] = field(default_factory=list)


class Numbers:
    """The same number for the same transfer on all workers: they are numbered in the order in which each joins them."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count - 1


def script(setting: Setting, worker: int, length_of: dict[int, float]) -> Iterator[Deed]:
    """What a worker does, in the words of the algorithms' docstrings."""
    numbers, name = Numbers(), setting.algorithm
    fragments = len(setting.part_seconds)

    def joined(seconds: float) -> int:
        number = numbers.next()
        length_of[number] = seconds
        return number

    pending: dict[int, int] = {}
    due: dict[int, int] = {}
    rounds = iter(setting.rounds[worker])
    length, position = next(rounds), 0
    for step in range(setting.steps[worker]):
        yield "compute", setting.seconds[worker][step]
        position += 1
        if setting.node_size > 1:
            yield "meet", setting.inside_seconds
        if name in ("ssgd", "pipe") and setting.coding_seconds:
            yield "compute", setting.coding_seconds
        if name == "ssgd":
            number = joined(setting.gradient_seconds)
            yield "join", number
            yield "wait", number
        elif name == "pipe":
            number = joined(setting.gradient_seconds)
            yield "join", number
            if 0 in pending:
                yield "wait", pending[0]
            pending[0] = number
        else:
            if position == length:
                length, position = next(rounds), 0
            for part in [part for part, when in due.items() if when == step + 1]:
                yield "wait", pending.pop(part)
                del due[part]
            for part in [part for part in range(fragments) if (part * length) // fragments == position]:
                if part in pending:
                    yield "wait", pending[part]
                if setting.coding_seconds:
                    yield "compute", setting.coding_seconds
                if name in ("local", "asynlocal"):
                    number = joined(setting.part_seconds[part])
                    yield "join", number
                    yield "wait", number
                    continue
                pending[part] = joined(setting.part_seconds[part])
                if setting.delay is not None:
                    due[part] = step + 1 + min(setting.delay, length)
                yield "join", pending[part]
        yield "mark", 0.0
    for number in pending.values():
        yield "wait", number
    number = joined(setting.final_seconds)
    yield "join", number
    yield "wait", number


def play(setting: Setting) -> tuple[list[Worker], dict[int, float]]:
    """All workers after their last deed, and when every transfer ended."""
    length_of: dict[int, float] = {}
    count = len(setting.seconds)
    workers = [Worker(script(setting, index, length_of)) for index in range(count)]
    ended: dict[int, float] = {}
    queue: list[int] = []
    now, under_way, until = 0.0, None, float("inf")
    nodes = [workers[first : first + setting.node_size] for first in range(0, count, setting.node_size)]
    over = [float("inf")] * len(nodes)

    def go_on(worker: Worker) -> None:
        """Deeds that take no time, up to the next that does."""
        for deed, value in worker.deeds:
            if deed == "compute":
                worker.left = value
                return
            if deed == "join":
                number = int(value)
                worker.joins[number] = now
                if all(number in other.joins for other in workers):
                    queue.append(number)
            elif deed == "meet":
                worker.meets = value
                worker.meetings.append((now, now))
                node = next(index for index, members in enumerate(nodes) if any(worker is other for other in members))
                if all(other.meets is not None for other in nodes[node]):
                    over[node] = now + value
                return
            elif deed == "wait":
                worker.blocks.append((now, now))
                if int(value) not in ended:
                    worker.awaited = int(value)
                    return
            else:
                worker.marks.append(now)
        worker.left = worker.awaited = None

    for worker in workers:
        go_on(worker)
    while True:
        if under_way is None and queue:
            under_way = queue.pop(0)
            until = now + length_of[under_way]
        rate = 1.0 if under_way is None else 1 - setting.interference
        ends = [now + worker.left / rate for worker in workers if worker.left is not None]
        if not ends and under_way is None and min(over) == float("inf"):
            return workers, ended
        following = min([*ends, until, *over])
        for worker in workers:
            if worker.awaited is not None or worker.meets is not None:
                worker.blocked_seconds += following - now
        finished = [w for w in workers if w.left is not None and now + w.left / rate <= following]
        for worker in workers:
            if worker.left is not None:
                worker.left = max(0.0, worker.left - (following - now) * rate)
        now = following
        if under_way is not None and until <= now:
            ended[under_way] = now
            for worker in workers:
                if worker.awaited == under_way:
                    worker.awaited = None
                    worker.blocks[-1] = (worker.blocks[-1][0], now)
                    finished.append(worker)
            under_way, until = None, float("inf")
        for node, members in enumerate(nodes):
            if over[node] <= now:
                over[node] = float("inf")
                finished += members
                for worker in members:
                    worker.meets = None
                    worker.meetings[-1] = (worker.meetings[-1][0], now)
        for worker in finished:
            worker.left = None
            go_on(worker)


def hidden_seconds(worker: Worker, ended: dict[int, float]) -> float:
    """How long transfers that the worker had joined were on their way while it was not blocked."""
    total = 0.0
    for number, joined in worker.joins.items():
        end = ended[number]
        blocked = sum(max(0.0, min(end, b) - max(joined, a)) for a, b in worker.blocks)
        total += end - joined - blocked
    return total
