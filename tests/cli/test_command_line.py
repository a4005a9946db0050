"""The command line as such: help, errors of one line, names that were almost right, and plug-ins."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from oktopk.cli import COMMANDS, main
from oktopk.utils.registry import IMPORT

PYTHON = re.compile(r"\b(None|Traceback|Error\(|NoneType|int|float|str|dict|tuple|Path)\b|\w_\w|<class|object at")
"""Words of Python, which no user has typed."""


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Commands show the library's log in their own way."""
    logger = logging.getLogger("oktopk")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


def outcome(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(list(words))
    except SystemExit as end:
        code = int(str(end.code))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_without_a_command_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys)
    assert (code, err) == (0, "")
    assert out.startswith("usage: oktopk ")
    assert all(f"\n    {name}" in out for name in COMMANDS)


SWEEP = ("sweep", "--out", "s")
RACE = ("race", "--out", "r")
JOB = ("jobscript", "--scheduler", "slurm")
MISTAKES: dict[tuple[str, ...], str] = {
    # commands and options
    ("trian",): "oktopk: error: unknown command 'trian': did you mean 'train'?",
    ("zip",): "oktopk: error: unknown command 'zip': choose from demo, train, sweep",
    ("train", "--desnity", "0.1"): "oktopk train: error: unknown option --desnity: did you mean --density?",
    ("train", "--batchsize=8"): "oktopk train: error: unknown option --batchsize: did you mean --batch-size?",
    ("train", "--qqqq"): "oktopk train: error: unknown option --qqqq: see oktopk train --help",
    ("train", "extra"): "oktopk train: error: unexpected argument 'extra'",
    ("train", "--lr"): "oktopk train: error: --lr needs a value",
    ("bench", "--ranks", "two"): "oktopk bench: error: --ranks must be a whole number, got 'two'",
    ("bench", "--density", "x"): "oktopk bench: error: --density must be a number, got 'x'",
    ("bench", "--params", "x"): "oktopk bench: error: --params must be a number like 25M, 300k or 1000, got 'x'",
    (*SWEEP, "--", "--max-epoch", "1"): "error: unknown option --max-epoch: did you mean --max-epochs?",
    ("data",): "oktopk data: error: missing: ACTION; see oktopk data --help",
    ("data", "an5", "x", "y"): "oktopk data: error: unknown action 'an5': did you mean 'an4'?",
    ("sweep",): "oktopk sweep: error: missing: --out; see oktopk sweep --help",
    # names
    ("train", "--compressor", "oktpk"): "oktpk': did you mean 'oktopk'?",
    ("train", "--dnn", "lstman"): "'lstman': did you mean 'lstman4'?",
    ("train", "--values", "f16"): "'f16': did you mean 'fp16'?",
    ("train", "--sinks", "cvs"): "'cvs': did you mean 'csv'?",
    ("train", "--lr-schedule", "cosin"): "'cosin': did you mean 'cosine'?",
    ("train", "--config", "lstm_degub"): "no config 'lstm_degub': did you mean 'lstm_debug'?",
    (*SWEEP, "--algorithms", "gtop"): "--algorithms must be one of dense, topka",
    ("bench", "--contenders", "dpp"): "unknown contender 'dpp': did you mean 'ddp'?",
    ("bench", "--contenders", "oktopk:fp61"): "unknown variant 'fp61' of oktopk: did you mean 'fp16'?",
    ("bench", "--values", "e4m4"): "--values: unknown value format 'e4m4': did you mean 'e4m3'?",
    ("bench", "--model", "mpl"): "oktopk bench: error: --model 'mpl' is unknown: did you mean 'mlp'?",
    ("bench", "--link", "100Mbps"): "got '100Mbps': did you mean 100mbit?",
    ("simulate", "--algorithms", "oktop"): "--algorithms: unknown algorithm 'oktop': did you mean 'oktopk'?",
    ("simulate", "--net", "1gibt:5us"): "--net 1gibt:5us: rate must be like 100mbit or 1gbit, from 1kbit",
    (*RACE, "--link", "1gibt"): "got '1gibt': did you mean 1gbit?",
    ("doctor", "--link", "10M"): "oktopk doctor: error: --link: rate must be like 100mbit or 1gbit, from 1kbit to",
    ("doctor", "--compute-seconds", "x"): "error: --compute-seconds must be a time like 0.25 or 250ms, got 'x'",
    (*RACE, "--contenders", "powersdg"): "unknown contender 'powersdg': did you mean 'powersgd'?",
    ("doctor", "--optimizer", "adamW"): "error: --optimizer 'adamW' is unknown: did you mean 'adamw'?",
    ("jobscript", "--scheduler", "lsf"): "error: --scheduler 'lsf' is unknown: choose from slurm, pbs",
    # values
    ("train", "--density", "0"): "error: --density must be a number above 0 up to 1, or auto, got '0'",
    ("train", "--batch-size", "2.5"): "error: --batch-size must be a whole number from 1 on, got '2.5'",
    ("train", "--lr", "fast"): "oktopk train: error: --lr must be a number above 0, got 'fast'",
    ("train", "--ranks-per-host", "2"): "--ranks-per-host is 2, but the number of ranks, 1, is no multiple of it",
    ("train", "--momentum", "1", "--momentum-correction"): "--momentum-correction needs a --momentum below 1",
    ("bench", "--link", "1gbit", "--ranks", "300"): "--link makes a network of at most 254 hosts",
    (*SWEEP, "--density", "2"): "--densities must be a number above 0 up to 1, or auto, got '2'",
    (*SWEEP, "--", "--density", "0.1"): "--density after --: the sweep sets it for each run: pass --densities",
    ("bench", "--density", "0"): "oktopk bench: error: --density must be in (0, 1], got 0",
    ("bench", "--ranks", "3", "--ranks-per-host", "2"): "--ranks 3 cannot be divided by --ranks-per-host 2",
    (*RACE, "--seed", "x"): "--seeds must be a whole number from 0 up to",
    (*JOB, "--time", "1h"): "oktopk jobscript: error: --time must be HH:MM:SS, got '1h'",
    (*JOB, "--ranks-per-node", "0"): "oktopk jobscript: error: --ranks-per-node must be at least 1, got 0",
    (*JOB, "--module", "a; rm -rf"): "oktopk jobscript: error: --module must be a single word, got 'a; rm -rf'",
    (*JOB, "--venv", "absent"): "oktopk jobscript: error: --venv absent: no virtual environment",
    ("report", "absent", "--port", "x"): "oktopk report: error: --port must be a whole number, got 'x'",
    ("report", "absent", "--figure", "x.doc"): "error: --figure must end with .png, .svg, .pdf, got x.doc",
    ("report", "absent", "--live", "--csv", "x"): "oktopk report: error: --live and --csv cannot be combined",
}  # fmt: skip
QUOTED = re.compile(r"'[^']*'")


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_without_python(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = outcome(capsys, *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("oktopk")
    assert ": error: " in err
    assert MISTAKES[words] in err
    assert not PYTHON.search(QUOTED.sub("", err)), err
    assert list(tmp_path.iterdir()) == []


def test_the_environment_and_files_are_named_in_their_own_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OKTOPK_BATCH_SIZE", "many")
    _, _, err = outcome(capsys, "train")
    assert err == "oktopk train: error: OKTOPK_BATCH_SIZE must be a whole number from 1 on, got 'many'\n"
    monkeypatch.delenv("OKTOPK_BATCH_SIZE")
    (tmp_path / "my.toml").write_text("batch_size = true\n")
    _, _, err = outcome(capsys, "train", "--config", str(tmp_path / "my.toml"))
    where = f"(config {tmp_path / 'my.toml'})"
    assert err == f"oktopk train: error: batch_size must be a whole number from 1 on, got true {where}\n"


def test_a_module_that_cannot_be_imported_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(IMPORT, raising=False)
    (tmp_path / "plug_broken.py").write_text("import missing_dependency\n")
    for words, said in {
        ("train", "--import", "plug_absent"): "--import plug_absent: No module named 'plug_absent'",
        ("bench", "--import=plug_broken"): "--import plug_broken: No module named 'missing_dependency'",
        ("race", "--import", "plug_broken.py"): "--import plug_broken.py: pass the name of the module",
    }.items():
        code, out, err = outcome(capsys, *words)
        assert (code, out) == (2, "")
        assert err.startswith(f"oktopk {words[0]}: error: {said}")
        assert err.count("\n") == 1
    monkeypatch.setenv(IMPORT, "plug_absent")
    _, _, err = outcome(capsys, "simulate")
    assert err == f"oktopk simulate: error: {IMPORT} plug_absent: No module named 'plug_absent'\n"


def test_options_of_train_are_understood_by_a_sweep(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from oktopk.cli.commands import sweep

    asked: list[object] = []
    monkeypatch.setattr(sweep, "_sweep", lambda options, runs: asked.append([run.name for run in runs]) or 0)
    words = ("--compressor", "oktopk,topka", "--density", "0.1,0.2", "--seed", "3", "--out", str(tmp_path / "s"))
    assert outcome(capsys, "sweep", *words)[0] == 0
    long = ("--algorithms", "oktopk,topka", "--densities", "0.1,0.2", "--seeds", "3", "--out", str(tmp_path / "s"))
    assert outcome(capsys, "sweep", *long)[0] == 0
    assert asked[0] == asked[1]
    assert len(asked[0]) == 4
