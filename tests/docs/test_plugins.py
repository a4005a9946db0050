"""docs/plugins.md: its code runs as it stands, its commands are understood, and it is the code of the example."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import oktopk
from oktopk.cli import make_parser
from oktopk.train.tasks import WORKLOADS, DataSource, Shard
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "plugin"
NAMES = {"randomk": oktopk.ALGORITHMS, "int8": oktopk.VALUES, "lines": oktopk.SINKS, "wave": WORKLOADS}


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


@pytest.fixture(scope="module")
def page() -> Any:
    """The names that the page defines, in one namespace, as a reader would type them."""
    module = sys.modules["page_of_plugins"] = ModuleType("page_of_plugins")  # dataclasses look for theirs
    try:
        for block in blocks("python"):
            exec(compile(block, "docs/plugins.md", "exec"), vars(module))
        yield vars(module)
    finally:
        del sys.modules["page_of_plugins"]
        for name, registry in NAMES.items():
            registry.pop(name, None)


@pytest.mark.timeout(300)
def test_the_code_of_the_page_runs_and_its_laws_hold(page: dict[str, Any], tmp_path: Path) -> None:
    """The last blocks check the laws; what is left is what they do not use."""
    assert len(blocks("python")) == 6
    assert {name: name in registry for name, registry in NAMES.items()} == dict.fromkeys(NAMES, True)
    page["test_laws"]("k = 1", 2)
    task = WORKLOADS["wave"].build(DataSource(), Shard(batch=8))
    loss = task.loss(next(task.batches(0)))
    assert 0 < float(loss.detach()) < 10
    assert 0 < task.metrics(task.validate().sums)["val loss"] < 10
    sink = oktopk.SINKS["lines"](tmp_path)
    sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lines.txt"]


def test_its_commands_are_understood(page: dict[str, Any]) -> None:
    (commands,) = (block for block in blocks("sh") if "oktopk train" in block)
    lines = [shlex.split(line) for line in commands.splitlines() if line.startswith("oktopk ")]
    assert {line[1] for line in lines} == {"train", "sweep", "bench", "simulate", "race"}
    for line in lines:
        make_parser(line[1:]).parse_args(line[1:])


def test_the_example_has_the_same_code() -> None:
    """Apart from types: the bodies of the methods, and the entry points."""
    example = (EXAMPLE / "oktopk_example.py").read_text(encoding="utf-8")
    for block in blocks("python")[:3]:
        for line in block.splitlines():
            if line.startswith("        "):
                assert line in example, line
    (entries,) = blocks("toml")
    assert entries in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")


def test_every_registry_of_the_page_exists() -> None:
    for name in re.findall(r"^\| `(oktopk\.[\w.]+)` \|", PAGE, re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        registry = getattr(__import__(module, fromlist=[attribute]), attribute)
        assert f'"{registry.group}"' in PAGE
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        built_in = row.rstrip(" |").rpartition("| ")[2]
        if "trainer.md" not in built_in:
            assert built_in.split(", ") == [one for one in registry if one in registry._built_in]


def test_the_algorithm_has_twenty_lines() -> None:
    block = next(block for block in blocks("python") if "class RandomK" in block)
    code = block.partition("@dataclass")[2].partition("oktopk.ALGORITHMS")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert inspect.isabstract(oktopk.Algorithm)
