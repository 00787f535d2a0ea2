"""What ``cocod compare`` reads and writes: run folders in; tables, figures and the page out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cocod_accel.extras import missing
from cocod_accel.report.curves import scaling
from cocod_accel.report.groups import Comparison, base_label
from cocod_accel.report.page import render
from cocod_accel.report.tables import markdown, results_csv, runs_csv
from cocod_accel.runs.reading import Run, find_runs, read_run
from cocod_accel.runs.spans import Span, first_spans

#: Of all runs together; each keeps its share, evenly spread.
_MOST_ROWS = 150_000
#: Timelines in the page, and spans of all of them together.
_MOST_TIMELINES, _MOST_SPANS = 24, 1_000_000


def collect(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs in some folders, each once, and one line for each that cannot be compared."""
    found: dict[Path, Path] = {}
    places: list[Path | str] = []
    for folder in folders:
        try:
            for path in find_runs(folder):
                if found.setdefault(path.resolve(), path) is path:
                    places.append(path)
        except (OSError, ValueError) as error:
            places.append(_said(error))
    runs: list[Run] = []
    problems: list[str] = []
    for place in places:
        if isinstance(place, str):
            problems.append(place)
            continue
        try:
            runs.append(read_run(place, _MOST_ROWS // len(found)))
        except (OSError, ValueError) as error:
            problems.append(_said(error))
    return runs, problems


def _said(error: OSError | ValueError) -> str:
    return f"{error.filename}: cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)


def spans_of(comparison: Comparison) -> tuple[dict[str, list[Span]], list[str]]:
    """The spans of the first run of each group that recorded any; and what of them is left out, in words."""
    found: dict[str, list[Span]] = {}
    notes: list[str] = []
    most = _MOST_SPANS // min(len(comparison.groups), _MOST_TIMELINES)
    for group in comparison.groups:
        if len(found) == _MOST_TIMELINES:
            notes.append(f"timelines are those of the first {_MOST_TIMELINES} rows; cocod trace writes all spans of a run")
            break
        try:
            rows, is_cut = first_spans(group.first.source, most)
        except (OSError, ValueError) as error:
            notes.append(f"{group.label}: {_said(error)}")
            continue
        if rows:
            found[group.label] = rows
        if is_cut:
            end = rows[-1].end if rows else 0.0
            notes.append(f"{group.label}: its timeline is that of the first {end:.1f} s; cocod trace writes all of it")
    return found, notes


def write_all(comparison: Comparison, out: Path) -> list[Path]:
    """Tables, the page, and figures if there is a matplotlib to draw them."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out={out}: cannot be created ({error.strerror}); give a folder") from error
    baseline = next((g for g in comparison.groups if g.label == comparison.groups[0].baseline), comparison.groups[0])
    growth = scaling(comparison.groups, base_label(baseline.first))
    spans, left_out = spans_of(comparison)
    comparison = replace(comparison, notes=[*comparison.notes, *left_out])
    texts = {
        "results.md": markdown(comparison),
        "results.csv": results_csv(comparison),
        "runs.csv": runs_csv(comparison),
        "report.html": render(comparison, growth, spans),
    }
    try:
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
        figures: list[Path] = []
        if missing("matplotlib", "report") is None:
            from cocod_accel.report.figures import draw_figures, save_figures

            figures = save_figures(draw_figures(comparison, growth, spans), out)
    except OSError as error:
        raise ValueError(f"--out={out}: cannot be written ({error.strerror})") from error
    return [*(out / name for name in texts), *figures]
