"""Import of AN4: a small corpus with everything wrong that can be, and the real one where it is at hand."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from oktopk.train.data.problems import DataError
from oktopk.train.data.shard import steps_per_epoch
from oktopk.train.data.speech.an4 import ImportSummary, import_an4
from oktopk.train.data.speech.audio import SAMPLE_RATE, read_samples
from oktopk.train.data.speech.manifest import read_manifest
from tests.support.paths import DATA
from tests.support.train.an4 import Corpus, pack, small_corpus, sphere, unpack


def import_small(corpus: Corpus, tmp_path: Path, **more: float) -> ImportSummary:
    return import_an4(pack(corpus, tmp_path / "an4.tar.xz"), tmp_path / "out", **more)


@pytest.mark.parametrize("kind", ["w:xz", "w:gz", "w", "folder", "inner folder"])
def test_archives_and_folders(tmp_path: Path, kind: str) -> None:
    if "folder" in kind:
        source = unpack(small_corpus(), tmp_path / "source")
        source = source / "an4" if kind == "inner folder" else source
    else:
        source = pack(small_corpus(), tmp_path / "corpus.tar", kind)
    calls: list[tuple[int, int]] = []
    summary = import_an4(source, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    assert (summary.train.written, summary.val.written, summary.problems) == (3, 1, ())
    assert summary.train.seconds == pytest.approx((16_000 + 20_000 + 15_999) / 16_000)
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    train, val = (read_manifest(tmp_path / "out" / f"an4_{split}_manifest.csv") for split in ("train", "val"))
    assert [said.text for said in train.utterances] == ["YES", "U M SIX", "GO"]
    assert [said.text for said in val.utterances] == ["ERASE C"]
    np.testing.assert_array_equal(read_samples(train.utterances[1].sound), np.arange(20_000) % 1000)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "train", "val", "an4_train_manifest.csv", "an4_val_manifest.csv",
    }  # fmt: skip


def test_short_utterances_leave_training_only(tmp_path: Path) -> None:
    summary = import_small(small_corpus(), tmp_path, min_seconds=1.0)
    assert (summary.train.listed, summary.train.written, summary.train.too_short) == (3, 2, 1)
    assert (summary.val.listed, summary.val.written, summary.val.too_short) == (1, 1, 0)
    assert summary.problems == ()


def test_what_is_broken_is_listed_and_the_rest_is_kept(tmp_path: Path) -> None:
    corpus = small_corpus()
    names = ["cut", "slow", "text", "gone", "silent", "digit", "mute"]
    corpus["an4/etc/an4_train.fileids"] += b"".join(f"x/{name}\n".encode() for name in names)
    corpus["an4/etc/an4_train.fileids"] += b"an4_clstk/f/a1-f\n../../../etc/passwd\n/etc/shadow\n"
    said = {"cut": "A", "slow": "B", "text": "C", "gone": "D", "digit": "ROOM 5", "mute": ""}
    corpus["an4/etc/an4_train.transcription"] += b"".join(
        f"<s> {text} </s> ({name})\n".encode() for name, text in said.items()
    )
    corpus["an4/etc/an4_train.transcription"] += b"no brackets\n<s> NO </s> (a1-f)\n"
    for name in ("silent", "digit", "mute"):
        corpus[f"an4/wav/x/{name}.sph"] = sphere(100)
    corpus["an4/wav/x/cut.sph"] = sphere(100, announced=200)
    corpus["an4/wav/x/slow.sph"] = sphere(100, rate=8000)
    corpus["an4/wav/x/text.sph"] = b"hello\n" * 50
    summary = import_small(corpus, tmp_path)
    assert summary.train.written == 3
    assert [said.text for said in read_manifest(summary.train.manifest).utterances] == ["YES", "U M SIX", "GO"]
    expected = [
        "truncated after 100 of 200",
        "8000 Hz",
        "text, not sound",
        "x/gone.sph is missing",
        "silent has no transcript",
        "digit: unknown characters '5'",
        "mute: the transcript is empty",
        "a1-f is listed twice",
        "'../../../etc/passwd' points outside the corpus",
        "'/etc/shadow' points outside the corpus",
        "not 'text (id)': 'no brackets'",
        "second transcript of a1-f",
    ]
    told = [str(problem) for problem in summary.problems]
    assert len(told) == len(expected)
    for words in expected:
        assert sum(words in line for line in told) == 1, (words, told)


def test_nothing_escapes_from_the_archive(tmp_path: Path) -> None:
    """Names that climb out and links to elsewhere are listed, and leave no file behind."""
    path = pack(small_corpus(), tmp_path / "an4.tar", "w")
    with tarfile.open(path, "a") as archive:
        for name in ("../evil.sph", "an4/../../evil.sph", str(tmp_path / "evil.sph")):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("an4/wav/link.sph")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    summary = import_an4(path, tmp_path / "deep" / "out")
    assert summary.train.written == 3
    assert sum("points outside the archive" in str(problem) for problem in summary.problems) == 3
    assert sum("not a regular file" in str(problem) for problem in summary.problems) == 1
    assert not list(tmp_path.rglob("evil*"))
    assert not list(tmp_path.rglob("link*"))


def test_sources_that_are_not_an4(tmp_path: Path) -> None:
    whole = pack(small_corpus(), tmp_path / "an4.tar.xz").read_bytes()
    (tmp_path / "cut.tar.xz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.tar.xz").write_text("hello")
    (tmp_path / "empty").mkdir()
    pack({"x/readme.txt": b"hello"}, tmp_path / "other.tar.gz", "w:gz")
    for name, message in {
        "cut.tar.xz": "incomplete or damaged tar archive",
        "text.tar.xz": "incomplete or damaged tar archive",
        "other.tar.gz": "not AN4",
        "empty": "not AN4",
        "gone": "no such archive or folder",
    }.items():
        with pytest.raises(DataError, match=f"{name}: {message}"):
            import_an4(tmp_path / name, tmp_path / "out")
        assert not list((tmp_path / "out").rglob("*"))


def test_an_import_that_keeps_nothing_leaves_the_old_manifests(tmp_path: Path) -> None:
    import_small(small_corpus(), tmp_path)
    before = (tmp_path / "out" / "an4_train_manifest.csv").read_text()
    with pytest.raises(DataError, match="no usable utterances in an4_train"):
        import_small(small_corpus(), tmp_path, min_seconds=100.0)
    assert (tmp_path / "out" / "an4_train_manifest.csv").read_text() == before


def test_a_full_disk_is_no_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oktopk.train.data.speech.an4.write_samples", full)
    with pytest.raises(OSError, match="No space left"):
        import_small(small_corpus(), tmp_path)
    assert not list((tmp_path / "out").rglob("*.csv"))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> ImportSummary:
    archive = DATA / "an4.tar.xz"
    if not archive.is_file():
        pytest.skip(f"the real AN4 is not at hand: {archive} (set OKTOPK_DATA to its folder)")
    return import_an4(archive, tmp_path_factory.mktemp("an4"), min_seconds=1.0)


def test_the_real_corpus(real: ImportSummary) -> None:
    """948 and 130 utterances, 897 of at least a second: 14 steps on 8 ranks with batches of 8."""
    assert real.problems == ()
    assert (real.train.listed, real.train.written, real.train.too_short) == (948, 897, 51)
    assert (real.val.listed, real.val.written, real.val.too_short) == (130, 130, 0)
    assert real.val.seconds / 60 == pytest.approx(6.0, abs=0.1)
    assert steps_per_epoch(real.train.written, world=8, batch=8) == 14


def test_the_real_manifests(real: ImportSummary) -> None:
    train, val = read_manifest(real.train.manifest), read_manifest(real.val.manifest)
    assert (len(train.utterances), len(val.utterances), train.problems, val.problems) == (897, 130, (), ())
    texts = {said.sound.stem: said.text for said in train.utterances + val.utterances}
    assert texts["an255-fash-b"] == "U M N Y H SIX"
    assert texts["an406-fcaw-b"] == "RUBOUT G M E F THREE NINE"
    assert min(len(read_samples(said.sound)) for said in train.utterances[::20]) >= SAMPLE_RATE
