"""The part ``language``: what each method gives up on a language model at equal tokens, and what it sends for that.

A small GPT over bytes, 8 workers with AdamW, shards of the same distribution or dealt by source. Every method is run with
each of three learning rates on the first seed, and with the best of them on the other seeds. Which one that is, rows say:
:func:`wanted` leaves out the cells of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cocod_accel.reproduce.grid import CONFIGS, Cell, Scale
from cocod_accel.reproduce.intervals import Interval
from cocod_accel.reproduce.learning import PAPER, RECOMMENDED, S_SGD, Method, difference
from cocod_accel.reproduce.tables import Grid, mean_of, spread
from cocod_accel.runs.tables import aligned

PART = "language"
MODEL = "gpt"
WORKERS = 8


def _diloco(period: int) -> Method:
    return Method(f"DiLoCo k={period}", "diloco", (f"algorithm.period={period}",))


#: Data parallel and what is recommended first: a part of the grid then says most.
METHODS = (
    S_SGD,
    RECOMMENDED,
    PAPER,
    Method("CoCoD-SGD k=1", "cocod", ("algorithm.period=1",)),
    _diloco(15),
    _diloco(50),
    Method("S-SGD int4", "ssgd", ("algorithm.payload=int4",)),
    Method("Local-SGD k=5", "local", ("algorithm.period=5",)),
    Method("StreamingDiLoCo k=15 p=3", "streaming_diloco", ("algorithm.period=15", "algorithm.fragments=3")),
    # Eager updates (Kale et al. 2025): an Nth of a worker's own progress before the mean of all has come.
    Method("Streaming, eager k=15 p=3", "cocod", (
        "algorithm.period=15", "algorithm.fragments=3", f"algorithm.own_share={1 / WORKERS:g}",
        "algorithm.outer={rate: 0.7, momentum: 0.9, nesterov: true}",
    )),
)  # fmt: skip
#: How the text is dealt to the workers.
DEALS = {"iid": (), "by source": ("task.label_skew=0",)}
#: AdamW's, not scaled with the number of workers.
RATES = (0.004, 0.008, 0.016)
#: Bits per byte that the recommended setting may be worse than data parallel.
MARGINS = {"iid": 0.03, "by source": 0.05}
#: For a look at whether everything runs: a model of nothing for an instant.
_SMOKE = (
    "task.args.length=16", "task.test_limit=32", "model.args={layers: 1, width: 16, heads: 2}", "schedule.steps=12",
    "schedule.warmup_steps=2", "evaluation.every_steps=6", "evaluation.targets=[8.5]",
)  # fmt: skip


def cells(scale: Scale) -> Iterator[Cell]:
    """All that may be wanted; nothing at full scale, where the paper's own settings are run."""
    if scale.name == "full":
        return
    is_smoke = scale.name == "smoke"
    for deal in DEALS:
        for method in METHODS[:3] if is_smoke else METHODS:
            for rate in RATES[:2] if is_smoke else RATES:
                for seed in scale.seeds:
                    yield _cell(method, deal, rate, seed, _SMOKE if is_smoke else ())


def _cell(method: Method, deal: str, rate: float, seed: int, more: Sequence[str]) -> Cell:
    given = (
        str(CONFIGS / "reproduce" / "language.yaml"), f"algorithm.name={method.variant}", *method.options, f"seed={seed}",
        f"optimizer.learning_rate={rate:g}", *DEALS[deal], *more,
    )  # fmt: skip
    return Cell(PART, MODEL, method.variant, _setting(method, deal, rate), WORKERS, seed, given, "paper")


def _setting(method: Method, deal: str, rate: float) -> str:
    return f"{_named(method)} {deal} rate={rate:g}".strip()


def _named(method: Method) -> str:
    return method.label.partition(" ")[2]


