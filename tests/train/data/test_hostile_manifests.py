"""Lists of utterances that were made to do harm: a problem for the line, never a traceback, a wait, a way out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oktopk.cli import main
from oktopk.train.data.problems import DataError
from oktopk.train.data.speech.manifest import TRAIN_MANIFEST, VAL_MANIFEST, read_manifest, repair

GOOD = "in/a.wav,in/a.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set in a folder, and a secret beside it."""
    inside = tmp_path / "data" / "in"
    inside.mkdir(parents=True)
    (inside / "a.wav").write_bytes(b"x")
    (inside / "a.txt").write_text("YES")
    (tmp_path / "secret.wav").write_bytes(b"secret")
    (tmp_path / "secret.txt").write_text("SECRET")
    return tmp_path / "data"


def problem_of(folder: Path, line: str) -> str:
    (folder / "m.csv").write_bytes(f"{GOOD}\n{line}\n".encode("utf-8", "surrogateescape"))
    read = read_manifest(folder / "m.csv")
    assert [said.line for said in read.utterances] == [1]
    (problem,) = read.problems
    assert "SECRET" not in str(problem)
    return problem.what


CLIMBING = [
    "../secret.wav,in/a.txt",
    "in/a.wav,../secret.txt",
    "in/../../secret.wav,in/a.txt",
    "./../secret.wav,in/a.txt",
    "in/..//../data/../secret.wav,in/a.txt",
]


@pytest.mark.parametrize("line", CLIMBING)
def test_a_relative_path_stays_below_the_folder(folder: Path, line: str) -> None:
    assert "points outside the manifest's folder" in problem_of(folder, line)


LINKED = ["file.wav,in/a.txt", "in/a.wav,file.txt", "folder/secret.wav,in/a.txt", "circle/a.wav,in/a.txt"]


@pytest.mark.parametrize("line", LINKED)
def test_a_link_does_not_lead_out_either(folder: Path, line: str) -> None:
    (folder / "file.wav").symlink_to("../secret.wav")
    (folder / "file.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "folder").symlink_to("..")
    (folder / "circle").symlink_to("circle")
    what = problem_of(folder, line)
    assert "points outside the manifest's folder" in what or "circle" in line


def test_links_that_stay_are_followed_and_the_folder_may_be_one(folder: Path) -> None:
    (folder / "b.wav").symlink_to("in/a.wav")
    (folder / "m.csv").write_text("b.wav,in/a.txt\n")
    other = folder.with_name("other")
    other.symlink_to(folder)
    assert [said.text for said in read_manifest(other / "m.csv").utterances] == ["YES"]


def test_repair_writes_where_a_link_that_leads_out_lies(folder: Path) -> None:
    """Whoever asks for it has put the link there."""
    (folder / "file.wav").symlink_to("../secret.wav")
    (folder / "m.csv").write_text("file.wav,in/a.txt\n")
    assert repair(folder / "m.csv", folder).problems == ()
    assert (folder / "m.csv").read_text() == f"{folder / 'file.wav'},in/a.txt\n"
    assert len(read_manifest(folder / "m.csv").utterances) == 1


def test_a_climbing_path_is_not_found_for_repair_but_searched(folder: Path) -> None:
    (folder / "m.csv").write_text("../secret.wav,../in/a.txt\n")
    done = repair(folder / "m.csv", folder)
    assert [problem.what for problem in done.problems] == ["../secret.wav: no file with this name found"]
    assert (folder / "m.csv").read_text() == "../secret.wav,in/a.txt\n"


def test_pipes_and_devices_are_not_read(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("/dev/zero")
    for name in ("pipe", str(folder / "link"), "/dev/zero", "/dev/stdin"):
        for line in (f"{name},in/a.txt", f"in/a.wav,{name}"):
            assert "not a regular file" in problem_of(folder, line), line


def test_a_transcript_without_end_is_not_read_to_its_end(folder: Path) -> None:
    with open(folder / "long.txt", "wb") as file:
        file.truncate(2**33)
    assert "larger than 1,048,576 bytes" in problem_of(folder, "in/a.wav,long.txt")


def test_a_manifest_that_is_a_device_or_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.csv")
    (folder / "zeros.csv").symlink_to("/dev/zero")
    for name in ("pipe.csv", "zeros.csv"):
        for read in (read_manifest, lambda path: repair(path, folder)):
            with pytest.raises(DataError, match="cannot read the manifest: not a regular file"):
                read(folder / name)


@pytest.mark.parametrize(
    "line",
    [
        "in/a.wav,in/\0a.txt",
        "in/a.wav," + "a/" * 3000,
        "in/a.wav," + "a" * 200_000,
        "in/a.wav,in/a.wav/b.txt",
        '"' * 999,
        "," * 999,
        "\udcff\udcfe,in/a.txt",
        "1e999,-1",
        "{},[]",
    ],
    ids=str.__len__,
)
def test_nonsense_costs_its_line_only(folder: Path, line: str) -> None:
    if "\udcff" in line:
        (folder / "m.csv").write_bytes(line.encode("utf-8", "surrogateescape"))
        with pytest.raises(DataError, match="not UTF-8 text"):
            read_manifest(folder / "m.csv")
    else:
        assert problem_of(folder, line)


@given(st.lists(st.text(max_size=30) | st.sampled_from([GOOD, "../x,y", "/,/", "~,~", "in,in"]), max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_lines_or_an_error(folder: Path, lines: list[str]) -> None:
    (folder / "m.csv").write_text("\n".join(lines), encoding="utf-8", newline="")
    try:
        read = read_manifest(folder / "m.csv")
        repair(folder / "m.csv", folder)
    except DataError:
        return
    assert all(said.sound.resolve().is_relative_to(folder) for said in read.utterances)


def test_the_command_says_it_in_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (TRAIN_MANIFEST, VAL_MANIFEST):
        (folder / name).write_text("../secret.wav,../secret.txt\n")
    assert main(["data", "check", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "points outside the manifest's folder" in said
    assert "Traceback" not in said
