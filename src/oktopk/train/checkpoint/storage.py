"""The checkpoints of a run, saved and loaded by all ranks together.

    RUN/checkpoints/step-00000140/
        shared.pt        what is the same on all ranks, written by rank 0
        rank-0000.pt     what each rank has of its own
        …
        manifest.json    written last: a folder without it is no checkpoint

A step that is saved again writes to new names (shared.1.pt, …) and then replaces the manifest, so that at every
moment either the old files or the new ones are the checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from oktopk.comm import Communicator, gather_json
from oktopk.utils.files import make_folder, sync_folder

from ..together import raised_by_all
from .snapshot import (
    MANIFEST,
    CheckpointError,
    Damaged,
    FileRecord,
    Manifest,
    ModelIdentity,
    Snapshot,
    read_manifest,
    read_tensors,
    reshare,
    write_tensors,
)

_log = logging.getLogger(__name__)
_FOLDER = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"(?:shared|rank-\d{4,})(?:\.(\d+))?\.pt")
_DRAFT = re.compile(rf"\.(?:{_FILE.pattern}|{re.escape(MANIFEST)})\.[0-9a-f]+")
_LONGEST = 500
T = TypeVar("T")


class Checkpoints:
    """All checkpoints in a folder that every rank can reach. All but steps() is called by all ranks at once.

    From a training loop, through its reducer:

        optimizer.reducer.run(lambda comm: checkpoints.save(comm, snapshot))
        loaded: list[Snapshot] = []
        optimizer.reducer.run(lambda comm: loaded.append(checkpoints.load(comm)))

    A CheckpointError is raised by all ranks at the same point: whoever wants to go on after a save that failed
    catches it within what is handed to run().
    """

    def __init__(self, folder: str | os.PathLike[str], model: ModelIdentity, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.model = model
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps that this rank sees a checkpoint of, whole or damaged, oldest first."""
        return [step for step, folder in self._folders() if _committed(folder)]

    def newest(self, comm: Communicator) -> int | None:
        """The newest step that any rank sees a checkpoint of; the same answer on all ranks."""
        return self._newest(comm, None)

    def save(self, comm: Communicator, snapshot: Snapshot) -> None:
        """Write a checkpoint, and remove those beyond the newest `keep`. If one rank fails, all raise and the
        earlier checkpoints stay."""
        folder, first = self._folder(snapshot.step), comm.rank == 0
        what = f"{folder} could not be saved"
        begun = _together(comm, what, lambda: self._begin(folder, snapshot, first))
        attempt = begun[0]["attempt"]
        try:
            _check_alike(begun)
            written = _together(comm, what, lambda: _write(folder, snapshot, comm.rank, attempt))
            records = [[FileRecord(**record) for record in files] for files in written]
            manifest = Manifest(
                snapshot.step, snapshot.epoch, self.model, records[0][1], tuple(files[0] for files in records)
            )
            _together(comm, what, lambda: _commit(folder, manifest, first))
        except CheckpointError:
            if first:
                _or_warn(_withdraw, folder, attempt)
            raise
        if first:
            _or_warn(_remove_files, folder, lambda name: _attempt(name) != attempt)
            _or_warn(self._remove_old, snapshot.step)

    def load(self, comm: Communicator) -> Snapshot:
        """The newest checkpoint that all ranks can read; those that are passed over are warned about."""
        step, passed_over = None, 0
        while (step := self._newest(comm, step)) is not None:
            if (snapshot := self._try(comm, step)) is not None:
                return snapshot
            passed_over += 1
        raise raised_by_all(
            CheckpointError(
                f"there is no checkpoint in {self.folder} that all ranks can read; {passed_over} were passed over"
            )
        )

    # Saving.

    def _begin(self, folder: Path, snapshot: Snapshot, first: bool) -> dict[str, Any]:
        """Rank 0 makes the folder, and says which names are free in it."""
        said = {"step": snapshot.step, "epoch": snapshot.epoch, "attempt": None}
        if not first:
            return said
        make_folder(self.folder)
        sync_folder(self.folder.parent)
        self._remove_leftovers()
        if not _committed(folder) and folder.exists():
            _remove(folder)
        folder.mkdir(exist_ok=True)
        sync_folder(self.folder)
        return {**said, "attempt": max(map(_attempt, os.listdir(folder)), default=-1) + 1}

    def _remove_old(self, saved: int) -> None:
        """Newer ones than the one just saved are not counted: a run that has come back to this step passed them
        over, so they may well be damaged."""
        for step in [step for step in self.steps() if step <= saved][: -self.keep]:
            _or_warn(_remove, self._folder(step))
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """What saves that were interrupted have left behind, if a newer checkpoint is there."""
        newest = max(self.steps(), default=-1)
        for step, folder in self._folders():
            if step < newest and not _committed(folder):
                _or_warn(_remove, folder)

    # Loading.

    def _newest(self, comm: Communicator, below: int | None) -> int | None:
        def seen() -> int | None:
            return max((step for step in self.steps() if below is None or step < below), default=None)

        found = _together(comm, f"{self.folder} cannot be listed", seen)
        return max((step for step in found if step is not None), default=None)

    def _try(self, comm: Communicator, step: int) -> Snapshot | None:
        """The checkpoint, if every rank can read it."""
        folder, read = self._folder(step), None

        def attempt() -> dict[str, str | None]:
            nonlocal read
            try:
                manifest, read = self._read(folder, comm.rank, comm.world)
            except Damaged as error:
                return {"problem": str(error)[:_LONGEST], "seen": None}
            return {"problem": None, "seen": manifest.seal}

        heard = _together(comm, f"{folder} cannot be loaded", attempt)
        problems = [f"rank {rank}: {said['problem']}" for rank, said in enumerate(heard) if said["problem"]]
        if not problems and any(said["seen"] != heard[0]["seen"] for said in heard):
            problems = ["ranks see different files"]
        if not problems:
            return read
        if comm.rank == 0:
            more = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
            _log.warning("checkpoint %s is passed over: %s%s", folder, problems[0], more)
        return None

    def _read(self, folder: Path, rank: int, world: int) -> tuple[Manifest, Snapshot]:
        manifest = read_manifest(folder)
        if self._folder(manifest.step) != folder:
            raise Damaged(f"{MANIFEST} is of step {manifest.step}")
        if (difference := self.model.difference(manifest.model)) is not None:
            raise CheckpointError(f"the checkpoint is of another model: {difference}")
        shared = read_tensors(folder, manifest.shared)
        if manifest.world == world:
            own = read_tensors(folder, manifest.ranks[rank])
        else:
            own = reshare((read_tensors(folder, record) for record in manifest.ranks), rank, world)
            if rank == 0:
                _log.info(
                    "%s was saved by %d ranks, now there are %d: residuals and buffers are the means over the old "
                    "ranks, random numbers start afresh",
                    folder, manifest.world, world,
                )  # fmt: skip
        return manifest, Snapshot(manifest.step, manifest.epoch, shared, own)

    # Folders.

    def _folder(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _folders(self) -> list[tuple[int, Path]]:
        """Each folder with the name of a step, oldest first."""
        names = os.listdir(self.folder) if self.folder.exists() else []
        steps = sorted({int(found[1]) for name in names if (found := _FOLDER.fullmatch(name))})
        return [(step, self._folder(step)) for step in steps if self._folder(step).is_dir()]


def _committed(folder: Path) -> bool:
    return os.path.lexists(folder / MANIFEST)


def _attempt(name: str) -> int:
    """Which attempt to save the step a file is of; -1 for one that is none of ours."""
    found = _FILE.fullmatch(name)
    return int(found[1] or 0) if found else -1


def _write(folder: Path, snapshot: Snapshot, rank: int, attempt: int) -> list[dict[str, Any]]:
    """This rank's file, and from rank 0 the shared one after it."""
    end = f".{attempt}.pt" if attempt else ".pt"
    records = [write_tensors(folder / f"rank-{rank:04d}{end}", snapshot.own)]
    if rank == 0:
        records.append(write_tensors(folder / f"shared{end}", snapshot.shared))
    return [vars(record) for record in records]


def _commit(folder: Path, manifest: Manifest, first: bool) -> None:
    if not first:
        return
    for rank, record in enumerate(manifest.ranks):
        path = folder / record.name
        if not path.exists() or path.stat().st_size != record.size:
            raise CheckpointError(
                f"{path}, which rank {rank} has written, cannot be seen from here: checkpoints need a folder that "
                "all ranks share"
            )
    manifest.write(folder)


def _withdraw(folder: Path, attempt: int) -> None:
    """Undo a save that has failed, unless its manifest is in place: then its last sync failed, and it or the one
    before may be what the disk has."""
    if not _committed(folder):
        _remove(folder)
    elif _attempt(read_manifest(folder).shared.name) != attempt:
        _remove_files(folder, lambda name: _attempt(name) == attempt)


def _remove(folder: Path) -> None:
    """The manifest first, so that what is half removed is no checkpoint. Files that are not ours stay."""
    if _committed(folder):
        os.unlink(folder / MANIFEST)
        sync_folder(folder)
    _remove_files(folder, lambda name: True)
    if not os.listdir(folder):
        os.rmdir(folder)


def _remove_files(folder: Path, which: Callable[[str], bool]) -> None:
    """Of a checkpoint's own files those asked for, and all drafts."""
    for name in os.listdir(folder):
        if (_FILE.fullmatch(name) and which(name)) or _DRAFT.fullmatch(name):
            os.unlink(folder / name)


def _or_warn(tidy: Callable[..., None], *arguments: object) -> None:
    """Tidying up must not fail a run."""
    try:
        tidy(*arguments)
    except (OSError, CheckpointError) as error:
        _log.warning("what is left of an old checkpoint could not be removed: %s", error)


def _check_alike(begun: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(begun):
        for name in ("step", "epoch"):
            if said[name] != begun[0][name]:
                raise CheckpointError(
                    f"ranks save different checkpoints: {name} is {begun[0][name]} on rank 0, {said[name]} on "
                    f"rank {rank}"
                )


def _together(comm: Communicator, what: str, act: Callable[[], T]) -> list[T]:
    """Do something on this rank, and hear from all ranks what came of it. If one fails, all raise."""
    result, failure = None, None
    try:
        result = act()
    except Exception as error:  # whatever it is: the others must not wait in vain
        failure = error
    problem = None if failure is None else (str(failure) or repr(failure))[:_LONGEST]
    heard = gather_json(comm, {"problem": problem, "result": result}, "checkpoint")
    for rank, said in enumerate(heard):
        if said["problem"] is not None:
            raise raised_by_all(CheckpointError(f"{what}: rank {rank}: {said['problem']}")) from failure
    return [said["result"] for said in heard]
