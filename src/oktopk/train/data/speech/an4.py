"""Convert AN4 as published (NIST SPHERE files and two lists) to wav files, transcripts and manifests."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from oktopk.utils.files import atomic_path, read_regular

from ..archive import Limits, read_members
from ..problems import DataError, Problem, format_problems
from . import labels
from .audio import SAMPLE_RATE, inspect, read_samples, write_samples
from .manifest import TRAIN_MANIFEST, VAL_MANIFEST, write_manifest

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of utterances done and the total."""

_ENDINGS = (".sph", ".wav")
_LIMITS = Limits(file_bytes=1 << 27, total_bytes=1 << 30, headers=20_000)
"""Ten times what AN4 has; a file may have more than an hour of sound."""
_MOST_SECONDS = 36_000
"""Of all utterances: a few kilobytes of FLAC can hold an hour. AN4 has 2,900."""
_LARGEST_LIST, _MOST_LINES = 1 << 24, 100_000


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
    """One utterance of a list."""

    name: str
    sound: Path
    text: str


@dataclass(frozen=True)
class _Split:
    """One of the corpus's two lists, and where its files go."""

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

    `source` is the archive or its unpacked folder. Training utterances shorter than `min_seconds` are dropped;
    validation keeps all. The summary lists files that cannot be used. The manifests are written last, so that they
    only name files that exist.
    """
    source, destination = Path(source), Path(destination)
    splits = (
        _Split("an4_train", destination / "train", destination / TRAIN_MANIFEST, min_seconds),
        _Split("an4_test", destination / "val", destination / VAL_MANIFEST, 0.0),
    )
    problems: list[Problem] = []
    with _open_source(source, destination, problems) as folder:
        root = _root(folder, source)
        lists = [list(_entries(root, split.list_name, problems)) for split in splits]
        _check_length(source, [entry for entries in lists for entry in entries])
        listed = [len(_read_list(root, f"{split.list_name}.fileids")) for split in splits]
        tick = _make_ticker(progress, sum(map(len, lists)))
        lengths = [
            _convert_all(split, entries, problems, tick) for split, entries in zip(splits, lists, strict=True)
        ]
    for split, seconds in zip(splits, lengths, strict=True):
        if not any(length >= split.min_seconds for length in seconds.values()):
            raise DataError(f"{source}: no usable utterances in {split.list_name}\n{format_problems(problems)}")
    if problems:
        log.warning("%s: %d files were left out\n%s", source, len(problems), format_problems(problems))
    train, val = (_finish(*args) for args in zip(splits, listed, lengths, strict=True))
    return ImportSummary(train, val, tuple(problems))


def _finish(split: _Split, listed: int, lengths: dict[_Entry, float]) -> SplitSummary:
    kept = {entry: seconds for entry, seconds in lengths.items() if seconds >= split.min_seconds}
    write_manifest(split.manifest, map(split.paths, kept))
    return SplitSummary(split.manifest, listed, len(kept), len(lengths) - len(kept), sum(kept.values()))


def _convert_all(
    split: _Split, entries: list[_Entry], problems: list[Problem], tick: Callable[[], None]
) -> dict[_Entry, float]:
    """Convert the utterances that are long enough; return the seconds of every readable one."""
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


def _check_length(source: Path, entries: list[_Entry]) -> None:
    """Refuse a corpus that would fill the disk, before anything is written."""
    seconds = 0.0
    for entry in entries:
        try:
            seconds += inspect(entry.sound).seconds
        except DataError:  # reported when the file is converted
            continue
    if seconds > _MOST_SECONDS:
        raise DataError(
            f"{source}: {seconds:,.0f} seconds of sound by its headers; the limit is {_MOST_SECONDS:,}"
        )


def _make_ticker(progress: Progress | None, total: int) -> Callable[[], None]:
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return tick


def _entries(root: Path, list_name: str, problems: list[Problem]) -> Iterator[_Entry]:
    """Yield the utterances of a list that have a safe path, a sound file and a usable transcript."""
    texts = _transcripts(root, f"{list_name}.transcription", problems)
    seen: set[str] = set()
    for number, identity in enumerate(_read_list(root, f"{list_name}.fileids"), 1):
        name = PurePosixPath(identity).name
        try:
            if not _is_inside(identity):
                raise DataError(f"{identity!r} points outside the corpus")
            if name in seen:
                raise DataError(f"{name} is listed twice")
            if name not in texts:
                raise DataError(f"{name} has no transcript")
            text = labels.normalise(texts[name])
            labels.encode(text, name)
            entry = _Entry(name, _find_sound(root, identity), text)
        except DataError as error:
            problems.append(Problem(f"{list_name}.fileids", str(error), number))
            continue
        seen.add(name)
        yield entry


def _find_sound(root: Path, identity: str) -> Path:
    for ending in _ENDINGS:
        path = root / "wav" / f"{identity}{ending}"
        try:
            if path.is_file():
                return path
        except OSError as error:
            raise DataError(f"{identity[:50]!r}: {error.strerror}") from error
    raise DataError(f"wav/{identity}.sph is missing")


def _transcripts(root: Path, name: str, problems: list[Problem]) -> dict[str, str]:
    """Read the transcripts by utterance; one list has `<s> YES </s> (id)`, the other `YES (id)`."""
    texts: dict[str, str] = {}
    for number, line in enumerate(_read_list(root, name), 1):
        text, identity = _parse_transcript(line)
        if not identity:
            problems.append(Problem(name, f"not 'text (id)': {line[:100]!r}", number))
        elif identity in texts:
            problems.append(Problem(name, f"second transcript of {identity}; using the first", number))
        else:
            texts[identity] = text
    return texts


def _parse_transcript(line: str) -> tuple[str, str]:
    """Split a line into text and utterance name; both are empty if the line is malformed.

    >>> _parse_transcript("<s> YES </s> (a1-f)"), _parse_transcript("ERASE C (t1-g)"), _parse_transcript("none")
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
        text = read_regular(path, _LARGEST_LIST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the list: {error}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > _MOST_LINES:
        raise DataError(f"{path}: {len(lines):,} lines; the limit is {_MOST_LINES:,}")
    return lines


def _root(folder: Path, source: Path) -> Path:
    """Find the folder with etc/ and wav/: the one given, or one inside it."""
    for candidate in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if (candidate / "etc" / "an4_train.fileids").is_file():
            return candidate
    raise DataError(f"{source}: not AN4: etc/an4_train.fileids not found")


@contextmanager
def _open_source(source: Path, destination: Path, problems: list[Problem]) -> Iterator[Path]:
    """Yield the folder itself, or a temporary folder with the content of the archive."""
    if source.is_dir():
        yield source
        return
    if not source.is_file():
        raise DataError(f"{source}: no such archive or folder")
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=destination) as name:
        _unpack(source, Path(name), problems)
        try:
            yield Path(name)
        except DataError as error:  # the temporary folder is gone when the user reads this
            raise DataError(str(error).replace(name, str(source))) from error


def _unpack(source: Path, folder: Path, problems: list[Problem]) -> None:
    """Unpack the regular files that stay inside the folder."""
    for member in read_members(source, _LIMITS, (*_ENDINGS, ".fileids", ".transcription")):
        if not _is_inside(member.name):
            problems.append(Problem(str(source), f"{member.name!r} points outside the archive"))
        elif member.content is None:
            what = f"{member.name!r} is not a regular file of at most {_LIMITS.file_bytes:,} bytes"
            problems.append(Problem(str(source), what))
        else:
            path = folder / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(member.content)


def _is_inside(name: str) -> bool:
    """Whether an untrusted name stays inside the folder it is joined to.

    >>> [_is_inside(name) for name in ("a/b", "./a", "../a", "a/../../b", "/a", "..")]
    [True, True, False, False, False, False]
    """
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name and path.name != ""
