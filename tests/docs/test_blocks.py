"""Every code block of the documents runs; what cannot run here is marked, with the reason, and counted."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from oktopk.cli import main
from tests.support.docs import commands
from tests.support.docs.blocks import ELSEWHERE, LANGUAGES, Block, all_blocks, read
from tests.support.docs.report import describe, sort
from tests.support.docs.runner import SECONDS, mask, run_all
from tests.support.paths import ROOT

BLOCKS = all_blocks()
OURS = [block for block in BLOCKS if block.page not in ELSEWHERE]
SHELL = [block for block in OURS if block.language == "sh" and block.mark != "not run"]


def test_every_block_says_what_it_is(record_property: Callable[[str, object], None]) -> None:
    unknown = [block.place for block in BLOCKS if block.language not in LANGUAGES]
    assert unknown == []
    assert [block.place for block in BLOCKS if block.mark == "not run" and len(block.detail) < 10] == []
    for line in describe(sort(BLOCKS)):
        record_property("last word", line)


@pytest.mark.timeout(SECONDS + 60)
def test_python_runs_on_two_ranks(tmp_path: Path) -> None:
    wanted = [block.place for block in OURS if block.language == "python" and block.mark != "not run"]
    done = run_all(OURS, tmp_path)
    assert sorted(set(wanted) - set(done)) == []


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.place)
def test_commands_are_understood(block: Block) -> None:
    files = {other.detail for other in OURS if other.page == block.page and other.mark == "file"}
    for words in commands.commands(block.text):
        commands.check(words, files)


def test_so_are_those_that_cannot_run_here() -> None:
    """As far as they start programs of ours, or torchrun."""
    marked = [block for block in OURS if block.language == "sh" and block.mark == "not run"]
    known = [words for block in marked for words in commands.commands(block.text) if commands.is_known(words)]
    assert len(known) > 5
    for words in known:
        commands.check(words, {"train.py", "train_sparse.py"})


@pytest.mark.parametrize("block", [b for b in SHELL if b.mark == "run"], ids=lambda block: block.place)
def test_cheap_commands_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for program, *words in commands.commands(block.text):
        assert program == "oktopk"
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            assert main(words) == 0
        assert said.getvalue()


def test_marks_are_those_above_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.docs.blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n<!-- not run: needs two hosts -->\n```sh\nx\n```\n\n"
        "## B\n<!-- setup\na = 1\n-->\n```python\nb = a\n```\n"
        "<!-- a remark -->\n```{toctree}\nx\n```\n```text\nx\n```\n"
    )
    first, second, third = read(page)
    assert (first.mark, first.detail, first.line, first.section) == ("not run", "needs two hosts", 3, 1)
    assert (second.mark, second.setup, second.text, second.section) == ("", "a = 1", "b = a\n", 2)
    assert (third.mark, third.setup, third.language) == ("", "", "text")


@pytest.mark.parametrize(
    "line",
    [
        "oktopk train --no-such-option",
        "oktopk nonsense",
        "torchrun --no-such-option train.py",
        "torchrun --nproc-per-node 2 missing.py",
        "python missing.py",
        "python -m no_such_module",
        "make nothing",
        "pip install 'oktopk[nothing]'",
        "export OKTOPK_NOTHING=1",
        "curl example.org",
    ],
)
def test_wrong_commands_are_found(line: str) -> None:
    (words,) = commands.commands(line)
    with pytest.raises(AssertionError):
        commands.check(words, {"train.py"})


def test_a_failing_block_fails_the_run(tmp_path: Path) -> None:
    block = Block("docs/x.md", 7, 1, "python", "x = 1\nraise ValueError('of the page')\n")
    with pytest.raises(AssertionError, match=r"docs/x\.md:7 on rank 0(?s:.*)of the page"):
        run_all([block], tmp_path)


def test_numbers_of_an_output_may_differ_and_words_may_not() -> None:
    assert mask("loss 0.31, 4.2 kB\n") == mask("loss 1.5, 4.2 MB")
    assert mask("loss 0.31") != mask("cost 0.31")
    assert (ROOT / "docs" / "index.md").is_file()
