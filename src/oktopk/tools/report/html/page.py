"""The page: one HTML file with everything in it, plotly's script too. It asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

from oktopk.errors import OkTopkError

from . import tables
from .charts import charts
from .comparison import comparison
from .drawing import Chart

Document = Mapping[str, Any]


class PlotlyMissing(OkTopkError, ImportError):
    """The package that draws."""


@dataclass(frozen=True)
class Contents:
    """`parts` are texts by name, `figures` charts by name, `body` has the place of each."""

    title: str
    body: str
    parts: Mapping[str, str]
    figures: Mapping[str, Any]

    def state(self, version: str | None, period: int) -> dict[str, Any]:
        """What a live page asks for; None is the version of a page that does not change."""
        return {"version": version, "period": period, "parts": self.parts, "charts": self.figures}


def page(document: Document, version: str | None = None, period: int = 0) -> str:
    """`version` and `period` (milliseconds) make it a live page, which asks for the next version now and then."""
    found = contents(document, live=version is not None)
    script, plotly = _file("page.js"), _plotly()
    return Template(_file("page.html")).substitute(
        title=tables.safe(found.title),
        policy=_policy((plotly, script), live=version is not None),
        style=_file("page.css"),
        body=found.body,
        state=in_script(found.state(version, period)),
        plotly=plotly,
        script=script,
    )


def contents(document: Document, live: bool = False) -> Contents:
    runs = document["runs"]
    draft = _Draft()
    title = f"oktopk report: {runs[0]['name']}" if len(runs) == 1 else f"oktopk report: {len(runs)} runs"
    heading = f"<h1>{tables.safe(title)}</h1>" + (
        '<p class="soft" id="live" aria-live="polite">Live</p>' if live else ""
    )
    if len(runs) == 1:
        body = _run(draft, "r0", runs[0])
    else:
        body = _compared(draft, document) + "".join(
            f"<details><summary>{tables.safe(run['name'])}</summary>{_run(draft, f'r{place}', run)}</details>"
            for place, run in enumerate(runs)
        )
    return Contents(title, heading + body, draft.parts, draft.figures)


class _Draft:
    """Collects texts and charts, and says where they go."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.figures: dict[str, Any] = {}

    def text(self, name: str, content: str, kind: str = "card") -> str:
        self.parts[name] = content
        return f'<div class="{kind}" data-part="{name}">{content}</div>'

    def grid(self, prefix: str, made: Sequence[Chart]) -> str:
        places = []
        for chart in made:
            name = f"{prefix}-{chart.name}"
            self.figures[name] = chart.figure
            self.parts[f"{name}-caption"] = tables.safe(chart.caption)
            caption = f'<figcaption data-part="{name}-caption">{tables.safe(chart.caption)}</figcaption>'
            title = f"<h3>{tables.safe(chart.title)}</h3>"
            places.append(f'<figure>{title}<div class="chart" id="{name}"></div>{caption}</figure>')
        return f'<div class="grid">{"".join(places)}</div>' if places else ""


def _run(draft: _Draft, prefix: str, run: Mapping[str, Any]) -> str:
    below = (tables.phase_table, tables.message_table, tables.skipped, tables.plan, tables.config)
    return "".join([
        draft.text(f"{prefix}-about", tables.about(run), "about"),
        draft.text(f"{prefix}-answers", tables.answers(run)),
        draft.text(f"{prefix}-notes", tables.notes(run), "notes"),
        draft.grid(prefix, charts(run)),
        *(draft.text(f"{prefix}-{table.__name__}", table(run)) for table in below),
    ])  # fmt: skip


def _compared(draft: _Draft, document: Document) -> str:
    table = draft.text("finals", tables.finals(document["finals"]))
    return f"<h2>Comparison</h2>{table}{draft.grid('all', comparison(document['runs']))}<h2>The runs</h2>"


def in_script(value: Any) -> str:
    r"""JSON that can stand in a script element: nothing in it ends the element or begins a comment.

    >>> in_script("</script>")
    '"\\u003c/script\\u003e"'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Sequence[str], live: bool) -> str:
    """These scripts and no others run; nothing is loaded from anywhere."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    asked = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {asked}; base-uri 'none'; form-action 'none'"
    )


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def check_drawing() -> None:
    """What is missing is said before anybody waits for a page."""
    _plotly()


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PlotlyMissing(f"reports are drawn by plotly: pip install 'oktopk[report]' ({error})") from None
    script: str = get_plotlyjs()
    return script.replace("\r\n", "\n").replace("</script", "<\\/script")
