"""What has become of a run, or of several, on one page: `oktopk report`.

runs = [read(folder, name) for folder, name in zip(folders, names(folders))]
document = report(runs)       one JSON document: every figure that is shown
page(document)                one HTML file that needs nothing else
"""

from __future__ import annotations

from .analysis.figures import report
from .analysis.runs import ReportError, find, names, read
from .html.live import serve
from .html.page import page

__all__ = ["ReportError", "find", "names", "page", "read", "report", "serve"]
