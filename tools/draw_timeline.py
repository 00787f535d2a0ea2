"""Draw what the workers of two runs did in a short window, from the spans of their run folders, as SVG.

python tools/draw_timeline.py RUN [RUN ...] --at 0.5 --seconds 0.6 > docs/images/timeline.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

COLOURS = {"compute": "#2e9e5b", "communicate": "#f2b134", "wait": "#d1495b"}
LABELS = {"compute": "computing", "communicate": "communicating", "wait": "blocked by communication"}
WIDTH, LEFT, BAR = 860, 130, 11


def spans_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for file in sorted(run.glob("spans/*.jsonl")) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--at", type=float, default=0.5, help="where in the run the window begins, as a share of it")
    parser.add_argument("--seconds", type=float, default=0.6, help="length of the window")
    options = parser.parse_args()
    scale = (WIDTH - LEFT - 10) / options.seconds
    shapes: list[str] = []
    y = 34
    for run in options.runs:
        summary = json.loads((run / "summary.json").read_text())
        rows = spans_of(run)
        begin = options.at * max(row["end"] for row in rows)
        shapes.append(f'<text x="8" y="{y + 24}" font-weight="bold">{summary["algorithm"]}</text>')
        for rank in range(int(summary["num_workers"])):
            shapes.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">worker {rank}</text>')
            for row in rows:
                start, end = max(row["start"] - begin, 0), min(row["end"] - begin, options.seconds)
                if row["rank"] != rank or start >= end or row["name"] not in COLOURS:
                    continue
                offset = 0 if row["name"] == "compute" else BAR + 1
                left, width = LEFT + start * scale, max((end - start) * scale - 0.6, 0.6)
                colour = COLOURS[str(row["name"])]
                shapes.append(f'<rect x="{left:.1f}" y="{y + offset}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            y += 2 * BAR + 8
        y += 14
    legend = "".join(
        f'<rect x="{LEFT + 190 * i}" y="10" width="12" height="12" fill="{colour}"/>'
        f'<text x="{LEFT + 18 + 190 * i}" y="20">{LABELS[name]}</text>'
        for i, (name, colour) in enumerate(COLOURS.items())
    )
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 14}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{legend}{"".join(shapes)}'
        f'<text x="{WIDTH - 10}" y="{y + 6}" text-anchor="end">{options.seconds:g} seconds</text></svg>'
    )


if __name__ == "__main__":
    main()
