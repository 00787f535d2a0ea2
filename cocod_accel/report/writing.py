"""What ``cocod compare`` reads and writes: run folders in; tables, figures and the page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cocod_accel.extras import missing
from cocod_accel.report.curves import scaling
from cocod_accel.report.groups import Comparison, base_label
from cocod_accel.report.page import render
from cocod_accel.report.tables import markdown, results_csv, runs_csv
from cocod_accel.runs.reading import Run, find_runs, read_run
from cocod_accel.runs.spans import Span, read_spans


def collect(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs in some folders, each once, and one line for each that cannot be compared."""
    runs: list[Run] = []
    problems: list[str] = []
    seen: set[Path] = set()
    for folder in folders:
        try:
            found = find_runs(folder)
        except (OSError, ValueError) as error:
            problems.append(_said(error))
            continue
        for path in found:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                runs.append(read_run(path))
            except (OSError, ValueError) as error:
                problems.append(_said(error))
    return runs, problems


def _said(error: OSError | ValueError) -> str:
    return f"{error.filename}: cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)


def spans_of(comparison: Comparison) -> dict[str, list[Span]]:
    """The spans of the first run of each group, if it recorded any."""
    found = {group.label: read_spans(group.first.source) for group in comparison.groups}
    return {label: rows for label, rows in found.items() if rows}


def write_all(comparison: Comparison, out: Path) -> list[Path]:
    """Tables, the page, and figures if there is a matplotlib to draw them."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out={out}: cannot be created ({error.strerror}); give a folder") from error
    baseline = next((g for g in comparison.groups if g.label == comparison.groups[0].baseline), comparison.groups[0])
    growth = scaling(comparison.groups, base_label(baseline.first))
    spans = spans_of(comparison)
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
