"""Runs that are killed again and again while they save, and resumed each time.

python -m stress.kills.run --kills 200 --seed 0        # make kills

At a random moment of a save all ranks get a SIGKILL, as if the machine had died, or one of them. Whoever is left
must end by itself, and if by an error, by one of the library's own. The next life must go on from the checkpoint
that was being saved or from the one before it, with the bits of a run that nobody has killed; and so on, until the
run is finished and another one begins.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from oktopk.errors import OkTopkError
from oktopk.tools.tables import format_table
from oktopk.utils.locks import LOCK
from stress.kills.job import Flags, P, live
from stress.lines import keep_line, kept_lines
from tests.support import worlds

PATIENCE = 120.0
MACHINE, RANK = "the machine", "one rank"
# Imported once, for all lives: each is to start at once.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch.utils.tensorboard", "tests.support.preload"]
)


@dataclass(frozen=True)
class Reference:
    """A run that nobody kills: the fingerprints of all ranks at each save, and the seconds that one takes."""

    saves: list[tuple[str, ...]]
    seconds: float

    def place(self, fingerprints: tuple[str, ...]) -> int | None:
        """Which save it is; -1 for none yet, None for one that never was."""
        if not any(fingerprints):
            return -1
        return self.saves.index(fingerprints) if fingerprints in self.saves else None


@dataclass(frozen=True)
class Life:
    """From a start to a kill, or to the end of the run."""

    resumed: tuple[str, ...]
    """The fingerprints that ranks have begun with; empty if nothing was saved yet."""
    killed: str | None
    in_save: bool
    ended: int
    begun: int
    """So many saves of this life are known to be complete, and so many to have been begun."""
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Kill:
    """What was killed, whether a save was under way, and what became of it."""

    what: str
    in_save: bool
    resumed: str
    """From the "new" checkpoint, which was being saved, from the "old" one before, or from "none" yet."""
    problems: tuple[str, ...]


def undisturbed(folder: Path) -> Reference:
    folder.mkdir()
    Flags.new(folder / "flags")
    ranks = worlds.run("gloo", P, live, folder / "run", folder)
    saves = list(zip(*(seen for seen, _ in ranks), strict=True))
    assert len(set(saves)) == len(saves)
    return Reference(saves, ranks[0][1])


def one_life(folder: Path, number: int, seconds: float, random: Random | None) -> Life:
    """With a `random`, it is killed at some moment of the next save or of one soon after it, if there is one."""
    notes = folder / f"life-{number}"
    notes.mkdir()
    flags = Flags.new(notes / "flags")
    with worlds.start("gloo", P, live, folder / "run", notes) as ranks:
        victims = [] if random is None else kill(ranks, flags, seconds, random)
        left = ranks.running(range(P), PATIENCE)
        ends = [ranks.outcome(rank) for rank in range(P)]
    problems = [f"rank {rank} does not end" for rank in left]
    problems += wrong_ends(ends, victims)
    begun, ended = flags.begun, flags.ended
    return Life(
        tuple(path.read_text() if (path := notes / f"resumed-{rank}").exists() else "" for rank in range(P)),
        {0: None, 1: RANK, P: MACHINE}[len(victims)],
        any(begun[rank] > ended[rank] for rank in victims),
        max(ended),
        max(begun),
        tuple(problems),
    )


def wrong_ends(ends: Sequence[worlds.Outcome], victims: Sequence[int]) -> list[str]:
    """Whoever was not killed ends well, or by an error of the library's own if somebody was."""
    return [
        f"rank {rank}: {end.trace}"
        for rank, end in enumerate(ends)
        if rank not in victims and end.trace and not (victims and isinstance(end.error, OkTopkError))
    ]


def kill(ranks: worlds.Ranks, flags: Flags, seconds: float, random: Random) -> list[int]:
    """Which ranks; none if the run is finished before."""
    first, wanted = random.randrange(P), random.randint(1, 3)
    victims = random.choice([[first], list(range(P))])
    pids = [ranks.pid(rank) for rank in victims]
    worlds.wait_until(lambda: flags.begun[first] >= wanted or ranks.gone(first), PATIENCE)
    time.sleep(random.uniform(0, seconds))
    if any(ranks.gone(rank) for rank in range(P)):
        return []
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return victims


def kills(folder: Path, reference: Reference, random: Random, count: int) -> Iterator[Kill]:
    """Those of one run, until so many have met a save: then it may come to its end.

    What became of a kill is known in the life after it.
    """
    folder.mkdir()
    place, number, before = -1, 1, one_life(folder, 0, reference.seconds, random)
    while before.killed is not None:
        count -= before.in_save
        life = one_life(folder, number, reference.seconds, random if count > 0 else None)
        found = reference.place(life.resumed)
        lost = found is None or not place + before.ended <= found <= place + before.begun
        wrong = [f"life {number} of {folder.name} has not resumed with what was saved"] if lost else []
        new = "none" if found == -1 else "new" if found == place + before.begun else "old"
        yield Kill(before.killed, before.in_save, new, (*before.problems, *wrong, *life.problems))
        if found is None:
            return
        place, number, before = found, number + 1, life
    end = one_life(folder, number, reference.seconds, None)
    assert end.resumed == reference.saves[-1], "a run has another end"
    assert [path.name for path in (folder / "run").rglob(".*")] == [LOCK], "drafts are left"
    assert "skipping checkpoint" not in (folder / "run" / "train.log").read_text()


def session(count: int, seed: int | str) -> Iterator[Kill]:
    """Until so many kills have met a save; others are reported, too."""
    if count <= 0:
        return
    random, number = Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="oktopk-kills-") as name:
        folder = Path(name)
        reference = undisturbed(folder / "undisturbed")
        while count > 0:
            for one in kills(folder / f"run-{number}", reference, random, count):
                count -= one.in_save
                yield one
            number += 1


def summary(done: Sequence[Kill]) -> str:
    head = ["killed", "in a save", "resumed", "from the new one", "from the old one", "none yet", "problems"]
    rows = []
    for what in (MACHINE, RANK):
        mine = [one for one in done if one.what == what and one.in_save]
        by = [sum(one.resumed == which for one in mine) for which in ("new", "old", "none")]
        good = sum(not one.problems for one in mine)
        rows.append([what, len(mine), good, *by, len(mine) - good])
    between = [one for one in done if not one.in_save]
    return f"{format_table(head, rows)}\nkills that came between two saves: {len(between)}"


def main() -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how many must meet a save (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument(
        "--out",
        type=Path,
        help="a file of JSON lines for the results as they come; the same command goes on with it",
    )
    chosen = parser.parse_args()
    done = [Kill(**{**line, "problems": tuple(line["problems"])}) for line in kept_lines(chosen.out)]
    met = sum(one.in_save for one in done)
    with tqdm(total=chosen.kills, initial=met, unit="kill", disable=None) as bar:
        for one in session(chosen.kills - met, f"{chosen.seed} after {len(done)}" if done else chosen.seed):
            done.append(one)
            keep_line(chosen.out, asdict(one))
            bar.update(one.in_save)
            for problem in one.problems:
                bar.write(f"{one.what} killed: {problem}")
    print(summary(done))
    return int(any(one.problems for one in done))


if __name__ == "__main__":
    sys.exit(main())
