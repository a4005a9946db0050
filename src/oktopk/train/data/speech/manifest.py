"""Manifests: one line per utterance with the path of the sound and of its transcript.

    train/wav/an251-fash-b.wav,train/txt/an251-fash-b.txt

Relative paths start at the manifest's folder and must stay inside it, links included; files elsewhere have
absolute paths.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oktopk.utils.files import open_regular, read_regular, write_atomically

from ..problems import DataError, Problem, format_problems

TRAIN_MANIFEST = "an4_train_manifest.csv"
VAL_MANIFEST = "an4_val_manifest.csv"
_LARGEST = 1 << 28
_LARGEST_TRANSCRIPT = 1 << 20


@dataclass(frozen=True)
class Utterance:
    sound: Path
    transcript: Path
    text: str
    line: int


@dataclass(frozen=True)
class Manifest:
    path: Path
    utterances: tuple[Utterance, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Repair:
    """What `repair` did; `backup` is None if nothing changed."""

    lines: int
    repaired: int
    problems: tuple[Problem, ...]
    backup: Path | None


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the usable lines; every other line becomes a Problem."""
    path = Path(path)
    utterances: list[Utterance] = []
    problems: list[Problem] = []
    for number, line in _lines(path):
        try:
            sound, transcript = (_resolve(path.parent, name) for name in _fields(line))
            _check_sound(sound)
            utterances.append(Utterance(sound, transcript, _read_text(transcript), number))
        except DataError as error:
            problems.append(Problem(str(path), str(error), number))
    if not utterances:
        raise DataError(f"{path}: none of the {len(problems)} lines can be used\n{format_problems(problems)}")
    return Manifest(path, tuple(utterances), tuple(problems))


def write_manifest(path: str | os.PathLike[str], pairs: Iterable[tuple[Path, Path]]) -> None:
    """Write a manifest; paths inside its folder are relative, so that the folder can be moved."""
    path = Path(path)
    lines = [_line([_relative(name, path.parent) for name in pair]) for pair in pairs]
    write_atomically(path, "".join(line + "\n" for line in lines).encode())


def repair(manifest: str | os.PathLike[str], root: str | os.PathLike[str]) -> Repair:
    """Replace the paths of another machine: search `root` for the file with the longest matching path suffix.

    A path to an existing file stays, unless it leaves the manifest's folder. A line stays unchanged and is
    reported if no file, or more than one, matches. The original manifest is kept as `.bak`.
    """
    path, root = Path(manifest), Path(root)
    files = _files_by_name(root)
    lines: list[str] = []
    problems: list[Problem] = []
    repaired = 0
    for number, line in _lines(path):
        try:
            old = _fields(line)
        except DataError as error:
            problems.append(Problem(str(path), str(error), number))
            lines.append(line)
            continue
        new = []
        for name in old:
            found = _find(name, path.parent, files)
            if isinstance(found, str):
                problems.append(Problem(str(path), found, number))
            new.append(_relative(found, path.parent) if isinstance(found, Path) else name)
        repaired += new != old
        lines.append(_line(new) if new != old else line)
    backup = None
    if repaired:
        backup = _keep_copy(path)
        write_atomically(path, "".join(line + "\n" for line in lines).encode())
    return Repair(len(lines), repaired, tuple(problems), backup)


def _lines(path: Path) -> list[tuple[int, str]]:
    """Read the non-empty lines, with their numbers."""
    try:
        text = read_regular(path, _LARGEST).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot read the manifest: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a manifest: byte {error.start} is not UTF-8 text") from error
    found = [(n, line.rstrip("\r")) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not found:
        raise DataError(f"{path}: the manifest is empty; it needs one line 'sound,transcript' per utterance")
    return found


def _fields(line: str) -> list[str]:
    try:
        fields = [field.strip() for field in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise DataError(f"not a line of two paths: {error}") from error
    if len(fields) != 2 or not all(fields):
        raise DataError(f"expected 'sound,transcript', got {line!r}")
    if "\0" in line:
        raise DataError("a path holds a zero byte")
    return fields


def _line(fields: Sequence[str]) -> str:
    if any(letter in field for field in fields for letter in "\r\n\0"):
        raise DataError(f"a manifest cannot hold a path with a line feed: {list(fields)}")
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(fields)
    return out.getvalue()


def _below(folder: Path, name: str) -> Path:
    return folder / name  # an absolute name stays one


def _resolve(folder: Path, name: str) -> Path:
    if _escapes(folder, name):
        raise DataError(f"{name!r} points outside the manifest's folder; try `oktopk data fix-manifest`")
    return _below(folder, name)


def _escapes(folder: Path, name: str) -> bool:
    """Whether a relative name leaves the folder, by `..` or through a link."""
    if Path(name).is_absolute():
        return False
    return ".." in Path(name).parts or not _stays_below(folder, _below(folder, name))


def _stays_below(folder: Path, path: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _check_sound(path: Path) -> None:
    try:
        with open_regular(path) as file:
            if not file.read(1):
                raise DataError(f"{path} is empty")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _read_text(path: Path) -> str:
    try:
        text = read_regular(path, _LARGEST_TRANSCRIPT).decode("utf-8").strip()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text") from error
    if not text:
        raise DataError(f"{path} is empty")
    return text


def _relative(path: Path | str, folder: Path) -> str:
    """Path relative to the folder; absolute if the file, or the target of a link, is outside."""
    path, folder = Path(path).absolute(), folder.absolute()
    inside = path.is_relative_to(folder) and _stays_below(folder, path)
    return path.relative_to(folder).as_posix() if inside else str(path)


def _files_by_name(root: Path) -> dict[str, list[Path]]:
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    files: dict[str, list[Path]] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            files.setdefault(name, []).append(Path(folder, name))
    return files


def _find(name: str, folder: Path, files: dict[str, list[Path]]) -> Path | str | None:
    """Return the new path, None if the name is already right, or a message if no single file matches."""
    if not _escapes(folder, name) and _is_file(_below(folder, name)):
        return None
    wanted = name.replace("\\", "/").split("/")
    matches = [(_common_end(wanted, file.absolute().parts), file) for file in files.get(wanted[-1], [])]
    longest = max((length for length, _ in matches), default=0)
    best = sorted(file for length, file in matches if length == longest)
    if not best:
        return f"{name}: no file with this name found"
    if len(best) > 1:
        return f"{name}: ambiguous: {', '.join(map(str, best))}"
    return best[0]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # for example, a name that is too long
        return False


def _common_end(a: Sequence[str], b: Sequence[str]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


def _keep_copy(path: Path) -> Path:
    """Copy the file to the first free name of `name.bak`, `name.bak2`, … and return that path."""
    content, number = path.read_bytes(), 1
    while (copy := path.with_name(f"{path.name}.bak{number if number > 1 else ''}")).exists():
        number += 1
    write_atomically(copy, content)
    return copy
