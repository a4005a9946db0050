"""The page in headless Chromium: drawn, quiet, readable on a phone, deaf to what run files would have it do."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oktopk.tools.race.output.page import build_page as build_race_page
from oktopk.tools.report import build_report, read_run
from oktopk.tools.report.csv_tables import chart_rows
from oktopk.tools.report.html.charts import make_charts
from oktopk.tools.report.html.live import Server
from oktopk.tools.report.html.page import build_page
from tests.support.report_runs import HOSTILE, write_run, write_steps
from tests.tools.race.test_summary import document

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium")
pytestmark = [
    pytest.mark.timeout(900),  # a browser on a busy machine
    pytest.mark.skipif(BROWSER is None and "CI" not in os.environ, reason="chromium is not installed"),
]
PATIENCE = 240_000
"""Milliseconds."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"], timeout=PATIENCE)
        yield started
        started.close()


class Visit:
    """A page that is being looked at, and what it has complained about or asked for."""

    def __init__(self, browser: Any, width: int, scheme: str = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, address: str) -> None:
        self.page.goto(address)
        self.page.locator(".chart").first.scroll_into_view_if_needed()  # charts are drawn when they come near
        self.page.wait_for_selector(".chart .main-svg")

    def draw_all(self) -> int:
        """How many charts there are; all sections are opened, and all of them are drawn."""
        self.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        self.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        places = "document.querySelectorAll('.chart')"
        self.until(f"[...{places}].every(place => place.querySelector('.main-svg'))")
        return int(self.page.evaluate(f"{places}.length"))

    def save(self, place: str, kind: str) -> str:
        """What a button of a chart saves."""
        with self.page.expect_download() as saved:
            self.page.locator(f"figure:has({place}) [data-do={kind}]").click()
        return Path(saved.value.path()).read_text(encoding="utf-8")

    def ask(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def until(self, expression: str) -> None:
        """page.wait_for_function would have the page evaluate a text, which its policy forbids."""
        deadline = time.monotonic() + PATIENCE / 1000
        while not self.ask(expression):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(100)


def write_page(folder: Path, name: str = "run", **options: Any) -> str:
    write_run(folder / "run", **options)
    target = folder / "report.html"
    target.write_text(build_page(build_report([read_run(folder / "run", name)])), encoding="utf-8")
    return target.as_uri()


def test_it_is_drawn_without_a_word_or_a_request(browser: Any, tmp_path: Path) -> None:
    address = write_page(tmp_path, skipped={9: "rank 1: layer.weight"})
    visit = Visit(browser, 1400)
    visit.open(address)
    assert visit.draw_all() == 10
    assert visit.asked == [address]
    assert visit.said == []
    assert visit.ask("document.querySelectorAll('#r0-loss .scatterlayer .trace').length") >= 2
    assert visit.ask("document.querySelectorAll('#r0-messages-sparse .barlayer .trace').length") == 3
    place = visit.page.locator("#r0-time .nsewdrag").first
    place.scroll_into_view_if_needed()
    place.hover()
    visit.page.wait_for_selector("#r0-time .hoverlayer .legendtext, #r0-time .hoverlayer .legend text")
    hovered = visit.ask("document.querySelector('#r0-time .hoverlayer').textContent")
    assert "compute : 1,200 ms" in hovered.replace("\u2009", " "), hovered


def write_sweep(folder: Path) -> str:
    runs = {f"{name}-{seed}": {"algorithm": name, "seed": seed, "warmup": 24 if name == "dense" else 4}
            for name in ("dense", "oktopk") for seed in (0, 1)}  # fmt: skip
    found = [read_run(write_run(folder / name, **options), name) for name, options in runs.items()]
    (folder / "sweep.html").write_text(build_page(build_report(found)), encoding="utf-8")
    return (folder / "sweep.html").as_uri()


def write_race(folder: Path) -> str:
    (folder / "race.html").write_text(build_race_page(document()), encoding="utf-8")
    return (folder / "race.html").as_uri()


def write_own(folder: Path) -> str:
    """The report of a script that has a sink and no more."""
    path = write_run(folder / "own") / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines(keepends=True) if '"event":"train"' not in line]
    alone = folder / "alone"
    alone.mkdir()
    (alone / "metrics.jsonl").write_text("".join(lines))
    (folder / "own.html").write_text(build_page(build_report([read_run(alone, "own")])), encoding="utf-8")
    return (folder / "own.html").as_uri()


CLIPPED = """[...document.querySelectorAll('.scroll, .tile, .card, figure, summary, .head')].filter(
    one => one.scrollWidth > one.clientWidth + 1).map(one => one.outerHTML.slice(0, 200))"""
OVERLAPPING = """[...document.querySelectorAll('.tiles, .grid, main')].flatMap(parent => {
    const boxes = [...parent.children].map(one => one.getBoundingClientRect()).filter(box => box.height);
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1));
}).length"""


