"""Colours, dashes and markers, the same in pictures and on the page.

The palette is Okabe and Ito's, which colour-blind readers can tell apart; dashes and markers repeat the distinction,
for print and for more groups than colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cocod_accel.report.groups import Group
from cocod_accel.runs.spans import CHECKPOINT, COMMUNICATE, COMPUTE, STRETCH, WAIT

#: In figures on white; the page replaces black with white in dark mode. Yellow is left out: it is invisible on white.
PALETTE = ("#000000", "#e69f00", "#56b4e9", "#d55e00", "#009e73", "#0072b2", "#cc79a7", "#7f7f7f")
#: Each algorithm keeps its colour in all comparisons.
_OWN_COLOUR = {"ssgd": 0, "pipe": 1, "local": 2, "cocod": 3, "asynlocal": 4, "diloco": 5, "streaming_diloco": 6, "asgd": 7}
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 2), (2, 2), (8, 2, 2, 2), (4, 1, 1, 1, 1, 1))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SPAN_COLOURS = {COMPUTE: "#009e73", COMMUNICATE: "#e69f00", WAIT: "#d55e00", STRETCH: "#a6dbc9", CHECKPOINT: "#7f7f7f"}


@dataclass(frozen=True)
class Style:
    colour: str
    dash: tuple[int, ...]
    marker: str


def styles(groups: Sequence[Group]) -> dict[str, Style]:
    """A style for each group's label."""
    return styles_of([group.label for group in groups])


def styles_of(labels: Sequence[str]) -> dict[str, Style]:
    """A style for each label: the colour of the algorithm it starts with if still free, else another free one."""
    free = list(range(len(PALETTE)))
    chosen: dict[str, int] = {}
    for label in labels:
        own = _OWN_COLOUR.get(label.split(" ")[0])
        if own in free:
            free.remove(own)
            chosen[label] = own
    for number, label in enumerate(label for label in labels if label not in chosen):
        chosen[label] = free.pop() if free else number % len(PALETTE)
    return {
        label: Style(PALETTE[chosen[label]], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)])
        for index, label in enumerate(labels)
    }
