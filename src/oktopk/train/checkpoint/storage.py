"""The checkpoints of a run; all ranks save and load them together.

    RUN/checkpoints/step-00000140/
        shared.pt        state that is the same on all ranks, written by rank 0
        rank-0000.pt     each rank's own state
        …
        manifest.json    written last: without it the folder is not a checkpoint

Saving a step again writes files with new names (shared.1.pt, …) and then replaces the manifest, so that at any
moment either the old or the new files are the checkpoint.
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

from ..collective_errors import mark_collective
from .snapshot import (
    MANIFEST,
    ONLY_WEIGHTS,
    CheckpointError,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    ModelIdentity,
    Snapshot,
    read_manifest,
    read_tensors,
    redistribute_rank_state,
    write_tensors,
)

_log = logging.getLogger(__name__)
_FOLDER = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"(?:shared|rank-\d{4,})(?:\.(\d+))?\.pt")
_DRAFT = re.compile(rf"\.(?:{_FILE.pattern}|{re.escape(MANIFEST)})\.[0-9a-f]+")
_LONGEST = 500
T = TypeVar("T")


class Checkpoints:
    """The checkpoints in a folder that all ranks share. All methods but steps() are collective.

    From a training loop, through its reducer:

        optimizer.reducer.run(lambda comm: checkpoints.save(comm, snapshot))
        loaded: list[Snapshot] = []
        optimizer.reducer.run(lambda comm: loaded.append(checkpoints.load(comm)))

    All ranks raise a CheckpointError at the same point. To continue after a failed save, catch it inside the
    function passed to run().
    """

    def __init__(self, folder: str | os.PathLike[str], model: ModelIdentity, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.model = model
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps with a checkpoint that this rank can see, intact or damaged, oldest first."""
        return [step for step, folder in self._folders() if _is_committed(folder)]

    def newest(self, comm: Communicator) -> int | None:
        """Newest step with a checkpoint that any rank can see; the same on all ranks."""
        return self._newest(comm, None)

    def save(self, comm: Communicator, snapshot: Snapshot) -> None:
        """Write a checkpoint, and remove all but the newest `keep`. If one rank fails, all raise and the earlier
        checkpoints stay."""
        folder, first = self._folder(snapshot.step), comm.rank == 0
        what = f"{folder} could not be saved"
        begun = _gather_results(comm, what, lambda: self._begin(folder, snapshot, first))
        attempt = begun[0]["attempt"]
        try:
            _check_alike(begun)
            written = _gather_results(comm, what, lambda: _write(folder, snapshot, comm.rank, attempt))
            records = [[FileRecord(**record) for record in files] for files in written]
            manifest = Manifest(
                snapshot.step, snapshot.epoch, self.model, records[0][1], tuple(files[0] for files in records)
            )
            _gather_results(comm, what, lambda: _commit(folder, manifest, first))
        except CheckpointError:
            if first:
                _or_warn(_withdraw, folder, attempt)
            raise
        if first:
            _or_warn(_remove_files, folder, lambda name: _attempt(name) != attempt)
            _or_warn(self._remove_old, snapshot.step)

    def load(self, comm: Communicator) -> Snapshot:
        """Load the newest checkpoint that all ranks can read; warns about those it skips."""
        step, skipped = None, list[str]()
        while (step := self._newest(comm, step)) is not None:
            found = self._try_load(comm, step)
            if isinstance(found, Snapshot):
                for problem in skipped if comm.rank == 0 else ():
                    _log.warning("skipping checkpoint %s/%s", self.folder, problem)
                return found
            skipped.append(f"{self._folder(step).name}: {found}")
        listed = f" can be used ({'; '.join(skipped)})" if skipped else ""
        raise mark_collective(
            CheckpointError(
                f"no checkpoint in {self.folder}{listed}: copy an intact one back, or remove that folder to start "
                "again at step 0"
            )
        )

    # Saving.

    def _begin(self, folder: Path, snapshot: Snapshot, first: bool) -> dict[str, Any]:
        """Make the folder on rank 0, which also chooses file names that are free."""
        plan = {"step": snapshot.step, "epoch": snapshot.epoch, "attempt": None}
        if not first:
            return plan
        make_folder(self.folder)
        sync_folder(self.folder.parent)
        self._remove_leftovers()
        if not _is_committed(folder) and folder.exists():
            _remove(folder)
        folder.mkdir(exist_ok=True)
        sync_folder(self.folder)
        return {**plan, "attempt": max(map(_attempt, os.listdir(folder)), default=-1) + 1}

    def _remove_old(self, saved: int) -> None:
        """Remove all but the newest `keep`. Checkpoints of later steps do not count: the run skipped them when it
        resumed, so they may be damaged."""
        for step in [step for step in self.steps() if step <= saved][: -self.keep]:
            _or_warn(_remove, self._folder(step))
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove the files of interrupted saves, if there is a newer checkpoint."""
        newest = max(self.steps(), default=-1)
        for step, folder in self._folders():
            if step < newest and not _is_committed(folder):
                _or_warn(_remove, folder)

    # Loading.

    def _newest(self, comm: Communicator, below: int | None) -> int | None:
        def find() -> int | None:
            return max((step for step in self.steps() if below is None or step < below), default=None)

        found = _gather_results(comm, f"{self.folder} cannot be listed", find)
        return max((step for step in found if step is not None), default=None)

    def _try_load(self, comm: Communicator, step: int) -> Snapshot | str:
        """Load the checkpoint if every rank can read it; otherwise return the reason."""
        folder = self._folder(step)
        read: Snapshot | None = None

        def attempt() -> dict[str, str | None]:
            nonlocal read
            try:
                manifest, read = self._read(folder, comm.rank, comm.world)
            except DamagedCheckpoint as error:
                return {"problem": str(error)[:_LONGEST], "digest": None}
            return {"problem": None, "digest": manifest.digest}

        replies = _gather_results(comm, f"{folder} cannot be loaded", attempt)
        problems = [f"rank {rank}: {reply['problem']}" for rank, reply in enumerate(replies) if reply["problem"]]
        if not problems and any(reply["digest"] != replies[0]["digest"] for reply in replies):
            problems = ["ranks see different files"]
        if not problems:
            assert read is not None
            return read
        more = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
        return problems[0] + more

    def _read(self, folder: Path, rank: int, world: int) -> tuple[Manifest, Snapshot]:
        manifest = read_manifest(folder)
        if self._folder(manifest.step) != folder:
            raise DamagedCheckpoint(f"{MANIFEST} belongs to step {manifest.step}")
        if (difference := self.model.difference(manifest.model)) is not None:
            raise CheckpointError(f"checkpoint does not match the model: {difference}")
        if manifest.model.shard > 1 and manifest.world != world:
            raise CheckpointError(
                f"{folder} was saved by {manifest.world} ranks with --shard {manifest.model.shard}, here are "
                f"{world}: resume with as many; {ONLY_WEIGHTS}"
            )
        shared = read_tensors(folder, manifest.shared)
        if manifest.world == world:
            own = read_tensors(folder, manifest.ranks[rank])
        else:
            own = redistribute_rank_state((read_tensors(folder, record) for record in manifest.ranks), rank, world)
            if rank == 0:
                _log.info(
                    "%s was saved by %d ranks, now there are %d: residuals and buffers are averaged over the old "
                    "ranks, and random numbers start anew",
                    folder, manifest.world, world,
                )  # fmt: skip
        return manifest, Snapshot(manifest.step, manifest.epoch, shared, own)

    # Folders.

    def _folder(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _folders(self) -> list[tuple[int, Path]]:
        """Folders named after a step, oldest first."""
        names = os.listdir(self.folder) if self.folder.exists() else []
        steps = sorted({int(found[1]) for name in names if (found := _FOLDER.fullmatch(name))})
        return [(step, self._folder(step)) for step in steps if self._folder(step).is_dir()]


def _is_committed(folder: Path) -> bool:
    return os.path.lexists(folder / MANIFEST)


def _attempt(name: str) -> int:
    """The attempt to save the step that wrote this file; -1 for a file that is not a checkpoint's."""
    found = _FILE.fullmatch(name)
    return int(found[1] or 0) if found else -1


