"""The page in headless Chromium: drawn, quiet, readable on a phone, deaf to what run files would have it do."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oktopk.tools.report import build_report, read_run
from oktopk.tools.report.html.live import Server
from oktopk.tools.report.html.page import build_page
from tests.support.report_runs import HOSTILE, write_run, write_steps

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
        self.page.wait_for_selector(".chart .main-svg")

    def draw_all(self) -> int:
        """How many charts there are; all of them are drawn."""
        self.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        places = "document.querySelectorAll('details[open] .chart, main > .grid .chart')"
        self.until(f"[...{places}].every(place => place.querySelector('.main-svg'))")
        return int(self.page.evaluate(f"{places}.length"))

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
    assert "forward : 500 ms" in hovered.replace("\u2009", " "), hovered


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
    visit.ask("document.querySelector('details').open = true")
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
            visit.page.get_by_text("Of 9 steps so far").wait_for()
            drawn = "document.getElementById('r0-loss')"
            visit.until(f"{drawn}.data[0].x.length === 9")
            assert visit.ask(f"{drawn}.layout.xaxis.range") == [1, 3]
            assert visit.ask("window.mark") == 1
            assert visit.said == []
            visit.page.close()
        finally:
            server.shutdown()
            thread.join(60)
