"""oktopk data: what it writes, what it says, and how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from oktopk.cli import main
from oktopk.train.data.speech.manifest import TRAIN_MANIFEST, VAL_MANIFEST, read_manifest
from tests.support.train.an4 import Corpus, pack, small_corpus, unpack

pytest.importorskip("soundfile", reason="reads and writes sound files")


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["data", *map(str, words)])
    return (code, *capsys.readouterr())


def damaged() -> Corpus:
    return small_corpus() | {"an4/wav/an4_clstk/f/a1-f.sph": b"no sound"}


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    unpack(small_corpus(), tmp_path / "source")
    assert said(capsys, "an4", tmp_path / "source", tmp_path / "data")[0] == 0
    return tmp_path / "data"


def test_an4_says_how_much_there_is_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = pack(small_corpus(), tmp_path / "an4.tar.xz")
    code, out, err = said(capsys, "an4", archive, tmp_path / "data", "--min_seconds", 1)
    assert code == 0
    train, val = tmp_path / "data" / TRAIN_MANIFEST, tmp_path / "data" / VAL_MANIFEST
    assert f"train: 2 of 3 utterances, 1 too short, 2 seconds, in {train}\n" in out
    assert f"val: 1 of 1 utterances, 0 seconds, in {val}\n" in out
    assert "left out" not in out + err
    assert len(read_manifest(train).utterances) == 2


def test_an4_without_some_of_its_files_is_usable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = unpack(damaged(), tmp_path / "source")
    code, out, err = said(capsys, "an4", source, tmp_path / "data")
    assert code == 0
    assert "train: 2 of 3 utterances" in out
    assert "1 files were left out" in out
    assert "a1-f" in err


def test_an4_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = unpack(damaged(), tmp_path / "source")
    code, out, _ = said(capsys, "an4", source, tmp_path / "data", "--json")
    row = json.loads(out)
    assert code == 0
    assert row["train"]["written"] == 2
    assert row["train"]["manifest"] == str(tmp_path / "data" / TRAIN_MANIFEST)
    assert [problem["where"] for problem in row["problems"]] == ["a1-f"]


@pytest.mark.parametrize("action", ["an4", "cifar10"])
def test_an_archive_that_is_not_there_is_one_sentence(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, action, tmp_path / "gone.tar", tmp_path / "data")
    assert (code, out) == (1, "")
    assert err == f"oktopk data {action}: error: {tmp_path / 'gone.tar'}: no such archive or folder\n"


def test_a_destination_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = unpack(small_corpus(), tmp_path / "source")
    (tmp_path / "data").write_text("a file")
    code, _, err = said(capsys, "an4", source, tmp_path / "data")
    assert code == 1
    assert err.startswith(f"oktopk data an4: error: {tmp_path / 'data'}")
    assert "Errno" not in err


def foreign(manifest: Path) -> str:
    """The manifest as another machine would have written it; that text."""
    lines = manifest.read_text().splitlines()
    text = "".join(",".join(f"/home/else/an4/{name}" for name in line.split(",")) + "\n" for line in lines)
    manifest.write_text(text)
    return text


def test_foreign_paths_are_repaired_and_the_old_ones_kept(
    imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifests = [imported / TRAIN_MANIFEST, imported / VAL_MANIFEST]
    before = [foreign(manifest) for manifest in manifests]
    code, out, err = said(capsys, "fix-manifest", *manifests)
    assert (code, err) == (0, "")
    for manifest, old, lines in zip(manifests, before, (3, 1), strict=True):
        backup = Path(f"{manifest}.bak")
        assert f"{manifest}: {lines} of {lines} lines repaired; the original is in {backup}\n" in out
        assert backup.read_text() == old
        assert read_manifest(manifest).problems == ()
    code, out, _ = said(capsys, "fix-manifest", *manifests)
    assert code == 0
    assert "0 of 3 lines repaired\n" in out


def test_what_is_not_found_is_named_and_nothing_is_lost(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = imported / TRAIN_MANIFEST
    before = foreign(manifest)
    (imported / "train" / "wav" / "a2-f.wav").rename(tmp_path / "a2-f.wav")
    code, out, _ = said(capsys, "fix-manifest", manifest)
    assert code == 1
    assert "/home/else/an4/train/wav/a2-f.wav: no file with this name found" in out
    assert "--root" in out
    assert Path(f"{manifest}.bak").read_text() == before
    assert "/home/else/an4/train/wav/a2-f.wav" in manifest.read_text()
    assert len(read_manifest(manifest).utterances) == 2


def test_root_is_where_files_are_looked_for(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign(imported / TRAIN_MANIFEST)
    alone = Path(shutil.copy(imported / TRAIN_MANIFEST, tmp_path / "other.csv"))
    (tmp_path / "empty").mkdir()
    assert said(capsys, "fix-manifest", alone, "--root", tmp_path / "empty")[0] == 1
    assert said(capsys, "fix-manifest", alone, "--root", imported)[0] == 0
    assert len(read_manifest(alone).utterances) == 3


def test_a_bad_manifest_does_not_keep_the_next_from_its_repair(
    imported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(imported)
    good = imported / VAL_MANIFEST
    foreign(good)
    code, out, err = said(capsys, "fix-manifest", "gone.csv", good, "--json")
    rows: list[dict[str, Any]] = json.loads(out)["manifests"]
    assert code == 1
    assert "gone.csv: cannot read the manifest" in err
    assert "gone.csv" in rows[0]["error"]
    assert (rows[1]["repaired"], rows[1]["problems"]) == (1, [])


def test_check_says_what_cannot_be_used(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "check", imported)[0] == 0
    (imported / "train" / "wav" / "a2-f.wav").write_bytes(b"no sound")
    code, out, err = said(capsys, "check", imported)
    assert code == 1
    assert f"{imported / TRAIN_MANIFEST}: 2 usable utterances" in out
    assert "1 cannot be used" in out
    assert "a2-f.wav" in err
    code, out, _ = said(capsys, "check", imported, "--json")
    assert code == 1
    assert [row["usable"] for row in json.loads(out)["manifests"]] == [2, 1]


def test_cifar10(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image", reason="reads images")
    for name in (*(f"train/cat/{n}.jpg" for n in range(5)), "test/dog/0.jpg"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (32, 32)).save(path)
    (tmp_path / "source" / "train" / "cat" / "bad.jpg").write_bytes(b"no image")
    code, out, err = said(capsys, "cifar10", tmp_path / "source", tmp_path / "data")
    assert code == 0
    assert f"5 training and 1 test images, in {tmp_path / 'data'}\n" in out
    assert "1 files were left out" in out
    assert "bad.jpg" in err
