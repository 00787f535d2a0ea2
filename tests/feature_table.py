"""The table in docs/features.md, made from the tests themselves: python -m tests.feature_table."""

from __future__ import annotations

from collections.abc import Iterator

from cocod_accel import ALGORITHMS
from tests import test_accelerate, test_deepspeed, test_features


def rows() -> Iterator[tuple[str, dict[str, str]]]:
    """A feature, and the cell of every algorithm."""
    for feature_name, feature in test_features.FEATURES.items():
        yield (
            feature_name,
            {name: feature.refused.get(name) or f"`F[{feature_name}-{name}]`" for name in ALGORITHMS},
        )
    micro_batches = test_accelerate.MICRO_BATCHES
    yield "gradient accumulation (`accelerator.accumulate`)", {n: f"`A[{n}-{micro_batches}]`" for n in ALGORITHMS}
    for mode in test_deepspeed.MODES:
        yield f"DeepSpeed stage 0, {mode}", {name: f"`D[{mode}-{name}]`" for name in ALGORITHMS}


def table() -> str:
    lines = [f"| feature | {' | '.join(ALGORITHMS)} |", "| --- " * (1 + len(ALGORITHMS)) + "|"]
    for feature_name, cells in rows():
        shown = (cell if cell.startswith("`") else f"refused: {cell}" for cell in cells.values())
        lines.append(f"| {feature_name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