def wanted(given: Sequence[Cell], rows: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
    """Without the cells of later seeds whose rate is not, or is not yet known to be, the best on the first seed."""
    first = min((cell.seed for cell in given), default=0)
    found: dict[tuple[str, str], dict[float, Mapping[str, Any] | None]] = {}
    for cell in given:
        if cell.part == PART and cell.seed == first:
            method, rate = _split(cell)
            found.setdefault(method, {})[rate] = rows.get(cell.name)
    best = {}
    for method, by_rate in found.items():
        ran = {rate: row for rate, row in by_rate.items() if row is not None}
        if len(ran) == len(by_rate):
            best[method] = min(ran, key=lambda rate: _bits(ran[rate]))
    return [c for c in given if c.part != PART or c.seed == first or best.get(_split(c)[0]) == _split(c)[1]]


def _split(cell: Cell) -> tuple[tuple[str, str], float]:
    """Which method with which data, and its rate."""
    where, _, rate = cell.setting.partition("rate=")
    return (cell.variant, where), float(rate)


def _bits(row: Mapping[str, Any]) -> float:
    """At the end; a run that diverged is worse than all others."""
    return math.inf if "failed" in row else float(row["final_bits_per_byte"])


# ------------------------------------------------------------------------------------------------------------ tables


def table(grid: Grid) -> str:
    """What each method reaches with its best rate and sends, and the difference to S-SGD, paired by seed."""
    if not any(cell.part == PART and cell.name in grid.rows for cell in grid.cells):
        return ""
    rates = sorted({_split(cell)[1] for cell in grid.cells if cell.part == PART})
    tried = [f"seed 0: rate {rates[0]:g}", *(f"{rate:g}" for rate in rates[1:])]
    header = ["bits per byte", "", *tried, "n", "reached", "minus S-SGD, paired by seed (95%)", "bytes a step"]
    body: list[list[str]] = []
    verdicts = []
    for deal in DEALS:
        found = {method: _by_rate(grid, method, deal, rates) for method in METHODS}
        best = {method: _best(by_rate) for method, by_rate in found.items() if by_rate}
        if not best:
            continue
        base = best.get(S_SGD, {})
        lines = [_line(found[method], rates, rows, base) for method, rows in best.items()]
        for method, line in zip(best, lines, strict=True):
            body.append([deal, method.label, *line])
        verdicts += _verdict(deal, best.get(RECOMMENDED, {}), base)
    return "\n".join([aligned([header, *body]), *verdicts])


def best_cells(grid: Grid) -> dict[str, list[Cell]]:
    """For each way of dealing the text: the cells that have run, of every method those with its best rate."""
    rates = sorted({_split(cell)[1] for cell in grid.cells if cell.part == PART})
    found: dict[str, list[Cell]] = {}
    for deal in DEALS:
        settings = set()
        for method in METHODS:
            by_rate = _by_rate(grid, method, deal, rates)
            if by_rate:
                rate = min(by_rate, key=lambda rate: _first_bits(by_rate[rate]))
                settings.add((method.variant, _setting(method, deal, rate)))
        of_deal = [c for c in grid.cells if c.part == PART and (c.variant, c.setting) in settings and c.name in grid.rows]
        if of_deal:
            found[deal] = of_deal
    return found


def learnt_for_bytes(grid: Grid) -> dict[str, list[tuple[str, float, list[float]]]]:
    """For each way of dealing the text: each method, its bytes relative to S-SGD's, and what it reaches, by seed."""
    rates = sorted({_split(cell)[1] for cell in grid.cells if cell.part == PART})
    found: dict[str, list[tuple[str, float, list[float]]]] = {}
    for deal in DEALS:
        best = {m: _best(by_rate) for m in METHODS if (by_rate := _by_rate(grid, m, deal, rates))}
        full = mean_of(best.get(S_SGD, {}), "comm_bytes")
        for method, rows in best.items():
            sent, values = mean_of(rows, "comm_bytes"), list(_values(rows).values())
            if full is not None and sent is not None and values:
                found.setdefault(deal, []).append((method.label, sent / full, values))
    return found


_Rows = dict[int, dict[str, Any]]


def _by_rate(grid: Grid, method: Method, deal: str, rates: Sequence[float]) -> dict[float, _Rows]:
    found = {rate: grid.of(PART, MODEL, method.variant, _setting(method, deal, rate)) for rate in rates}
    return {rate: rows for rate, rows in found.items() if rows}


def _best(by_rate: Mapping[float, _Rows]) -> _Rows:
    """The rows of the rate that is best on the first seed."""
    return min(by_rate.values(), key=_first_bits)


def _first_bits(rows: _Rows) -> float:
    return _bits(rows[min(rows)])


def _values(rows: _Rows) -> dict[int, float]:
    return {seed: _bits(row) for seed, row in rows.items() if "failed" not in row}


def _line(by_rate: Mapping[float, _Rows], rates: Sequence[float], rows: _Rows, base: _Rows) -> list[str]:
    tried = [_tried(by_rate.get(rate)) for rate in rates]
    values, full, sent = _values(rows), mean_of(base, "comm_bytes"), mean_of(rows, "comm_bytes")
    share = "-" if full is None or sent is None else f"{sent / full:.4f}"
    lost = len(rows) - len(values)
    reached = spread(list(values.values()), 3) + (f" ({lost} diverged)" if lost else "")
    apart = "" if rows is base else difference(values, _values(base), 3)
    return [*tried, str(len(values)), reached, apart, share]


def _tried(rows: _Rows | None) -> str:
    if not rows:
        return "-"
    row = rows[min(rows)]
    return "diverged" if "failed" in row else f"{_bits(row):.3f}"


def _verdict(deal: str, ours: _Rows, theirs: _Rows) -> list[str]:
    interval = Interval.of(_values(ours), _values(theirs))
    if interval is None:
        return []
    margin = MARGINS[deal]
    says = f"a loss of more than {margin:g}" if interval.low > margin else "undecided"
    says = f"within {margin:g} of S-SGD" if interval.high <= margin else says
    return [f"{deal}: {RECOMMENDED.label} is {says}"]
