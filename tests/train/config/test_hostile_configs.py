"""Configurations that were made to do harm: options, or a ConfigError that names the file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.cli import main
from oktopk.train.config.options import OPTIONS, ConfigError, spell
from oktopk.train.config.origins import _options, resolve

HARMFUL = {
    "deep": "lr = " + "[" * 50_000,
    "deep and closed": "lr = " + "[" * 5000 + "]" * 5000,
    "deep tables": "[" + ".".join("a" * 5000) + "]",
    "a long number": "seed = " + "9" * 5000,
    "a long hexadecimal number": "seed = 0x" + "f" * 5000,
    "a list of long numbers": "lr = [0x" + "f" * 5000 + "]",
    "a number beyond 64 bits": "max_steps = 0x8000000000000000",
    "a zero byte in a path": 'data_dir = "a\\u0000b"',
    "a timeout of years": "timeout = 1e300",
    "a long float": "lr = 0." + "1" * 100_000 + "e" + "9" * 5000,
    "binary": "\0\1\2",
    "a zero byte in a name": 'dnn = "a\\u0000b"',
    "a key with a line feed": '"lr\\n[x]" = 1',
    "dotted": "lr.x = 1",
    "a date": "seed = 2024-99-99",
    "twice": "seed = 1\nseed = 2",
    "no such network": 'dnn = "../../etc"',
}


@pytest.fixture
def _log_as_it_was() -> Iterator[None]:
    """The command shows the library's log in its own way."""
    logger = logging.getLogger("oktopk")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.mark.usefixtures("_log_as_it_was")
@pytest.mark.parametrize("kind", HARMFUL)
def test_harmful_texts(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(HARMFUL[kind])
    with pytest.raises(ConfigError, match=r"c\.toml"):
        resolve({}, {}, str(path))
    assert main(["train", "--config", str(path), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("oktopk train: error: ")
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zeros.toml").symlink_to("/dev/zero")
    for name in ("pipe.toml", "zeros.toml"):
        with pytest.raises(ConfigError, match=f"{name}: not a regular file"):
            resolve({}, {}, str(tmp_path / name))
    with open(tmp_path / "long.toml", "wb") as file:
        file.truncate(2**33)
    with pytest.raises(ConfigError, match=r"long\.toml: larger than 1,048,576 bytes"):
        resolve({}, {}, str(tmp_path / "long.toml"))


def refusal(call: Callable[[], object]) -> str | None:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**63, float("nan"), float("inf")])
values = st.recursive(
    st.booleans() | numbers | st.text(max_size=9), lambda inner: st.lists(inner, max_size=2), max_leaves=3
)


@given(st.dictionaries(st.sampled_from(sorted(OPTIONS)), values, max_size=4))
def test_any_value_of_any_option_is_taken_or_named(given: dict[str, object]) -> None:
    said = refusal(lambda: resolve(given, {}))
    assert said is None or any(spell(name) in said for name in (*given, "dataset"))


@given(st.text(max_size=60))
def test_any_text_is_options_or_an_error(text: str) -> None:
    said = refusal(lambda: _options(text, "config x"))
    assert said is None or said.startswith("config x: ")
