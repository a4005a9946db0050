"""What has become of a run, or of several, on one page: `oktopk report`.

runs = [read(folder, name) for folder, name in zip(folders, names(folders))]
document = report(runs)       one JSON document: every figure that is shown
page(document)                one HTML file that needs nothing else
"""

from __future__ import annotations

from .figures import report
from .live import serve
from .page import page
from .runs import ReportError, find, names, read

__all__ = ["ReportError", "find", "names", "page", "read", "report", "serve"]
