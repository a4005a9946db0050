"""Make data ready for training, and mend it.

oktopk data an4 an4.tar.xz audio_data --min-seconds 1     the published archive, or the folder it unpacks to
oktopk data fix-manifest audio_data/*_manifest.csv        paths of another machine become those of this one
oktopk data check audio_data                              what of it cannot be used
oktopk data cifar10 cifar10.tar.xz images                 an archive or a folder of {train,test}/<class>/*.jpg
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from oktopk.train.data.images.cifar import import_cifar
from oktopk.train.data.problems import Problem, listing
from oktopk.train.data.speech.an4 import SplitSummary, import_an4
from oktopk.train.data.speech.dataset import SpeechDataset
from oktopk.train.data.speech.manifest import TRAIN_MANIFEST, VAL_MANIFEST, Repair, repair
from oktopk.train.run import BAD_INPUT
from oktopk.train.screen import BarHandler

from ..complaint import complain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, act: Callable[[argparse.Namespace], int], meaning: str) -> argparse.ArgumentParser:
        own = actions.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        own.add_argument("--json", action="store_true", help="print one JSON object")
        own.set_defaults(act=act, action=name)
        return own

    an4 = action("an4", _an4, "AN4 to wav files, transcripts and manifests")
    an4.add_argument("source", metavar="SRC", type=Path, help="the archive, or the folder that it unpacks to")
    an4.add_argument("destination", metavar="DST", type=Path, help="the folder for --data-dir")
    an4.add_argument(
        "--min-seconds",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="leave out shorter training utterances; 1 gives the usual 897",
    )
    cifar = action("cifar10", _cifar, "images of CIFAR-10 to its binary files")
    cifar.add_argument("source", metavar="SRC", type=Path, help="archive or folder: {train,test}/<class>/*.jpg")
    cifar.add_argument("destination", metavar="DST", type=Path, help="the folder for --data-dir")
    fix = action("fix-manifest", _fix, "find the files that manifests of another machine name")
    fix.add_argument("manifests", metavar="MANIFEST", type=Path, nargs="+")
    fix.add_argument("--root", type=Path, metavar="FOLDER", help="look here (default: the manifest's folder)")
    check = action("check", _check, "say what of a folder for --data-dir cannot be used")
    check.add_argument("folder", metavar="DIR", type=Path)
    check.add_argument("--dataset", choices=("an4",), default="an4")


def run(options: argparse.Namespace) -> int:
    try:
        with _warnings_shown():
            return int(options.act(options))
    except BAD_INPUT as error:
        complain(f"data {options.action}", error)
        return 1


def _an4(options: argparse.Namespace) -> int:
    with _bar("utterance") as progress:
        summary = import_an4(options.source, options.destination, options.min_seconds, progress)
    if options.json:
        return _print_json(asdict(summary))
    for name, split in (("train", summary.train), ("val", summary.val)):
        print(_split_line(name, split))
    _say_left_out(summary.problems)
    print(f"train with: oktopk train --dnn lstman4 --data-dir {options.destination}")
    return 0


def _split_line(name: str, split: SplitSummary) -> str:
    short = f", {split.too_short} were too short" if split.too_short else ""
    length = f"{split.seconds:.0f} seconds"
    return f"{name}: {split.written} of {split.listed} utterances{short}, {length}, in {split.manifest}"


def _cifar(options: argparse.Namespace) -> int:
    with _bar("image") as progress:
        summary = import_cifar(options.source, options.destination, progress)
    if options.json:
        return _print_json(asdict(summary))
    print(f"{summary.train} images to train with and {summary.test} to test with, in {summary.folder}")
    _say_left_out(summary.problems)
    print(f"train with: oktopk train --dnn vgg16 --data-dir {options.destination}")
    return 0


def _fix(options: argparse.Namespace) -> int:
    """Every manifest gets its turn, whatever becomes of the others."""
    reports: list[dict[str, Any]] = []
    for manifest in options.manifests:
        try:
            done = repair(manifest, options.root or manifest.parent)
        except BAD_INPUT as error:
            complain("data fix-manifest", error)
            reports.append({"manifest": manifest, "error": str(error)})
        else:
            reports.append({"manifest": manifest, **asdict(done)})
            if not options.json:
                _say_repair(manifest, done)
    if options.json:
        _print_json({"manifests": reports})
    return int(any(report.get("error") or report.get("problems") for report in reports))


def _say_repair(manifest: Path, done: Repair) -> None:
    kept = f"; as it was, it is in {done.backup}" if done.backup else ""
    print(f"{manifest}: {done.repaired} of {done.lines} lines repaired{kept}")
    if done.problems:
        print(f"not found, and left as they are:\n{_listing(done.problems)}")
        print("give the folder that holds them as --root")
    else:
        print("every file it names is there")


def _check(options: argparse.Namespace) -> int:
    manifests = [options.folder / name for name in (TRAIN_MANIFEST, VAL_MANIFEST)]
    splits = {path: SpeechDataset.from_manifest(path) for path in manifests}
    unreadable = {path: data.unreadable() for path, data in splits.items()}
    usable = {path: len(data) - len(unreadable[path]) for path, data in splits.items()}
    problems = [problem for path, data in splits.items() for problem in (*data.problems, *unreadable[path])]
    if options.json:
        rows = [
            {"manifest": path, "usable": usable[path], "seconds": sum(data.seconds)}
            for path, data in splits.items()
        ]
        _print_json({"manifests": rows, "problems": [asdict(problem) for problem in problems]})
        return int(bool(problems))
    for path, data in splits.items():
        print(f"{path}: {usable[path]} usable utterances, {sum(data.seconds):.0f} seconds")
    for problem in (problem for found in unreadable.values() for problem in found):
        print(problem, file=sys.stderr)
    print(f"{len(problems)} cannot be used" if problems else "all of it can be used")
    return int(bool(problems))


def _say_left_out(problems: Sequence[Problem]) -> None:
    """Which ones, the library has said in a warning."""
    if problems:
        more = "the reasons are above, and all of them come with --json"
        print(f"{len(problems)} files were left out, and the rest is usable: {more}")


def _listing(problems: Sequence[Problem], limit: int = 20) -> str:
    more = "\n  (--json names all)" if len(problems) > limit else ""
    return listing(problems, limit) + more


def _print_json(row: dict[str, Any]) -> int:
    print(json.dumps(row, indent=2, default=str))
    return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a length in seconds")
    return value


@contextmanager
def _bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Progress, on a terminal only."""
    with tqdm(unit=unit, disable=None, dynamic_ncols=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """What the library warns of, without tearing the bar apart."""
    handler, logger = BarHandler(logging.WARNING), logging.getLogger("oktopk")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
