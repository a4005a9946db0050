"""AN4 as it is published (NIST SPHERE files and two lists) to wav files, transcripts and manifests."""

from __future__ import annotations

import logging
import lzma
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from oktopk.utils.files import atomic_path, read_regular

from ..problems import DataError, Problem, listing
from . import labels
from .audio import SAMPLE_RATE, read_samples, write_samples
from .manifest import TRAIN_MANIFEST, VAL_MANIFEST, write_manifest

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with how many utterances are done and how many there are."""

_DAMAGED = (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError)
_ENDINGS = (".sph", ".wav")
_LARGEST = 1 << 27
"""Bytes of a file in the archive: more than an hour of sound. A small archive can hold any number of zeros."""


@dataclass(frozen=True)
class SplitSummary:
    manifest: Path
    listed: int
    written: int
    too_short: int
    seconds: float


@dataclass(frozen=True)
class ImportSummary:
    train: SplitSummary
    val: SplitSummary
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class _Entry:
    """One utterance of a list; without a text if the list cannot be believed about it."""

    name: str
    sound: Path
    text: str


@dataclass(frozen=True)
class _Split:
    """One of the corpus's two lists, and what becomes of it."""

    list_name: str
    folder: Path
    manifest: Path
    min_seconds: float

    def paths(self, entry: _Entry) -> tuple[Path, Path]:
        return self.folder / "wav" / f"{entry.name}.wav", self.folder / "txt" / f"{entry.name}.txt"


def import_an4(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    min_seconds: float = 0.0,
    progress: Progress | None = None,
) -> ImportSummary:
    """Write {train,val}/{wav,txt} and both manifests below `destination`.

    `source` is the archive or the folder that was unpacked from it. Training utterances shorter than `min_seconds`
    are left out; validation keeps all. Files that cannot be used are listed in the summary, the rest is kept.
    The manifests come last: they name only files that are there.
    """
    source, destination = Path(source), Path(destination)
    splits = (
        _Split("an4_train", destination / "train", destination / TRAIN_MANIFEST, min_seconds),
        _Split("an4_test", destination / "val", destination / VAL_MANIFEST, 0.0),
    )
    problems: list[Problem] = []
    with _unpacked(source, destination, problems) as folder:
        root = _root(folder, source)
        lists = [list(_entries(root, split.list_name, problems)) for split in splits]
        listed = [len(_read_list(root, f"{split.list_name}.fileids")) for split in splits]
        tick = _ticker(progress, sum(map(len, lists)))
        lengths = [
            _convert_all(split, entries, problems, tick) for split, entries in zip(splits, lists, strict=True)
        ]
    for split, seconds in zip(splits, lengths, strict=True):
        if not any(length >= split.min_seconds for length in seconds.values()):
            raise DataError(f"{source}: no usable utterances in {split.list_name}\n{listing(problems)}")
    if problems:
        log.warning("%s: %d files were left out\n%s", source, len(problems), listing(problems))
    train, val = (_finish(*args) for args in zip(splits, listed, lengths, strict=True))
    return ImportSummary(train, val, tuple(problems))


def _finish(split: _Split, listed: int, lengths: dict[_Entry, float]) -> SplitSummary:
    kept = {entry: seconds for entry, seconds in lengths.items() if seconds >= split.min_seconds}
    write_manifest(split.manifest, map(split.paths, kept))
    return SplitSummary(split.manifest, listed, len(kept), len(lengths) - len(kept), sum(kept.values()))


def _convert_all(
    split: _Split, entries: list[_Entry], problems: list[Problem], tick: Callable[[], None]
) -> dict[_Entry, float]:
    """Write what is long enough; the length of everything that could be read, in seconds."""
    lengths: dict[_Entry, float] = {}
    for entry in entries:
        try:
            samples = read_samples(entry.sound)
        except DataError as error:
            problems.append(Problem(entry.name, str(error)))
        else:
            lengths[entry] = len(samples) / SAMPLE_RATE
            if lengths[entry] >= split.min_seconds:
                wav, txt = split.paths(entry)
                write_samples(wav, samples)
                with atomic_path(txt) as draft:
                    draft.write_text(entry.text + "\n", encoding="utf-8")
        tick()
    return lengths


def _ticker(progress: Progress | None, total: int) -> Callable[[], None]:
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return tick


