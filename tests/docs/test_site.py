"""The extensions of the site: where links lead, and what the command line reference has."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from oktopk.cli import COMMANDS, make_parser
from tests.support.paths import ROOT

pytest.importorskip("sphinx", reason="the extra docs is not installed")


@pytest.fixture(autouse=True)
def extensions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    yield
    for name in ("repository_links", "command_line", "public_names"):
        sys.modules.pop(name, None)


def test_links_that_leave_the_site_become_paths_in_the_repository() -> None:
    """There is no public address yet that they could lead to."""
    rewrite = import_module("repository_links").rewrite
    text = "[a](../../examples/ddp.py) [`examples`](../../examples) [c](../faq.md#firewall) [d](#x) [e](https://x.org)"
    assert rewrite(text, ROOT / "docs" / "guides", "guides/adamw") == (
        "a (`examples/ddp.py`) `examples` [c](/faq.md#firewall) [d](#x) [e](https://x.org)"
    )


def test_a_dead_link_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    module, said = import_module("repository_links"), []
    monkeypatch.setattr(module._logger, "warning", lambda text, *words, **_: said.append(text % words))
    assert module.rewrite("[a](missing.md)", ROOT / "docs", "index") == "[a](missing.md)"
    assert said == ["the link leads nowhere: missing.md"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_reference_has_every_option_of_a_command(command: str) -> None:
    module = import_module("command_line")

    class Document:
        def note_explicit_target(self, *_: object) -> None: ...

    directive: Any = module.CommandLine.__new__(module.CommandLine)
    directive.state = argparse.Namespace(document=Document())
    section = directive._section(module.find_parser(command), f"oktopk {command}")
    text = section.astext()
    assert text.startswith(f"oktopk {command}")
    for parser in _all(module, make_parser([command]), command):
        for action in parser._actions:
            if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
                assert all(name in text for name in action.option_strings), action.option_strings


def _all(module: Any, top: argparse.ArgumentParser, command: str) -> list[argparse.ArgumentParser]:
    parser = module._children(top)[command]
    return [parser, *module._children(parser).values()]


def test_a_public_name_without_an_entry_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    module, said = import_module("public_names"), []
    monkeypatch.setattr(module._logger, "warning", lambda text, *words: said.append(text % words))

    class Environment:
        def get_domain(self, name: str) -> Any:
            names = [f"{package}.{one}" for package in module.PACKAGES for one in import_module(package).__all__]
            return argparse.Namespace(objects=dict.fromkeys(set(names) - {"oktopk.OkTopkState"}))

    module._on_consistency(None, Environment())
    assert said == ["oktopk.OkTopkState is public, and not in the API reference"]


def test_every_page_is_in_the_navigation() -> None:
    """Sphinx warns of others, too; here without building the site."""
    listed = (ROOT / "docs" / "index.md").read_text() + (ROOT / "docs" / "api" / "index.md").read_text()
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts]
    for page in pages:
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix().removeprefix("api/")
        assert name == "index" or f"\n{name}\n" in listed or f"<{name}>\n" in listed, name
