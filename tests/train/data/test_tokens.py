"""Streams of tokens: characters and token files, cut into windows whose targets are the next tokens."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.data.problems import DataError
from oktopk.train.data.text.tokens import Windows, embedded_tokens, encode_characters, read_tokens


@given(st.text(min_size=20, max_size=200).filter(lambda text: len(set(text)) > 1))
def test_characters_are_numbered_one_to_one_and_all_are_kept(text: str) -> None:
    found = encode_characters(text, "example")
    numbers = torch.cat([found.train, found.valid]).tolist()
    assert len(found.train) == int(0.9 * len(text))
    assert found.vocabulary == len(set(text))
    assert sorted(set(numbers)) == list(range(found.vocabulary))
    assert len(set(zip(text, numbers, strict=True))) == found.vocabulary


@given(st.integers(1, 9), st.integers(1, 80), st.data())
def test_targets_are_the_next_tokens_at_every_offset(context: int, length: int, data: st.DataObject) -> None:
    windows = Windows(torch.arange(length), context)
    if not len(windows):
        assert length < 2 * context
        return
    offset = data.draw(st.integers(0, context - 1))
    tokens, targets = windows.batch(list(range(len(windows))), offset)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens.flatten(), torch.arange(offset, offset + len(windows) * context))
    assert len(windows) * context > length - 3 * context


def test_a_text_file_alone_is_read_by_any_name_and_input_first(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("abcabcabcabcabc", encoding="utf-8")
    (tmp_path / "bert-vocab.txt").write_text("not this one", encoding="utf-8")
    assert read_tokens(tmp_path).vocabulary == 3
    (tmp_path / "input.txt").write_text("abababababab", encoding="utf-8")
    assert read_tokens(tmp_path).vocabulary == 2


def test_token_files_come_first_and_say_their_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("abababababab", encoding="utf-8")
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(50, dtype="<u2").tofile(tmp_path / "val.bin")
    found = read_tokens(tmp_path)
    assert (len(found.train), len(found.valid), found.vocabulary, found.kind) == (100, 50, 50_257, "tokens")
    (tmp_path / "vocab_size.txt").write_text("100\n")
    assert read_tokens(tmp_path).vocabulary == 100


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "expected train.bin and val.bin, input.txt, or one .txt file; found none"),
        ({"a.txt": b"ab", "b.txt": b"ab"}, "found a.txt, b.txt"),
        ({"a.txt": b"\xff\xfe\xff"}, "not UTF-8 at byte 0"),
        ({"a.txt": b"aaaa"}, "at least two different characters"),
        ({"train.bin": b"\1\0"}, "val.bin: cannot be read"),
        ({"train.bin": b"\1\0", "val.bin": b""}, "val.bin: no tokens"),
        (
            {"train.bin": b"\1\0", "val.bin": b"\1\0", "vocab_size.txt": b"many"},
            "expected a number from 2 to 65536",
        ),
        (
            {"train.bin": b"\1\0", "val.bin": b"\1\0", "vocab_size.txt": b"9" * 5000},
            "expected a number from 2 to 65536",
        ),
        (
            {"train.bin": b"\1\0", "val.bin": b"\1\0", "vocab_size.txt": "²".encode()},
            "expected a number from 2 to 65536",
        ),
        ({"train.bin": b"\7\0", "val.bin": b"\1\0", "vocab_size.txt": b"5"}, "token 7 is outside the vocabulary"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_tokens(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["input.txt", "train.bin", "val.bin", "vocab_size.txt"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    if name != "input.txt":
        for other in ("train.bin", "val.bin"):
            (tmp_path / other).write_bytes(b"\1\0")
        (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}: cannot be read: not a regular file"):
        read_tokens(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read_tokens(tmp_path / "none")


def test_the_embedded_text_is_always_the_same_and_large_enough() -> None:
    first, second = embedded_tokens(), embedded_tokens()
    assert torch.equal(first.train, second.train)
    assert len(first.train) > 200_000
    assert int(first.valid.max()) < first.vocabulary < 40
