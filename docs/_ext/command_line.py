"""The directive `command-line`: a section for each command, from the parser that the commands use."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from oktopk.cli import COMMANDS, make_parser

_STANDARD = {"positional arguments": "Arguments", "options": "Options"}


def find_parser(command: str) -> argparse.ArgumentParser:
    return _children(make_parser([command]))[command]


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


class CommandLine(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        return [self._section(find_parser(name), f"oktopk {name}") for name in COMMANDS]

    def _section(self, parser: argparse.ArgumentParser, title: str) -> nodes.section:
        section = nodes.section(ids=[title.replace(" ", "-")], names=[title])
        section += nodes.title(text=title)
        self.state.document.note_explicit_target(section, section)
        section += list(_description(parser.description or ""))
        section += _literal(parser.format_usage().removeprefix("usage: ").strip())
        for group in parser._action_groups:
            shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            shown = [a for a in shown if not isinstance(a, (argparse._HelpAction, argparse._SubParsersAction))]
            if shown:
                heading = _STANDARD.get(group.title or "", group.title or "")
                section += nodes.rubric(text=heading)
                section += _options(parser, shown, section["ids"][0])
        section += [self._section(child, f"{title} {name}") for name, child in _children(parser).items()]
        return section


def _description(text: str) -> Iterator[nodes.Node]:
    """Paragraphs; indented ones are commands, as they stand."""
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if part.startswith("    "):
            yield _literal(textwrap.dedent(part))
        elif part.strip():
            yield nodes.paragraph("", "", *_words(" ".join(part.split())))


def _words(text: str) -> Iterator[nodes.Node]:
    """Text, with option names and what stands in backticks as literals."""
    pattern = r"(`[^`]+`|(?<![\w-])--[a-z][a-z-]*)"
    for index, piece in enumerate(re.split(pattern, text)):
        if piece:
            yield nodes.literal(text=piece.strip("`")) if index % 2 else nodes.Text(piece)


def _literal(text: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language="none")


def _options(
    parser: argparse.ArgumentParser, actions: list[argparse.Action], prefix: str
) -> nodes.definition_list:
    formatter, found = parser._get_formatter(), nodes.definition_list(classes=["options"])
    for action in actions:
        term = nodes.term("", "", nodes.literal(text=_invocation(formatter, action)))
        name = (action.option_strings or [str(action.dest)])[-1]
        term["ids"] = [f"{prefix}-{name.strip('-')}"]
        words = _words(formatter._expand_help(action)) if action.help else []
        found += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", "", *words)))
    return found


def _invocation(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    default = action.dest.upper() if action.option_strings else action.dest
    value = "" if action.nargs == 0 else formatter._format_args(action, default)
    return " ".join(filter(None, (", ".join(action.option_strings), value)))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
