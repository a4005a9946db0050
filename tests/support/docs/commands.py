"""Checks command lines of the documents by the parsers of the programs that they start."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from oktopk.cli import make_parser, replace_underscores
from tests.support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MPI = re.compile(r"-np?$")
_OURS = re.compile(r"OKTOPK_\w+")
_OTHERS = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "WANDB_MODE",
}


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a block: comments and the ends of pipes are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            cut = next((i for i, word in enumerate(words) if word in (">", "|")), len(words))
            yield words[:cut]


def is_known(words: list[str]) -> bool:
    """Whether it is one of the programs whose arguments are checked."""
    return words[0] in _CHECKS


def check(words: list[str], files: set[str]) -> None:
    """Raise an AssertionError if a command cannot be started like this; `files` are programs of the page."""
    while words and (match := re.match(r"([A-Z_]+)=", words[0])):
        _check_variable(match[1])
        words = words[1:]
    name, *rest = words
    assert name in _CHECKS, f"unknown program {name}: mark the block as not run, with the reason"
    _CHECKS[name](rest, files)


def _check_variable(name: str) -> None:
    if _OURS.fullmatch(name):
        sources = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
        assert any(f'"{name}"' in text for text in sources), f"oktopk does not read {name}"
    else:
        assert name in _OTHERS, f"unknown variable {name}"


def _oktopk(words: list[str], files: set[str]) -> None:
    words, said = replace_underscores(words), io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            make_parser(words).parse_args(words)
    except SystemExit as end:
        if end.code:  # 0 is that of --help
            raise AssertionError(said.getvalue()) from None


def _python(words: list[str], files: set[str]) -> None:
    if words[0] == "-m":
        assert find_spec(words[1]) is not None, f"there is no module {words[1]}"
        if words[1] == "oktopk":
            _oktopk(words[2:], files)
    else:
        known = {"script.py", "job.py", "train.py", *files}  # the reader's
        assert words[0] in known or (ROOT / words[0]).is_file(), f"there is no {words[0]}"


def _torchrun(words: list[str], files: set[str]) -> None:
    from torch.distributed.run import get_args_parser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = get_args_parser().parse_args(words)
    except SystemExit:
        raise AssertionError(said.getvalue()) from None
    program = [found.training_script, *found.training_script_args]
    _python(["-m"] * found.module + program, files)


def _mpi(words: list[str], files: set[str]) -> None:
    assert _MPI.match(words[0]), words
    assert int(words[1]) > 0
    check(words[2:], files)


def _make(words: list[str], files: set[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^({words[0]}|[a-z- ]* {words[0]}|{words[0]} [a-z- ]*):", text, re.MULTILINE), words


def _pip(words: list[str], files: set[str]) -> None:
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(name.split(",")) <= set(extras), name


def _export(words: list[str], files: set[str]) -> None:
    for word in words:
        name, mark, _ = word.partition("=")
        if mark:
            _check_variable(name)


def _activate(words: list[str], files: set[str]) -> None:
    assert words == [".venv/bin/activate"]


_CHECKS: dict[str, Callable[[list[str], set[str]], None]] = {
    "oktopk": _oktopk,
    "python": _python,
    "torchrun": _torchrun,
    "mpirun": _mpi,
    "mpiexec": _mpi,
    "make": _make,
    "pip": _pip,
    "export": _export,
    ".": _activate,
}