def _write(folder: Path, snapshot: Snapshot, rank: int, attempt: int) -> list[dict[str, Any]]:
    """Write this rank's file, and on rank 0 the shared file."""
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
                f"rank 0 cannot see {path}, written by rank {rank}: checkpoints need a folder that all ranks share"
            )
    manifest.write(folder)


def _withdraw(folder: Path, attempt: int) -> None:
    """Undo a failed save, unless its manifest is in place: then only the last sync failed, and the disk may hold
    either this manifest or the one before."""
    if not _is_committed(folder):
        _remove(folder)
    elif _attempt(read_manifest(folder).shared.name) != attempt:
        _remove_files(folder, lambda name: _attempt(name) == attempt)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, the manifest first, so that a half-removed one is not taken for a checkpoint. Other
    files in the folder stay.
    """
    if _is_committed(folder):
        os.unlink(folder / MANIFEST)
        sync_folder(folder)
    _remove_files(folder, lambda name: True)
    if not os.listdir(folder):
        os.rmdir(folder)


def _remove_files(folder: Path, which: Callable[[str], bool]) -> None:
    """Remove the checkpoint files for which which(name) is true, and all drafts."""
    for name in os.listdir(folder):
        if (_FILE.fullmatch(name) and which(name)) or _DRAFT.fullmatch(name):
            os.unlink(folder / name)


def _or_warn(clean: Callable[..., None], *arguments: object) -> None:
    """Clean up; a failure is only a warning."""
    try:
        clean(*arguments)
    except (OSError, CheckpointError) as error:
        _log.warning("could not remove the rest of an old checkpoint: %s", error)


def _check_alike(begun: list[dict[str, Any]]) -> None:
    for rank, plan in enumerate(begun):
        for name in ("step", "epoch"):
            if plan[name] != begun[0][name]:
                raise CheckpointError(
                    f"ranks save different checkpoints: {name} is {begun[0][name]} on rank 0, {plan[name]} on "
                    f"rank {rank}"
                )


def _gather_results(comm: Communicator, what: str, act: Callable[[], T]) -> list[T]:
    """Call act() on this rank and return the results of all ranks. If one fails, all raise."""
    result, failure = None, None
    try:
        result = act()
    except Exception as error:  # of any kind: the other ranks must not wait for us
        failure = error
    problem = None if failure is None else (str(failure) or repr(failure))[:_LONGEST]
    replies = gather_json(comm, {"problem": problem, "result": result}, "checkpoint")
    for rank, reply in enumerate(replies):
        if reply["problem"] is not None:
            raise mark_collective(CheckpointError(f"{what}: rank {rank}: {reply['problem']}")) from failure
    return [reply["result"] for reply in replies]
