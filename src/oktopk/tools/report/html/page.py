"""Build the page: one self-contained HTML file, with plotly's script, that loads nothing."""

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
from oktopk.utils.extras import install_command

from . import tables
from .charts import inner_charts, main_charts
from .comparison import make_comparison
from .drawing import Chart
from .sweep import settings_table, sweep_tiles
from .tiles import draw_tiles, run_tiles

Document = Mapping[str, Any]


class PlotlyMissing(OkTopkError, ImportError):
    """plotly is not installed."""


@dataclass(frozen=True)
class Contents:
    """The content of a page: texts and charts by name, and the body that places them."""

    title: str
    body: str
    parts: Mapping[str, str]
    figures: Mapping[str, Any]

    def state(self, version: str | None, period: int) -> dict[str, Any]:
        """The state that a live page polls; a static page has version None."""
        return {"version": version, "period": period, "parts": self.parts, "charts": self.figures}


def build_page(document: Document, version: str | None = None, period: int = 0) -> str:
    """Build the page; with `version` and `period` (milliseconds) it is a live page that polls for updates."""
    return render_page(contents(document, live=version is not None), version, period)


def render_page(found: Contents, version: str | None = None, period: int = 0) -> str:
    """Write the contents as one HTML file, with plotly's script and the style of all pages."""
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
    draft = Draft()
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
    heading = f"<h1>{tables.safe(title)}</h1>" + (
        '<p class="soft" id="live" aria-live="polite">Live</p>' if live else ""
    )
    body = _run(draft, "r0", runs[0]) if len(runs) == 1 else _comparison(draft, document)
    return Contents(f"oktopk report: {title}", heading + body, draft.parts, draft.figures)


class Draft:
    """Collects texts and charts, and returns the HTML that places them."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.figures: dict[str, Any] = {}

    def text(self, name: str, content: str, kind: str = "card") -> str:
        self.parts[name] = content
        return f'<div class="{kind}" data-part="{name}">{content}</div>'

    def fold(self, title: str, name: str, content: str, opened: bool = False) -> str:
        """A text in a section that opens on a click; it is hidden while there is no text."""
        return fold(title, self.text(name, content, "plain"), opened)

    def grid(self, prefix: str, made: Sequence[Chart]) -> str:
        places = []
        for chart in made:
            name = f"{prefix}-{chart.name}"
            self.figures[name] = chart.figure
            self.parts[f"{name}-caption"] = tables.safe(chart.caption)
            caption = f'<figcaption data-part="{name}-caption">{tables.safe(chart.caption)}</figcaption>'
            head = f'<div class="head"><h3>{tables.safe(chart.title)}</h3>{_tools(chart)}</div>'
            places.append(f'<figure>{head}<div class="chart" id="{name}"></div>{caption}</figure>')
        return f'<div class="grid">{"".join(places)}</div>' if places else ""


def fold(title: str, content: str, opened: bool = False) -> str:
    """A section that opens on a click."""
    return f"<details{' open' * opened}><summary>{tables.safe(title)}</summary>{content}</details>"


def _tools(chart: Chart) -> str:
    """The buttons of a chart, which page.js listens to."""
    scale = '<button data-do="scale">linear</button>' if chart.figure["layout"]["meta"]["scales"] else ""
    title = tables.safe(chart.title)
    save = "".join(
        f'<button data-do="{kind}" aria-label="Save {title} as {kind.upper()}">{kind.upper()}</button>'
        for kind in ("svg", "csv")
    )
    return f'<span class="tools">{scale}{save}</span>'


def _run(draft: Draft, prefix: str, run: Mapping[str, Any]) -> str:
    inner = inner_charts(run)
    return "".join([
        draft.text(f"{prefix}-about", tables.about(run), "about"),
        draft.text(f"{prefix}-tiles", draw_tiles(run_tiles(run)), "headline"),
        draft.text(f"{prefix}-notes", tables.notes(run), "notes"),
        draft.text(f"{prefix}-answers", tables.answers(run), "card"),
        draft.text(f"{prefix}-thinned", tables.thinned(run), "soft"),
        draft.grid(prefix, main_charts(run)),
        draft.fold("Skipped steps", f"{prefix}-skipped", tables.skipped(run), opened=True),
        draft.fold("Means per step", f"{prefix}-means", tables.phase_table(run)),
        draft.fold("What rank 0 sent, by operation", f"{prefix}-operations", tables.message_table(run)),
        fold("Messages, thresholds and residual", draft.grid(prefix, inner)) if inner else "",
        draft.fold("Plan", f"{prefix}-plan", tables.plan(run)),
        draft.fold("Configuration", f"{prefix}-config", tables.config(run)),
    ])  # fmt: skip


def _comparison(draft: Draft, document: Document) -> str:
    runs = document["runs"]
    return "".join([
        draft.text("tiles", draw_tiles(sweep_tiles(document)), "headline"),
        draft.text("settings", settings_table(document)),
        draft.grid("all", make_comparison(runs)),
        draft.fold("All runs", "finals", tables.finals(document["finals"])),
        "<h2>Each run</h2>",
        *(fold(run["name"], _run(draft, f"r{place}", run)) for place, run in enumerate(runs)),
    ])  # fmt: skip


def in_script(value: Any) -> str:
    r"""Write JSON for a script element, so that nothing in it ends the element or starts a comment.

    >>> in_script("</script>")
    '"\\u003c/script\\u003e"'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Sequence[str], live: bool) -> str:
    """The content security policy: only these scripts run, and nothing is loaded."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    asked = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {asked}; base-uri 'none'; form-action 'none'"
    )


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def check_plotly() -> None:
    """Raise PlotlyMissing early, before anyone waits for a page."""
    _plotly()


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PlotlyMissing(f"the page needs plotly: {install_command('report')} ({error})") from None
    script: str = get_plotlyjs()
    return script.replace("\r\n", "\n").replace("</script", "<\\/script")
