"""Import, check and repair training data.

oktopk data an4 an4.tar.xz audio_data --min-seconds 1     the published archive, or its unpacked folder
oktopk data fix-manifest audio_data/*_manifest.csv        replace the paths of another machine
oktopk data check audio_data                              list what cannot be used
oktopk data cifar10 cifar10.tar.xz images                 archive or folder with {train,test}/<class>/*.jpg
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

from oktopk.train.console import ProgressBarHandler
from oktopk.train.data.images.cifar import import_cifar
from oktopk.train.data.problems import Problem, format_problems
from oktopk.train.data.speech.an4 import SplitSummary, import_an4
from oktopk.train.data.speech.dataset import SpeechDataset
from oktopk.train.data.speech.manifest import TRAIN_MANIFEST, VAL_MANIFEST, Repair, repair
from oktopk.train.run import BAD_INPUT
from oktopk.utils.schemas import add_schema

from ..errors import print_error
from ..parsing import parse_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, act: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        own = actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        own.add_argument("--json", action="store_true", help="print one JSON object")
        own.set_defaults(act=act, action=name)
        return own

    an4 = action("an4", _an4, "convert AN4 to wav files, transcripts and manifests")
    an4.add_argument("source", metavar="SRC", type=Path, help="the archive, or its unpacked folder")
    an4.add_argument("destination", metavar="DST", type=Path, help="output folder, for --data-dir")
    an4.add_argument(
        "--min-seconds",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="drop shorter training utterances; 1 leaves the usual 897",
    )
    cifar = action("cifar10", _cifar, "convert CIFAR-10 images to the binary format")
    cifar.add_argument(
        "source", metavar="SRC", type=Path, help="archive or folder with {train,test}/<class>/*.jpg"
    )
    cifar.add_argument("destination", metavar="DST", type=Path, help="output folder, for --data-dir")
    fix = action("fix-manifest", _fix, "replace the paths of another machine in manifests")
    fix.add_argument("manifests", metavar="MANIFEST", type=Path, nargs="+", help="manifest to repair")
    fix.add_argument(
        "--root", type=Path, metavar="FOLDER", help="search for the files here (default: the manifest's folder)"
    )
    check = action("check", _check, "list the files of a data folder that cannot be used")
    check.add_argument("folder", metavar="DIR", type=Path, help="data folder, as for --data-dir")
    check.add_argument("--dataset", choices=("an4",), default="an4", help="what the folder holds (default: an4)")


def run(options: argparse.Namespace) -> int:
    try:
        with _show_warnings():
            return int(options.act(options))
    except BAD_INPUT as error:
        print_error(f"data {options.action}", error)
        return 1


def _an4(options: argparse.Namespace) -> int:
    with _bar("utterance") as progress:
        summary = import_an4(options.source, options.destination, options.min_seconds, progress)
    if options.json:
        return _print_json("an4", asdict(summary))
    for name, split in (("train", summary.train), ("val", summary.val)):
        print(_split_line(name, split))
    _print_left_out(summary.problems)
    print(f"train with: oktopk train --dnn lstman4 --data-dir {options.destination}")
    return 0


def _split_line(name: str, split: SplitSummary) -> str:
    short = f", {split.too_short} too short" if split.too_short else ""
    length = f"{split.seconds:.0f} seconds"
    return f"{name}: {split.written} of {split.listed} utterances{short}, {length}, in {split.manifest}"


def _cifar(options: argparse.Namespace) -> int:
    with _bar("image") as progress:
        summary = import_cifar(options.source, options.destination, progress)
    if options.json:
        return _print_json("cifar10", asdict(summary))
    print(f"{summary.train} training and {summary.test} test images, in {summary.folder}")
    _print_left_out(summary.problems)
    print(f"train with: oktopk train --dnn vgg16 --data-dir {options.destination}")
    return 0


def _fix(options: argparse.Namespace) -> int:
    """Repair every manifest; an error in one does not stop the others."""
    reports: list[dict[str, Any]] = []
    for manifest in options.manifests:
        try:
            done = repair(manifest, options.root or manifest.parent)
        except BAD_INPUT as error:
            print_error("data fix-manifest", error)
            reports.append({"manifest": manifest, "error": str(error)})
        else:
            reports.append({"manifest": manifest, **asdict(done)})
            if not options.json:
                _print_repair(manifest, done)
    if options.json:
        _print_json("fix-manifest", {"manifests": reports})
    return int(any(report.get("error") or report.get("problems") for report in reports))


def _print_repair(manifest: Path, done: Repair) -> None:
    kept = f"; the original is in {done.backup}" if done.backup else ""
    print(f"{manifest}: {done.repaired} of {done.lines} lines repaired{kept}")
    if done.problems:
        print(f"not found, left unchanged:\n{_format_problems(done.problems)}")
        print("pass the folder that holds them as --root")
    else:
        print("every file in it exists")


def _check(options: argparse.Namespace) -> int:
    manifests = [options.folder / name for name in (TRAIN_MANIFEST, VAL_MANIFEST)]
    splits = {path: SpeechDataset.from_manifest(path) for path in manifests}
    unreadable = {path: data.find_unreadable() for path, data in splits.items()}
    usable = {path: len(data) - len(unreadable[path]) for path, data in splits.items()}
    problems = [problem for path, data in splits.items() for problem in (*data.problems, *unreadable[path])]
    if options.json:
        rows = [
            {"manifest": path, "usable": usable[path], "seconds": sum(data.seconds)}
            for path, data in splits.items()
        ]
        _print_json("check", {"manifests": rows, "problems": [asdict(problem) for problem in problems]})
        return int(bool(problems))
    for path, data in splits.items():
        print(f"{path}: {usable[path]} usable utterances, {sum(data.seconds):.0f} seconds")
    for problem in (problem for found in unreadable.values() for problem in found):
        print(problem, file=sys.stderr)
    print(f"{len(problems)} cannot be used" if problems else "everything can be used")
    return int(bool(problems))


def _print_left_out(problems: Sequence[Problem]) -> None:
    """Say how many files were left out; the library has named them in a warning."""
    if problems:
        more = "see the reasons above; --json lists all of them"
        print(f"{len(problems)} files were left out; the rest is usable: {more}")


def _format_problems(problems: Sequence[Problem], limit: int = 20) -> str:
    more = "\n  (--json lists all)" if len(problems) > limit else ""
    return format_problems(problems, limit) + more


def _print_json(action: str, row: dict[str, Any]) -> int:
    print(json.dumps(add_schema(f"data.{action}", row), indent=2, default=str))
    return 0


def _seconds(text: str) -> float:
    value = parse_number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a length in seconds, got {text}")
    return value


@contextmanager
def _bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, on a terminal only."""
    with tqdm(unit=unit, disable=None, dynamic_ncols=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextmanager
def _show_warnings() -> Iterator[None]:
    """Print the library's warnings without breaking the progress bar."""
    handler, logger = ProgressBarHandler(logging.WARNING), logging.getLogger("oktopk")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
