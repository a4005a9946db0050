"""Item 18: manifests, and the repair of those that came from another machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.data.problems import DataError
from oktopk.train.data.speech import manifest as module
from oktopk.train.data.speech.manifest import read_manifest, repair, write_manifest


def put(path: Path, content: str | bytes = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return put(tmp_path / "wav" / "a.wav"), put(tmp_path / "txt" / "a.txt", "YES\n")


def test_relative_and_absolute_paths(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "m.csv", f"\ufeffwav/a.wav,txt/a.txt\r\n\r\n{pair[0]},{pair[1]}")
    monkeypatch.chdir("/")  # the working directory must not matter
    read = read_manifest(path)
    assert [(said.sound, said.transcript, said.text, said.line) for said in read.utterances] == [
        (*pair, "YES", 1),
        (*pair, "YES", 3),
    ]
    assert read.problems == ()


def test_what_cannot_be_used_is_listed_with_its_line_and_the_rest_is_kept(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    put(tmp_path / "empty.wav", "")
    put(tmp_path / "empty.txt", " \n")
    put(tmp_path / "binary.txt", b"\xff\xfe\x00")
    bad = {
        "gone.wav,txt/a.txt": "gone.wav: No such file",
        "wav/a.wav,gone.txt": "gone.txt: No such file",
        "empty.wav,txt/a.txt": "empty.wav is empty",
        "wav/a.wav,empty.txt": "empty.txt is empty",
        "wav/a.wav,binary.txt": "binary.txt: not UTF-8",
        "wav,txt/a.txt": "Is a directory",
        "wav/a.wav": "expected 'sound,transcript'",
        "wav/a.wav,": "expected 'sound,transcript'",
        "wav/a.wav,txt/a.txt,more": "expected 'sound,transcript'",
        '"wav/a.wav,txt/a.txt': "not a line of two paths",
        "wav/a.wav,a\0b": "zero byte",
        f"wav/a.wav,{'n' * 5000}": "File name too long",
    }
    path = put(tmp_path / "m.csv", "\n".join(["wav/a.wav,txt/a.txt", *bad, "wav/a.wav,txt/a.txt"]))
    read = read_manifest(path)
    assert [said.line for said in read.utterances] == [1, len(bad) + 2]
    assert [problem.line for problem in read.problems] == list(range(2, len(bad) + 2))
    for problem, expected in zip(read.problems, bad.values(), strict=True):
        assert expected in problem.what
        assert str(problem).startswith(f"{path}:{problem.line}: ")


def test_a_file_that_cannot_be_opened_is_listed(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    put(tmp_path / "secret.wav")
    read = read_manifest(put(tmp_path / "m.csv", "wav/a.wav,txt/a.txt\nsecret.wav/in.wav,txt/a.txt\n"))
    assert "Not a directory" in read.problems[0].what


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the manifest is empty"),
        (b"\n \n", "the manifest is empty"),
        (b"\xff\xff", "not a manifest: byte 0"),
        (b"gone.wav,gone.txt\n", r"(?s)none of the 1 lines.*m\.csv:1: .*gone\.wav"),
    ],
)
def test_a_manifest_of_no_use_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_manifest(put(tmp_path / "m.csv", content))


def test_a_missing_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"m\.csv: cannot read the manifest: No such file"):
        read_manifest(tmp_path / "m.csv")


names = st.text("a Ä,\"'\t;#\\\u2028😀", min_size=1, max_size=12)


@given(st.lists(st.tuples(names, names), min_size=1, max_size=4))
def test_any_path_survives_writing(pairs: list[tuple[str, str]]) -> None:
    for wav, txt in pairs:
        fields = [f"/data/{wav}.wav", f"x/{txt}.txt"]
        assert module._fields(module._line(fields)) == fields


def test_a_written_manifest_moves_with_its_folder(tmp_path: Path) -> None:
    old = tmp_path / "old"
    pair = put(old / "wav" / "a, b.wav"), put(old / "a.txt", "NO")
    write_manifest(old / "m.csv", [pair])
    old.rename(tmp_path / "new")
    assert read_manifest(tmp_path / "new" / "m.csv").utterances[0].sound == tmp_path / "new" / "wav" / "a, b.wav"


def test_a_path_with_a_line_feed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line feed"):
        write_manifest(tmp_path / "m.csv", [(tmp_path / "a\nb.wav", tmp_path / "a.txt")])
    assert list(tmp_path.iterdir()) == []


def test_repair_finds_files_by_the_longest_matching_end(tmp_path: Path) -> None:
    for split in ("train", "val"):
        put(tmp_path / "an4" / split / "wav" / "a.wav", split)
        put(tmp_path / "an4" / split / "txt" / "a.txt", split)
    old = "/home/else/x/train/wav/a.wav,/home/else/x/train/txt/a.txt\nC:\\x\\val\\wav\\a.wav,D:\\val\\txt\\a.txt\n"
    path = put(tmp_path / "m.csv", old)
    done = repair(path, tmp_path)
    assert (done.lines, done.repaired, done.problems) == (2, 2, ())
    assert [said.text for said in read_manifest(path).utterances] == ["train", "val"]
    assert path.read_text().splitlines()[0] == "an4/train/wav/a.wav,an4/train/txt/a.txt"
    assert done.backup == tmp_path / "m.csv.bak"
    assert done.backup.read_text() == old
    again = repair(path, tmp_path)
    assert (again.repaired, again.backup) == (0, None)


def test_repair_loses_nothing(tmp_path: Path) -> None:
    """What is ambiguous, not found or no line at all stays as it was, and is reported."""
    for folder in ("p", "q"):
        put(tmp_path / "data" / folder / "two.wav")
    put(tmp_path / "data" / "one.wav")
    put(tmp_path / "data" / "one.txt", "YES")
    lines = ["/e/two.wav,/e/one.txt", "/e/none.wav,/e/one.txt", "garbage", "data/one.wav,data/one.txt"]
    path = put(tmp_path / "m.csv", "\n".join(lines) + "\n")
    put(tmp_path / "m.csv.bak", "an older one")
    done = repair(path, tmp_path / "data")
    assert path.read_text().splitlines() == [
        "/e/two.wav,data/one.txt",
        "/e/none.wav,data/one.txt",
        "garbage",
        "data/one.wav,data/one.txt",
    ]
    assert [problem.line for problem in done.problems] == [1, 2, 3]
    for expected, problem in zip(("ambiguous", "no file with this name", "expected"), done.problems, strict=True):
        assert expected in problem.what
    assert str(tmp_path / "data" / "q" / "two.wav") in done.problems[0].what
    assert (tmp_path / "m.csv.bak").read_text() == "an older one"
    assert done.backup is not None
    assert done.backup.read_text().splitlines() == lines


def test_repair_writes_absolute_paths_outside_the_manifests_folder(tmp_path: Path) -> None:
    wav, txt = put(tmp_path / "data" / "a.wav"), put(tmp_path / "data" / "a.txt", "GO")
    path = put(tmp_path / "lists" / "m.csv", "/e/a.wav,/e/a.txt\n")
    repair(path, tmp_path / "data")
    assert read_manifest(path).utterances[0].sound == wav
    assert read_manifest(path).utterances[0].transcript == txt


def test_a_repair_that_cannot_be_written_leaves_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "a.wav"), put(tmp_path / "a.txt", "GO")
    path = put(tmp_path / "m.csv", "/e/a.wav,/e/a.txt\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        repair(path, tmp_path)
    assert path.read_text() == "/e/a.wav,/e/a.txt\n"
    assert {left.name for left in tmp_path.iterdir()} == {
        "a.wav",
        "a.txt",
        "m.csv",
    }  # no half-written files either


def test_repair_below_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        repair(put(tmp_path / "m.csv", "/e/a.wav,/e/a.txt\n"), tmp_path / "gone")
