"""Run folders -> tables, figures, a page, a trace, a live view in the terminal.

    groups                 groups seeds of one configuration; time to accuracy, speedup and spread
    tables                 the results for a terminal, as Markdown and as CSV
    curves, look, figures  the paper's figures: data, styles, drawing
    markup, page           the results as one interactive page
    trace, watch           Chrome/Perfetto traces; the progress of a run
    writing                reads runs and writes everything into one folder

Nothing here is needed to train, and matplotlib is imported only when a figure is drawn.
"""

from __future__ import annotations

from cocod_accel.runs.reading import read_summary

__all__ = ["read_summary"]
