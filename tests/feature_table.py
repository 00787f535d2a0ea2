"""The table in docs/features.md, generated from the tests themselves: python -m tests.feature_table.

A mark links to the line below the table that names its test; a reason why something is refused is a footnote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cocod_accel import ALGORITHMS
from tests import test_accelerate, test_deepspeed, test_features, test_fsdp, test_members, test_zero

#: Stands for an algorithm's name in the id of a test.
NAME = "NAME"


_SHARDED = "Gradients are reduced over all workers, and those of a sharded model are reduced inside its node"

_MEMBERS = "Averages of whoever is there are made of whole models, at the ends of rounds that are the same on all workers"


@dataclass(frozen=True)
class Row:
    """A feature, the test that proves it for each algorithm, and the algorithms that refuse it, with the reason."""

    feature: str
    test: str
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.feature.lower()).strip("-")


def rows() -> Iterator[Row]:
    for name, feature in test_features.FEATURES.items():
        yield Row(name, _id(test_features.test_it_equals_the_reference, f"{name}-{NAME}"), feature.refused)
    test = test_accelerate.test_an_accelerate_loop_equals_the_reference
    yield Row("gradient accumulation (`accelerator.accumulate`)", _id(test, f"{NAME}-{test_accelerate.MICRO_BATCHES}"))
    for mode in test_deepspeed.MODES:
        yield Row(f"DeepSpeed stage 0, {mode}", _id(test_deepspeed.test_an_engine_trains_like_ddp, f"{mode}-{NAME}"))
    refused = dict.fromkeys(("ssgd", "pipe"), _SHARDED)
    yield Row("FSDP2 inside a node", _id(test_fsdp.test_sharded_nodes_equal_the_serial_reference, NAME), refused)
    for stage in (1, 2, 3):
        engines = test_zero.test_engines_equal_the_serial_reference
        yield Row(f"DeepSpeed ZeRO {stage} inside a node", _id(engines, f"zero{stage} {NAME}"), refused)
    members = test_members.test_whoever_is_there_equals_the_reference
    yield Row("workers that come and go", _id(members, NAME), dict.fromkeys(test_members.REFUSED, _MEMBERS))


def _id(test: Callable[..., None], case: str) -> str:
    return f"tests/{Path(test.__code__.co_filename).name}::{test.__name__}[{case}]"


def table() -> str:
    """The marks, the reasons, and the tests."""
    found = list(rows())
    assert len({row.anchor for row in found}) == len(found), "two features with one anchor"
    reasons = list(dict.fromkeys(reason for row in found for reason in row.refused.values()))
    lines = [f"| feature | {' | '.join(ALGORITHMS)} |", "| --- |" + " :---: |" * len(ALGORITHMS)]
    for number, row in enumerate(found, 1):
        marks = (
            f"[✗][{number}] [^{reasons.index(row.refused[name]) + 1}]" if name in row.refused else f"[✓][{number}]"
            for name in ALGORITHMS
        )
        lines.append(f"| {row.feature} | {' | '.join(marks)} |")
    lines += ["", *(f"[{number}]: #{row.anchor}" for number, row in enumerate(found, 1))]
    lines += ["", *(f"[^{number}]: {reason}." for number, reason in enumerate(reasons, 1))]
    lines += ["", "## The tests", "", f'`{NAME}` stands for the name of a column. `pytest "ID"` runs one test.', ""]
    lines += [f'* <a id="{row.anchor}"></a>\n  {row.feature}:\n  `{row.test}`' for row in found]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