@pytest.mark.parametrize("write", [write_page, write_sweep, write_race, write_own])
def test_nothing_overlaps_or_leaves_its_place_on_a_phone(browser: Any, tmp_path: Path, write: Any) -> None:
    visit = Visit(browser, 400, "dark")
    visit.open(write(tmp_path))
    visit.draw_all()
    for width in (400, 1400):
        visit.page.set_viewport_size({"width": width, "height": 900})
        visit.page.wait_for_timeout(300)
        assert visit.ask("document.documentElement.scrollWidth") <= width
        assert visit.ask(CLIPPED) == []
        assert visit.ask(OVERLAPPING) == 0
        assert visit.ask("document.querySelectorAll('.modebar-container *').length") == 0
    visit.ask("scrollTo(0, 0)")
    first = visit.ask("document.querySelector('.tile').getBoundingClientRect().bottom")
    assert first < 400  # the headline is what one sees first
    assert visit.said == []


def test_every_chart_can_be_saved_with_its_points_and_as_a_picture(browser: Any, tmp_path: Path) -> None:
    address = write_page(tmp_path, skipped={9: "rank 1: w"})
    charts = make_charts(build_report([read_run(tmp_path / "run", "run")])["runs"][0])
    visit = Visit(browser, 1400, "dark")
    visit.open(address)
    assert visit.draw_all() == len(charts)
    for chart in charts:
        saved = visit.save(f"#r0-{chart.name}", "csv")
        rows = list(csv.reader(io.StringIO(saved, newline="")))
        assert [[plain(cell) for cell in row] for row in rows] == [
            [plain(cell) for cell in row] for row in chart_rows(chart)
        ], chart.name
    assert visit.said == []
    visit = Visit(browser, 1400, "dark")  # Chromium asks before a page may save more than ten files
    visit.open(address)
    picture = visit.save("#r0-loss", "svg")
    assert picture.startswith("<svg")
    assert "rolling" not in picture
    assert "training loss" in picture
    assert visit.said == []
    assert visit.ask("document.getElementById('r0-loss').layout.yaxis.type") == "log"
    visit.page.locator("figure:has(#r0-loss) [data-do=scale]").click()
    assert visit.ask("document.getElementById('r0-loss').layout.yaxis.type") == "linear"


def plain(cell: object) -> object:
    """A cell as a number, if it is one: 5 and 5.0 are the same."""
    try:
        return float(str(cell))
    except ValueError:
        return str(cell)


def test_a_phone_in_the_dark(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, 400, "dark")
    visit.open(write_page(tmp_path))
    visit.draw_all()
    assert visit.ask("document.documentElement.scrollWidth") <= 400
    assert (
        visit.ask("Math.max(...[...document.querySelectorAll('.chart .main-svg')].map(svg => svg.clientWidth))")
        < 400
    )
    ink = "getComputedStyle(document.querySelector('#r0-loss .xtitle')).fill"
    assert visit.ask(ink) == "rgb(230, 232, 235)"
    visit.page.emulate_media(color_scheme="light")
    visit.until(f"{ink} === 'rgb(28, 30, 33)'")
    assert visit.said == []


def test_texts_of_run_files_are_not_executed(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", skipped={9: HOSTILE}, dnn=HOSTILE, algorithm=HOSTILE)
    (tmp_path / "run" / "config.toml").write_text(HOSTILE)
    moved = {"operation": HOSTILE, "stage": HOSTILE, "sent_bytes": 9, "sent_messages": 1, "sizes": {"3": 1}}
    step = {"event": "step", "step": 30, "phase": "sparse", "traffic": [moved], "sent_bytes": 9}
    validation = {"event": "validation", "step": 30, f"{HOSTILE}": 1.0, "val <a href='javascript:x'>": 2}
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in (step, validation)))
    target = tmp_path / "report.html"
    runs = [read_run(tmp_path / "run", HOSTILE), read_run(tmp_path / "run", f"2 {HOSTILE}")]
    target.write_text(build_page(build_report(runs)), encoding="utf-8")
    visit = Visit(browser, 1000)
    visit.open(target.as_uri())
    visit.draw_all()
    assert visit.ask("window.hacked") is None
    assert visit.ask("document.querySelectorAll('img, main script, .chart a[href], .chart b').length") == 0
    assert visit.said == []
    assert visit.asked == [target.as_uri()]


def test_a_live_page_follows_the_run_and_keeps_its_zoom(browser: Any, tmp_path: Path) -> None:
    with Server([write_run(tmp_path, steps=6, warmup=2)]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            visit = Visit(browser, 1000)
            visit.open(server.url)
            visit.ask("window.mark = 1; Plotly.relayout('r0-loss', {'xaxis.range': [1, 3]})")
            write_steps(tmp_path, 6, 9, warmup=2, world=3, buckets=2)
            visit.ask("document.querySelector('.answers details').open = true")
            visit.page.get_by_text("Of 9 steps so far").wait_for()  # it stays open
            drawn = "document.getElementById('r0-loss')"
            visit.until(f"{drawn}.data[0].x.length === 9")
            assert visit.ask(f"{drawn}.layout.xaxis.range") == [1, 3]
            assert visit.ask("window.mark") == 1
            assert visit.said == []
            visit.page.close()
        finally:
            server.shutdown()
            thread.join(60)
