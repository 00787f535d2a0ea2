"""Run folders -> tables, figures, a page, a trace, a view in the terminal.

    runs, wandb_files      what a run has left, from its folder or from wandb's offline files
    groups                 seeds of one configuration together; time to accuracy, speedup and spread
    tables                 the result in a terminal, as Markdown and as CSV
    spans                  who computed, communicated and waited when
    figures, page          the paper's figures as pictures, and as one interactive page
    trace, watch, writing  Chrome/Perfetto files; a run that is still running; everything into one folder

Nothing here is needed to train, and matplotlib is imported only when a figure is drawn.
"""

from __future__ import annotations

from cocod_accel.runs.reading import read_summary

__all__ = ["read_summary"]
