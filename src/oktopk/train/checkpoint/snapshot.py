"""The files of a checkpoint: tensors, and a manifest with the digest of each file."""

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

from oktopk import redistribute
from oktopk.errors import OkTopkError
from oktopk.utils.files import atomic_path, open_regular, read_regular, sync_folder

FORMAT = 1
MANIFEST = "manifest.json"
OKTOPK, BUFFERS, OPTIMIZER = "oktopk", "buffers", "optimizer"
_CHUNK_BYTES = 2**20
_LARGEST_MANIFEST = 2**26
_PLAIN = (bool, int, float, str, bytes, type(None))
T = TypeVar("T")


class CheckpointError(OkTopkError):
    """A checkpoint cannot be written or read."""


class DamagedCheckpoint(CheckpointError):
    """This checkpoint is damaged; an older one may be intact."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two steps on one rank: dicts of tensors and primitives."""

    step: int
    epoch: int
    shared: Mapping[str, Any]
    """State that is the same on all ranks; rank 0 writes it."""
    own: Mapping[str, Any]
    """This rank's own state. If the number of ranks changes, "oktopk" (the residuals), "buffers" and, if there is
    one, "optimizer" are redistributed, and everything else becomes None.
    """


@dataclass(frozen=True)
class ModelIdentity:
    """What a checkpoint must match: the name of the network, its parameters in order, and over how many ranks each
    replica is sharded."""

    dnn: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    shard: int = 1

    @classmethod
    def of(cls, dnn: str, model: nn.Module, shard: int = 1) -> ModelIdentity:
        shapes = ((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())
        return cls(dnn, tuple(shapes), shard)

    @property
    def fingerprint(self) -> str:
        return _sha256(json.dumps([self.dnn, self.parameters]).encode())

    def difference(self, saved: ModelIdentity) -> str | None:
        """Return why a checkpoint of the `saved` model does not match this one, or None."""
        if saved.dnn != self.dnn:
            return f"it holds {saved.dnn}, but this run trains {self.dnn}"
        here, there = dict(self.parameters), dict(saved.parameters)
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                return (
                    f"{name} is {_shape(there.get(name))} in the checkpoint, {_shape(here.get(name))} in the model"
                )
        if saved.parameters != self.parameters:
            return "its parameters are in another order"
        if saved.shard != self.shard:
            return f"it was saved with --shard {saved.shard}, this run has --shard {self.shard}; {ONLY_WEIGHTS}"
        return None


ONLY_WEIGHTS = "its weights can be used: --pretrain RUN"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint: its name, size and digest."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Makes a folder a checkpoint: it is written last, and lists the checkpoint's files."""

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
    def digest(self) -> str:
        return _digest(self.content)

    def write(self, folder: Path) -> None:
        text = json.dumps({**self.content, "sha256": self.digest}, indent=1)
        write_hashed(folder / MANIFEST, lambda file: file.write(text.encode()))


def _digest(content: Mapping[str, Any]) -> str:
    """Digest of the manifest's other entries, to detect damage in the manifest itself."""
    return _sha256(json.dumps(content, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    try:
        content = json.loads(read_regular(folder / MANIFEST, _LARGEST_MANIFEST))
        written = _field(content, "sha256", str)
        valid = written == _digest({name: value for name, value in content.items() if name != "sha256"})
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {error}") from error
    if not valid:
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: its digest does not match")
    if (version := _field(content, "format", int)) > FORMAT:
        raise CheckpointError(
            f"{folder} has format {version}, but this version of oktopk reads up to {FORMAT}: use a newer oktopk"
        )
    if version != FORMAT:
        raise DamagedCheckpoint(f"{MANIFEST}: unknown format {version}")
    model = _field(content, "model", dict)
    parameters = [(name, tuple(shape)) for name, shape in _pairs(_field(model, "parameters", list))]
    manifest = Manifest(
        _field(content, "step", int),
        _field(content, "epoch", int),
        ModelIdentity(_field(model, "dnn", str), tuple(parameters), _field({"shard": 1, **model}, "shard", int)),
        _file_record(_field(content, "shared", dict)),
        tuple(_file_record(entry) for entry in _field(content, "ranks", list)),
    )
    if not manifest.ranks or _field(content, "world", int) != manifest.world:
        raise DamagedCheckpoint(f"{MANIFEST} is inconsistent: world {content['world']}, {manifest.world} ranks")
    return manifest


def _field(entry: Any, name: str, kind: type[T]) -> T:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DamagedCheckpoint(f"{MANIFEST}: {name} should be of type {kind.__name__}, is {str(value)[:50]!r}")
    return value


def _pairs(entries: list[Any]) -> Iterator[tuple[str, list[int]]]:
    for entry in entries:
        match entry:
            case [str(name), list(shape)] if all(type(size) is int for size in shape):
                yield name, shape
            case _:
                raise DamagedCheckpoint(f"{MANIFEST}: {str(entry)[:50]!r} is not a parameter's name and shape")


def _file_record(entry: Any) -> FileRecord:
    record = FileRecord(_field(entry, "name", str), _field(entry, "size", int), _field(entry, "sha256", str))
    if not re.fullmatch(r"[a-z]+[-.\w]*\.pt", record.name):  # no path out of the folder
        raise DamagedCheckpoint(f"{MANIFEST}: {record.name[:50]!r} is not the name of a checkpoint's file")
    return record


class HashingFile:
    """Computes the digest while writing, so that nothing is read again or held twice in memory."""

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
    """Write a file atomically, even across a power cut."""
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
    """Convert a value to what torch.load(weights_only=True) can read; refuse anything else."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        whole = (
            tensor.untyped_storage().nbytes() == tensor.nbytes
        )  # torch.save would store all of a view's storage
        return tensor if whole else tensor.clone()
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(entry, f"{place}[{key!r}]") for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(entry, f"{place}[{i}]") for i, entry in enumerate(value))
    if type(value) not in _PLAIN:
        raise TypeError(f"{place} is of type {type(value).__qualname__}: checkpoints hold tensors and primitives")
    return value


def read_tensors(folder: Path, record: FileRecord) -> dict[str, Any]:
    """Read a file after checking its digest. No code in it is executed."""
    try:
        with open_regular(folder / record.name) as file:
            _verify(file, record)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (DamagedCheckpoint, MemoryError):
        raise
    except Exception as error:  # a crafted file can raise almost anything
        raise DamagedCheckpoint(f"{record.name} cannot be read: {str(error)[:300]}") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{record.name} holds a {type(content).__name__}, not a dict")
    return content


def _verify(file: BinaryIO, record: FileRecord) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != record.size:
        raise DamagedCheckpoint(f"{record.name} has {size} bytes, expected {record.size}")
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    if digest.hexdigest() != record.sha256:
        raise DamagedCheckpoint(f"{record.name} is damaged: its digest does not match")
    file.seek(0)


def redistribute_rank_state(parts: Iterable[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """Compute the own state of one of `world` ranks from the states of all ranks of an earlier run.

    Residuals and moments go through oktopk.redistribute. Floating-point buffers are averaged; integer ones come
    from rank 0.
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
                first = buffers.setdefault(name, buffer)
                if buffer.shape != first.shape:
                    shapes = f"{tuple(first.shape)} and {tuple(buffer.shape)}"
                    raise ValueError(f"the buffer {name} has the shapes {shapes}")
                if buffer.is_floating_point():
                    sums[name] = sums.get(name, 0) + buffer.double()
            yield {**part[OPTIMIZER], OKTOPK: part[OKTOPK]} if OPTIMIZER in part else part[OKTOPK]

    try:
        state = redistribute(states(), rank, world)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"the files of the ranks do not match: {error}") from error
    means = {name: (total / count).to(buffers[name].dtype) for name, total in sums.items()}
    own = {**dict.fromkeys(names), OKTOPK: state, BUFFERS: buffers | means}
    if OPTIMIZER in names:
        own |= {OKTOPK: state.pop(OKTOPK), OPTIMIZER: state}
    return own
