"""Links of pages to files of the repository that are no pages become their paths, and the files must exist."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")

_logger = logging.getLogger(__name__)


def rewrite(text: str, folder: Path, docname: str) -> str:
    """Replace links to what is not on the site; `folder` is where relative ones begin."""

    def replace(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if not path.exists():
            _logger.warning("the link leads nowhere: %s", match[2], location=docname)
            return match[0]
        if path.is_relative_to(DOCS) and path.is_file():
            within = path.relative_to(DOCS).as_posix()
            return f"[{match[1]}](/{within}{match[3] or ''})"
        shown = path.relative_to(ROOT).as_posix()
        return f"`{shown}`" if match[1].strip("`") in (shown, path.name) else f"{match[1]} (`{shown}`)"

    return _LINK.sub(replace, text)


def _on_source(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = rewrite(source[0], Path(app.env.doc2path(docname)).parent, docname)


def _on_include(app: Sphinx, path: Path, docname: str, source: list[str]) -> None:
    source[0] = rewrite(source[0], (DOCS / path).resolve().parent, docname)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _on_source)
    app.connect("include-read", _on_include)
    return {"parallel_read_safe": True}
