"""Report on one run or several, as JSON or as an HTML page: `oktopk report`.

runs = [read_run(folder, name) for folder, name in zip(folders, name_runs(folders))]
document = build_report(runs)       one JSON document with everything that the page shows
html = build_page(document)         one self-contained HTML file
draw(document, path)                one picture
write_tables(document, folder)      a CSV file for each chart
"""

from __future__ import annotations

from .analysis.document import build_report
from .analysis.runs import ReportError, find_runs, name_runs, read_run
from .csv_tables import write_tables
from .figure import draw
from .html.live import serve
from .html.page import build_page

__all__ = [
    "ReportError",
    "build_page",
    "build_report",
    "draw",
    "find_runs",
    "name_runs",
    "read_run",
    "serve",
    "write_tables",
]
