"""The API reference is complete, and names lead to where they are documented.

Annotations have the module in which a class is defined, `oktopk.frontends.ddp.OkTopkState`; users import it from
`oktopk`. Every public name that has no entry is a warning.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import oktopk

PACKAGES = "oktopk", "oktopk.metrics.sinks", "oktopk.testing"
_logger = logging.getLogger(__name__)


def _on_missing(app: Sphinx, env: BuildEnvironment, node: Any, content: nodes.Element) -> nodes.Element | None:
    target = node.get("reftarget", "")
    name = target.rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in oktopk.__all__ or target == f"oktopk.{name}":
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"oktopk.{name}", node, content)


def _on_consistency(app: Sphinx, env: BuildEnvironment) -> None:
    documented = set(env.get_domain("py").objects)  # type: ignore[attr-defined]
    for package in PACKAGES:
        for name in import_module(package).__all__:
            if f"{package}.{name}" not in documented and f"oktopk.{name}" not in documented:
                _logger.warning("%s.%s is public, and not in the API reference", package, name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("missing-reference", _on_missing)
    app.connect("env-check-consistency", _on_consistency)
    return {"parallel_read_safe": True}
