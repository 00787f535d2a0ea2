"""``report.html`` in a real headless Chromium, opened from the disk as a user would."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cocod_accel.report.curves import scaling
from cocod_accel.report.groups import compare
from cocod_accel.report.page import MOST_SPANS, embedded, middle, render, timeline
from cocod_accel.report.writing import spans_of
from cocod_accel.runs.reading import find_runs, read_run
from cocod_accel.runs.spans import Span
from tests.browser import CHROMIUM, Page, chromium
from tests.run_folders import write_run

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)")
HOSTILE = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=2</script>{{data}}&amp;'


def write_page(root: Path, target: float | None = None) -> Path:
    comparison = compare([read_run(folder) for folder in find_runs(root)], target)
    path = root / "report.html"
    path.write_text(render(comparison, scaling(comparison.groups), spans_of(comparison)[0]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """The browser, with nothing to complain about afterwards and nothing asked of a network."""
    browser.complaints.clear()
    browser.requests.clear()
    yield browser
    assert browser.complaints == []
    assert {url.split(":")[0] for url in browser.requests} <= {"file", "data"}
    assert all(url.startswith("data:") or url.endswith("report.html") for url in browser.requests)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    for seed, seconds in ((1, 4.0), (2, 5.0), (3, 6.0)):
        write_run(tmp_path, f"ssgd-{seed}", [0.6, 0.79, 0.80], seconds, ["algorithm.name=ssgd", f"seed={seed}"])
        write_run(tmp_path, f"cocod-{seed}", [0.6, 0.80, 0.81], seconds / 2, [f"seed={seed}"], exposed_seconds=0.1)
    write_run(tmp_path, "one", [0.8, 0.8, 0.8], 10.0, ["algorithm.name=ssgd", "cluster.num_workers=1"])
    write_run(tmp_path, "slow", [0.5, 0.6, 0.7], 9.0, ["algorithm.name=pipe", "emulate.slowdown=[1, 2]"])
    return write_page(tmp_path, 0.8)


def column(page: Page, table: str, number: int) -> list[str]:
    code = f"[...document.querySelectorAll('{table} tbody tr')].map(row => row.cells[{number}].textContent.trim())"
    return [str(text) for text in page.run(code)]


def centre(page: Page, figure: str) -> tuple[float, float]:
    box = page.run(
        f"(() => {{ const c = document.querySelector('#{figure} canvas'); c.scrollIntoView({{block: 'center'}});"
        "const b = c.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2] })()"
    )
    return float(box[0]), float(box[1])


def shown(page: Page, number: int) -> tuple[float, float]:
    low, high = page.run(f"[views[{number}].low, views[{number}].high]")
    return float(low), float(high)


RESULTS = "section[aria-labelledby=results] > .wide table"


@needs_chromium
def test_it_loads_and_its_values_equal_the_summaries(page: Page, small: Path) -> None:
    page.open(small)
    assert page.run("document.querySelector('h1').textContent").startswith("Comparison of cocod")
    assert "reaches 80% first" in page.run("document.querySelector('.answer').textContent")
    names = column(page, "#every", 0)
    rows = "[...document.querySelectorAll('#every tbody tr')]"
    values = page.run(f"{rows}.map(row => [...row.cells].map(cell => cell.dataset.value ?? null))")
    assert len(names) == 8
    for name, row in zip(names, values, strict=True):
        summary = json.loads((small.parent / name.split(" ")[0] / "summary.json").read_text())
        keys = (
            "best_accuracy",
            "final_accuracy",
            "train_seconds",
            "comm_bytes",
            "comm_exposed_seconds",
            "comm_hidden_seconds",
        )
        assert [float(value) for value in row[4:]] == [summary[key] for key in keys]
        reached = summary["time_to_accuracy"]["0.8"]
        assert (None if row[3] is None else float(row[3])) == reached
    # Emulated runs are marked wherever they stand.
    marked = page.run("[...document.querySelectorAll('.badge')].map(badge => badge.closest('tr').cells[0].textContent)")
    assert len(marked) == 2
    assert all("emulated" in text for text in marked)
    assert "[emulated]" in page.run("document.getElementById('legend').textContent")


@needs_chromium
def test_the_table_sorts_by_value_and_what_has_none_comes_last(page: Page, small: Path) -> None:
    page.open(small)
    header = page.run(f"[...document.querySelectorAll('{RESULTS} thead button')].map(b => b.textContent)")
    by_time = header.index("s to 80%")
    page.run(f"document.querySelectorAll('{RESULTS} thead button')[0].click()")
    names = column(page, RESULTS, 0)
    assert names == sorted(names, key=str.lower)
    assert column(page, RESULTS, by_time).index("never") == 1, "in the middle, so that its going to the end is seen"
    for expected in ("ascending", "descending"):
        page.run(f"document.querySelectorAll('{RESULTS} thead button')[{by_time}].click()")
        assert page.run(f"document.querySelectorAll('{RESULTS} thead th')[{by_time}].getAttribute('aria-sort')") == expected
        cells = column(page, RESULTS, by_time)
        assert cells[-1] == "never"
        times = [float(cell.split(" ")[0]) for cell in cells[:-1]]
        assert times == sorted(times, reverse=expected == "descending")
    # As numbers, not as words: 10.0 comes after 5.0.
    assert times == [15.0, 10.0, 5.0]


@needs_chromium
def test_runs_can_be_switched_off_and_on(page: Page, small: Path) -> None:
    page.open(small)
    labels = "views[0].series.filter(s => s.bold).map(s => s.group.label)"
    thin = "views[0].series.filter(s => !s.bold).length"
    before = page.run(labels)
    assert len(before) == 4
    assert page.run(thin) == 6
    page.run("document.querySelector('#legend input').click()")
    page.frames()
    assert page.run(labels) == before[1:]
    assert before[0] not in page.run("document.querySelector('#accuracy canvas').getAttribute('aria-label')")
    page.run("document.querySelector('#legend input').click()")
    assert page.run(labels) == before
    page.run("document.querySelector('#legend ul input').click()")  # one seed of the first row
    assert page.run("document.querySelector('#legend input').indeterminate")
    assert page.run("views[0].series.find(s => s.bold).label").endswith("mean of 2")
    # The mean is of those that are shown: seeds 2 and 3 of CoCoD-SGD take 2.5 and 3 s an epoch.
    assert page.run("views[0].series.find(s => s.bold).xs") == [2.75, 5.5, 8.25]
    page.run("document.getElementById('none').click()")
    page.frames()
    assert page.run("views[0].series.length + views[1].series.length") == 0
    page.run("document.getElementById('all').click(); document.getElementById('seeds').click()")
    assert (page.run(labels), page.run(thin)) == (before, 0)


@needs_chromium
def test_figures_zoom_by_wheel_drag_keys_and_buttons(page: Page, small: Path) -> None:
    page.open(small)
    x, y = centre(page, "accuracy")
    whole = shown(page, 0)
    assert whole == (0.0, 30.0)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    page.frames()
    assert shown(page, 0) == whole, "a wheel over a figure that was not chosen scrolls the page"
    x, y = centre(page, "accuracy")
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseReleased", x, y, button="left", clickCount=1)
    page.run("document.querySelector('#accuracy canvas').focus()")
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    page.frames()
    low, high = shown(page, 0)
    assert high - low == pytest.approx(30 / 1.35)
    assert low < 15 < high
    page.key("0", "0")
    assert shown(page, 0) == whole
    page.key("+", "+")
    page.key("ArrowRight")
    low, high = shown(page, 0)
    assert high - low == pytest.approx(30 / 1.35)
    assert low > 15 - 15 / 1.35
    page.run("document.querySelector('#accuracy [data-act=\"show the whole\"]').click()")
    assert shown(page, 0) == whole
    page.run("document.querySelector('#accuracy [data-act=\"zoom in\"]').click()")
    assert shown(page, 0) != whole
    page.key("Home")
    page.mouse("mousePressed", x - 100, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x, y, button="left", buttons=1)
    page.mouse("mouseMoved", x + 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x + 100, y, button="left", clickCount=1)
    low, high = shown(page, 0)
    assert (low + high) / 2 == pytest.approx(15, abs=1)
    assert high - low < 10
    centre(page, "timeline")
    page.run("document.querySelector('#timeline canvas').focus()")
    before = shown(page, -1 % page.run("views.length"))
    page.key("+", "+")
    after = shown(page, -1 % page.run("views.length"))
    assert after[1] - after[0] == pytest.approx((before[1] - before[0]) / 1.35)


@needs_chromium
def test_axes_can_be_time_epochs_or_bytes_linear_or_logarithmic(page: Page, small: Path) -> None:
    page.open(small)

    def choose(axis: str) -> None:
        page.run(
            f"(() => {{ const s = document.querySelector('#accuracy [data-role=x]'); s.value = '{axis}';"
            "s.dispatchEvent(new Event('change')) })()"
        )
        page.frames()

    choose("epoch")
    assert page.run("views[0].series.find(s => s.bold).xs") == [1, 2, 3]
    choose("bytes")
    assert page.run("views[0].series.find(s => s.bold).xs") == [0.01, 0.02, 0.03]
    choose("seconds")
    page.run("document.querySelector('#accuracy [data-role=log]').click()")
    page.frames()
    assert page.run("views[0].series.find(s => s.bold).xs") == pytest.approx([math.log10(x) for x in (2.5, 5.0, 7.5)])
    assert shown(page, 0)[1] == pytest.approx(math.log10(30))
    assert page.run("document.querySelector('#loss [data-role=y]').options.length") == 2


@needs_chromium
def test_points_are_read_out_by_mouse_and_by_keyboard(page: Page, small: Path) -> None:
    page.open(small)
    page.run("document.getElementById('seeds').click()")
    centre(page, "accuracy")
    place = page.run(
        "(() => { const v = views[0], s = v.series[0], b = v.canvas.getBoundingClientRect();"
        "return [b.left + v.toPixel(s.xs[1]), b.top + v.yPixel(s.ys[1])] })()"
    )
    page.mouse("mouseMoved", *place)
    page.frames()
    text = page.run("document.querySelector('#accuracy .tip').textContent")
    assert "80%" in text
    assert "after 5 s" in text
    page.run("document.querySelector('#accuracy canvas').focus()")
    page.key(".", ".")
    assert "after 7.5 s" in page.run("document.getElementById('live').textContent")
    page.key("ArrowDown")
    assert page.run("document.getElementById('live').textContent").splitlines()[0] == page.run("views[0].series[1].label")


@needs_chromium
def test_it_is_readable_in_the_dark_and_on_a_phone(page: Page, small: Path) -> None:
    page.open(small, width=390, height=844, dark=True)
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 27)"
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), "nothing sticks out"
    small_targets = page.run(
        "[...document.querySelectorAll('button')].filter(b => b.offsetParent && b.offsetHeight < 32).length"
    )
    assert small_targets == 0
    themes = []
    for _ in range(3):
        page.run("document.getElementById('theme').click()")
        themes.append(page.run("document.getElementById('theme').textContent"))
    assert themes == ["Theme: light", "Theme: dark", "Theme: automatic"]
    page.run("document.getElementById('theme').click()")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.run("localStorage.clear()")


@needs_chromium
def test_long_names_stay_on_a_phones_screen(page: Page, tmp_path: Path) -> None:
    for number in (1, 2):
        long = ["batch_size=9", f"algorithm.period=[[0, 1], [1, 5], [2, 6], [3, {number}]]"]
        write_run(tmp_path, f"{number}{'a_very_long_name_of_a_run' * 6}", [0.5, 0.6, 0.7, 0.8], overrides=long)
    page.open(write_page(tmp_path), width=390, height=844)
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), "nothing sticks out"


@needs_chromium
def test_everything_has_a_name_for_a_screen_reader(page: Page, small: Path) -> None:
    page.open(small)
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "checkbox", "combobox", "application", "table", "columnheader", "rowheader", "region"}

    def text(node: dict[str, Any], key: str) -> str:
        return str(node.get(key, {}).get("value", ""))

    unnamed = [
        text(n, "role") for n in nodes if not n.get("ignored") and text(n, "role") in wanted and not text(n, "name").strip()
    ]
    assert unnamed == []
    assert sum(text(node, "role") == "application" for node in nodes) == 4  # accuracy, loss, speedup, timeline


@needs_chromium
def test_a_run_cannot_put_code_into_the_page(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path, "a", overrides=["algorithm.name=ssgd"])
    folder = write_run(tmp_path, "b")
    folder.rename(tmp_path / "b2")
    runs = [read_run(tmp_path / "a"), read_run(tmp_path / "b2")]
    hostile = [
        type(run)(HOSTILE + run.name, run.source, {**run.config, "batch_size": HOSTILE}, run.rows, run.summary)
        for run in runs
    ]
    hostile.append(type(runs[0])(HOSTILE, runs[0].source, runs[0].config, runs[0].rows, runs[0].summary))
    comparison = compare(hostile)
    path = tmp_path / "report.html"
    path.write_text(render(comparison, scaling(comparison.groups), spans_of(comparison)[0]), encoding="utf-8")
    page.open(path)
    assert page.run("window.hacked === undefined")
    assert page.run("document.querySelectorAll('img').length") == 0
    assert HOSTILE in page.run(
        "document.getElementById('legend').textContent + document.querySelector('#every').textContent"
    )


@pytest.mark.alone
@needs_chromium
def test_20_runs_of_2000_rows_stay_fluid(page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(20):
        accuracies = [0.9 - 0.8 / (1 + epoch) for epoch in range(100)]
        write_run(tmp_path, f"run-{number}", accuracies, 3.0 + number / 10, [f"batch_size={8 + number}"], rows_per_epoch=19)
    path = write_page(tmp_path)
    assert sum(len((tmp_path / f"run-{number}/metrics.jsonl").read_text().splitlines()) for number in range(20)) >= 40_000
    start = time.perf_counter()
    page.open(path)
    loaded = time.perf_counter() - start
    page.run("document.querySelector('#loss [data-role=y]').value = 'step_loss'; views[1].rebuild()")
    page.frames()
    # From the act to the frame after the one in which it was drawn: what a user waits for.
    measured = {}
    for name, act in {
        "zoom": "views[1].zoom(1 / 1.35)",
        "move": "views[1].move(0.1)",
        "whole": "views[1].reset()",
        "hover": "views[1].point(400, 200)",
        "toggle": "document.querySelector('#legend input').click()",
        "axis": "(views[1].choose.x.value = 'seconds', views[1].rebuild())",
        "sort": "document.querySelector('table.sortable thead button').click()",
    }.items():
        code = f"const t = performance.now(); {act}; requestAnimationFrame(() => requestAnimationFrame("
        code = f"new Promise(done => {{ {code} () => done(performance.now() - t))) }})"
        measured[name] = sorted(page.run(code) for _ in range(7))[3]
    page.run("views[1].reset()")
    page.frames()
    # What is drawn is bounded by the pixels, not by the rows: at most four points a column.
    page.run(
        "(() => { const s = views[1].series.at(-1), n = 200000; s.xs = Array.from({length: n}, (_, i) => i / n);"
        "s.ys = s.xs.map((x, i) => Math.sin(i)); views[1].series = [s]; views[1].reset(); views[1].draw() })()"
    )
    assert 1000 < page.run("views[1].numDrawn") <= 4 * (page.run("views[1].plot.width") + 2)
    with capsys.disabled():
        print(
            f"\n  page of 20 x 2,000 rows: loaded in {1e3 * loaded:.0f} ms;",
            ", ".join(f"{k} {v:.1f} ms" for k, v in measured.items()),
        )
    assert max(measured.values()) < 1000, measured  # 100 ms is the aim; the bound is for a busy machine


def test_data_cannot_end_its_script_element_and_has_no_nan() -> None:
    text = embedded({"a": "</script><!--", "b": math.nan, "c": [1 / 3], "d": "&"})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><!--", "b": None, "c": [0.333333], "d": "&"}


def test_a_long_timeline_is_cut_to_its_middle_and_says_so() -> None:
    rows = [Span(i % 2, i // 2, "compute", i // 2 * 0.1, i // 2 * 0.1 + 0.09) for i in range(MOST_SPANS + 1000)]
    kept, is_cut = middle(rows, MOST_SPANS)
    assert (len(kept), is_cut) == (MOST_SPANS, True)
    made = timeline("x", rows)
    assert made["cut"] is not None
    assert sum(len(lists) for worker in made["workers"] for lists in worker["spans"].values()) == 3 * MOST_SPANS
    assert sum(share["compute_seconds"] for share in made["shares"]) == pytest.approx(0.09 * len(rows)), (
        "shares are of the whole"
    )
