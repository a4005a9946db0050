"""The picture of a report in the documents: the top of its page, in headless Chromium.

    oktopk train --config demo --ranks 2 --out runs/demo
    python docs/pictures/report.py runs/demo      writes report.png beside this file

Needs the extras `report` and `dev`, and Debian's chromium.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from oktopk.tools.report import build_page, build_report, read_run

WIDTH, HEIGHT = 1400, 945


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    run = parser.parse_args().run.resolve()
    browser = shutil.which("chromium")
    if browser is None:
        parser.error("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page = Path(folder) / "report.html"
        page.write_text(build_page(build_report([read_run(run, run.name)])), encoding="utf-8")
        started = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = started.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_selector(".chart .main-svg")
        tab.wait_for_timeout(500)
        tab.screenshot(path=Path(__file__).with_name("report.png"))
        started.close()


if __name__ == "__main__":
    main()
