"""What a checkpoint is made of: files of tensors, and a manifest that knows the digest of each."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn

from oktopk.engine.state_dict import redistribute
from oktopk.errors import OkTopkError
from oktopk.utils.files import atomic_path, open_regular, read_regular, sync_folder

FORMAT = 1
MANIFEST = "manifest.json"
OKTOPK, BUFFERS = "oktopk", "buffers"
_CHUNK_BYTES = 2**20
_LARGEST_MANIFEST = 2**26
_PLAIN = (bool, int, float, str, bytes, type(None))
T = TypeVar("T")


class CheckpointError(OkTopkError):
    """A checkpoint cannot be written, or none can be read."""


class Damaged(CheckpointError):
    """This checkpoint cannot be read; an older one may do."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two steps, as one rank has it: dicts of tensors and primitives."""

    step: int
    epoch: int
    shared: Mapping[str, Any]
    """The same on all ranks; only that of rank 0 is written."""
    own: Mapping[str, Any]
    """This rank's. If the number of ranks changes, "oktopk" (the residuals) and "buffers" are shared out anew,
    and everything else comes back as None."""


@dataclass(frozen=True)
class ModelIdentity:
    """What must be the same for a checkpoint to fit: the network's name, and its parameters in their order."""

    dnn: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, dnn: str, model: nn.Module) -> ModelIdentity:
        return cls(dnn, tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters()))

    @property
    def fingerprint(self) -> str:
        return _sha256(json.dumps([self.dnn, self.parameters]).encode())

    def difference(self, saved: ModelIdentity) -> str | None:
        """Why a checkpoint of the `saved` model does not fit this one."""
        if saved.dnn != self.dnn:
            return f"it is of {saved.dnn}, this run trains {self.dnn}"
        here, there = dict(self.parameters), dict(saved.parameters)
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                return (
                    f"{name} is {_shape(there.get(name))} in the checkpoint, {_shape(here.get(name))} in the model"
                )
        return None if saved == self else "it has the model's parameters in another order"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint, as it was written."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What makes a folder a checkpoint. It is written last, and names the files that belong to it."""

    step: int
    epoch: int
    model: ModelIdentity
    shared: FileRecord
    ranks: tuple[FileRecord, ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def content(self) -> dict[str, Any]:
        model = {**asdict(self.model), "fingerprint": self.model.fingerprint}
        return {"format": FORMAT, "world": self.world, **asdict(self), "model": model}

    @property
    def seal(self) -> str:
        return _seal(self.content)

    def write(self, folder: Path) -> None:
        text = json.dumps({**self.content, "sha256": self.seal}, indent=1)
        write_hashed(folder / MANIFEST, lambda file: file.write(text.encode()))


def _seal(content: Mapping[str, Any]) -> str:
    """A digest of the manifest's other entries, so that a wrong digit in it is noticed."""
    return _sha256(json.dumps(content, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    try:
        content = json.loads(read_regular(folder / MANIFEST, _LARGEST_MANIFEST))
        seal = _field(content, "sha256", str)
        right = seal == _seal({name: value for name, value in content.items() if name != "sha256"})
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from error
    if not right:
        raise Damaged(f"{MANIFEST} is not what was written: its digest does not fit")
    if (version := _field(content, "format", int)) > FORMAT:
        raise CheckpointError(
            f"{folder} has format {version}, this version of oktopk reads up to {FORMAT}: use a newer oktopk"
        )
    if version != FORMAT:
        raise Damaged(f"{MANIFEST}: there is no format {version}")
    model = _field(content, "model", dict)
    parameters = [(name, tuple(shape)) for name, shape in _pairs(_field(model, "parameters", list))]
    manifest = Manifest(
        _field(content, "step", int),
        _field(content, "epoch", int),
        ModelIdentity(_field(model, "dnn", str), tuple(parameters)),
        _file_record(_field(content, "shared", dict)),
        tuple(_file_record(entry) for entry in _field(content, "ranks", list)),
    )
    if not manifest.ranks or _field(content, "world", int) != manifest.world:
        raise Damaged(f"{MANIFEST} contradicts itself: world {content['world']}, {manifest.world} ranks")
    return manifest


def _field(entry: Any, name: str, kind: type[T]) -> T:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Damaged(f"{MANIFEST}: {name} should be of type {kind.__name__}, is {str(value)[:50]!r}")
    return value


def _pairs(entries: list[Any]) -> Iterator[tuple[str, list[int]]]:
    for entry in entries:
        match entry:
            case [str(name), list(shape)] if all(type(size) is int for size in shape):
                yield name, shape
            case _:
                raise Damaged(f"{MANIFEST}: {str(entry)[:50]!r} is not a parameter's name and shape")


def _file_record(entry: Any) -> FileRecord:
    record = FileRecord(_field(entry, "name", str), _field(entry, "size", int), _field(entry, "sha256", str))
    if not re.fullmatch(r"[a-z]+[-.\w]*\.pt", record.name):  # nothing that leads out of the folder
        raise Damaged(f"{MANIFEST}: {record.name[:50]!r} is not the name of a checkpoint's file")
    return record


class HashingFile:
    """Takes the digest of what is written on its way: nothing is read again or held twice in memory, and what
    the disk then does to it will be noticed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            count = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(data)
        self.size += count
        return count

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def write_hashed(path: Path, write: Callable[[HashingFile], object]) -> FileRecord:
    """A file that is there whole or not at all, even after a power cut."""
    with atomic_path(path) as draft, open(draft, "wb") as raw:
        file = HashingFile(raw)
        try:
            write(file)
        except RuntimeError as error:  # torch.save reports a full disk as an unexpected position
            if file.error is not None:
                raise file.error from error
            raise
        file.sync()
    sync_folder(path.parent)
    return FileRecord(path.name, file.size, file.sha256)


def write_tensors(path: Path, content: Mapping[str, Any]) -> FileRecord:
    plain = _plain(content, path.stem)
    return write_hashed(path, lambda file: torch.save(plain, file))  # type: ignore[arg-type]


def _plain(value: Any, place: str) -> Any:
    """The value, as torch.load(weights_only=True) will read it; what it would refuse is refused here already."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes  # a view would be saved with all it is part of
        return tensor if whole else tensor.clone()
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(entry, f"{place}[{key!r}]") for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(entry, f"{place}[{i}]") for i, entry in enumerate(value))
    if type(value) not in _PLAIN:
        raise TypeError(f"{place} is of type {type(value).__qualname__}: checkpoints hold tensors and primitives")
    return value


def read_tensors(folder: Path, record: FileRecord) -> dict[str, Any]:
    """What is in a file, if that is what was written. No code in it is run."""
    try:
        with open_regular(folder / record.name) as file:
            _verify(file, record)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (Damaged, MemoryError):
        raise
    except Exception as error:  # of many kinds, for a file that was made to look right
        raise Damaged(f"{record.name} cannot be read: {str(error)[:300]}") from error
    if not isinstance(content, dict):
        raise Damaged(f"{record.name} holds a {type(content).__name__}, not a dict")
    return content


def _verify(file: BinaryIO, record: FileRecord) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != record.size:
        raise Damaged(f"{record.name} has {size} bytes, {record.size} were written")
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    if digest.hexdigest() != record.sha256:
        raise Damaged(f"{record.name} is not what was written: its digest does not fit")
    file.seek(0)


def reshare(parts: Iterable[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """What one of `world` ranks has of its own, from that of all ranks of an earlier run, one at a time.

    Residuals go through oktopk.redistribute. Buffers are the mean over ranks, those that count are rank 0's.
    """
    names: dict[str, None] = {}
    buffers: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    count = 0

    def states() -> Iterator[Mapping[str, Any]]:
        nonlocal count
        for count, part in enumerate(parts, start=1):  # noqa: B007 - used below
            names.update(dict.fromkeys(part))
            for name, buffer in part[BUFFERS].items():
                buffers.setdefault(name, buffer)
                if buffer.is_floating_point():
                    sums[name] = sums.get(name, 0) + buffer.double()
            yield part[OKTOPK]

    try:
        oktopk = redistribute(states(), rank, world)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"the files of the ranks do not fit together: {error}") from error
    means = {name: (total / count).to(buffers[name].dtype) for name, total in sums.items()}
    return {**dict.fromkeys(names), OKTOPK: oktopk, BUFFERS: buffers | means}
