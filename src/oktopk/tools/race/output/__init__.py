"""Write the outputs of a race to its folder: JSON, CSV, page and picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oktopk.tools.plotting import figure_problem
from oktopk.tools.report.html.page import PlotlyMissing
from oktopk.utils.files import write_atomically

from .figure import draw
from .page import build_page
from .tables import csv_text

JSON, CSV, PAGE, PICTURE = "race.json", "race.csv", "race.html", "race.svg"


def write_outputs(document: Mapping[str, Any], out: Path) -> list[str]:
    """Write all outputs; returns what could not be drawn, because a package is missing."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / JSON, (json.dumps(document, indent=2) + "\n").encode())
    write_atomically(out / CSV, csv_text(document).encode())
    if not document["trials"]:
        return []
    problems = []
    try:
        write_atomically(out / PAGE, build_page(document).encode("utf-8", "replace"))
    except PlotlyMissing as error:
        problems.append(f"no {PAGE}: {error}")
    if problem := figure_problem(out / PICTURE):
        problems.append(f"no {PICTURE}: {problem}")
    else:
        draw(document, out / PICTURE)
    return problems