def _entries(root: Path, list_name: str, problems: list[Problem]) -> Iterator[_Entry]:
    """The utterances of a list that have one safe path, one sound file and one usable transcript."""
    texts = _transcripts(root, f"{list_name}.transcription", problems)
    seen: set[str] = set()
    for number, identity in enumerate(_read_list(root, f"{list_name}.fileids"), 1):
        name = PurePosixPath(identity).name
        try:
            if not _is_inside(identity):
                raise DataError(f"{identity!r} leads out of the corpus")
            if name in seen:
                raise DataError(f"{name} is listed twice")
            if name not in texts:
                raise DataError(f"{name} has no transcript")
            text = labels.normalise(texts[name])
            labels.encode(text, name)
            entry = _Entry(name, _sound_of(root, identity), text)
        except DataError as error:
            problems.append(Problem(f"{list_name}.fileids", str(error), number))
            continue
        seen.add(name)
        yield entry


def _sound_of(root: Path, identity: str) -> Path:
    for ending in _ENDINGS:
        path = root / "wav" / f"{identity}{ending}"
        try:
            if path.is_file():
                return path
        except OSError as error:
            raise DataError(f"{identity[:50]!r}: {error.strerror}") from error
    raise DataError(f"wav/{identity}.sph is missing")


def _transcripts(root: Path, name: str, problems: list[Problem]) -> dict[str, str]:
    """From the name of the utterance to its text; `<s> YES </s> (id)` in one list, `YES (id)` in the other."""
    texts: dict[str, str] = {}
    for number, line in enumerate(_read_list(root, name), 1):
        text, identity = _said(line)
        if not identity:
            problems.append(Problem(name, f"not 'text (id)': {line[:100]!r}", number))
        elif identity in texts:
            problems.append(Problem(name, f"a second transcript of {identity}; the first one counts", number))
        else:
            texts[identity] = text
    return texts


def _said(line: str) -> tuple[str, str]:
    """Text and name of an utterance; no name if the line has none.

    >>> _said("<s> YES </s> (a1-f)"), _said("ERASE C (t1-g)"), _said("no brackets")
    (('YES', 'a1-f'), ('ERASE C', 't1-g'), ('', ''))
    """
    before, mark, after = line.rpartition("(")
    identity = after.removesuffix(")")
    if not mark or identity == after or ")" in identity or identity.split() != [identity]:
        return "", ""
    return before.strip().removeprefix("<s>").removesuffix("</s>").strip(), identity


def _read_list(root: Path, name: str) -> list[str]:
    path = root / "etc" / name
    try:
        text = read_regular(path, _LARGEST).decode("utf-8")
        return [line.strip() for line in text.splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the corpus's list cannot be read: {error}") from error


def _root(folder: Path, source: Path) -> Path:
    """The folder that holds etc/ and wav/: the one given, or one in it."""
    for candidate in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if (candidate / "etc" / "an4_train.fileids").is_file():
            return candidate
    raise DataError(f"{source}: not AN4: etc/an4_train.fileids is not in it")


@contextmanager
def _unpacked(source: Path, destination: Path, problems: list[Problem]) -> Iterator[Path]:
    """The folder itself, or what is in the archive, in a folder that goes away afterwards."""
    if source.is_dir():
        yield source
        return
    if not source.is_file():
        raise DataError(f"{source}: no such archive or folder")
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=destination) as name:
        try:
            _unpack(source, Path(name), problems)
        except _DAMAGED as error:
            raise DataError(f"{source}: not a whole tar archive: {error}") from error
        try:
            yield Path(name)
        except DataError as error:  # the folder is gone when it is read
            raise DataError(str(error).replace(name, str(source))) from error


def _unpack(source: Path, folder: Path, problems: list[Problem]) -> None:
    """Regular files that stay below the folder, read once from front to back: xz cannot seek."""
    with tarfile.open(source, "r|*") as archive:
        for member in archive:
            if member.isdir() or not member.name.endswith((*_ENDINGS, ".fileids", ".transcription")):
                continue
            if not _is_inside(member.name):
                problems.append(Problem(str(source), f"{member.name!r} leads out of the archive"))
                continue
            content = archive.extractfile(member) if member.isreg() and member.size <= _LARGEST else None
            if content is None:
                what = f"{member.name!r} is not a regular file of at most {_LARGEST:,} bytes"
                problems.append(Problem(str(source), what))
                continue
            path = folder / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, open(path, "wb") as file:
                shutil.copyfileobj(content, file)


def _is_inside(name: str) -> bool:
    """Whether a name from somebody else stays below the folder it is put in.

    >>> [_is_inside(name) for name in ("a/b", "./a", "../a", "a/../../b", "/a", "..")]
    [True, True, False, False, False, False]
    """
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name and path.name != ""
