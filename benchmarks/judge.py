"""Compare all contenders on three links, and check that Ok-Topk meets its targets (needs root).

Five scenes in network namespaces: ResNet-50's shapes at 1 %; the same with `auto`, which takes more steps; a tiny
model; half of all entries; and a real network. The last table lists each target, the result, and whether it is
met; the exit code is 1 if one is missed. ASKED holds all targets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from common import arguments, write_json

from oktopk.algorithms import ALGORITHMS
from oktopk.errors import OkTopkError
from oktopk.tools.bench.launch import measure
from oktopk.tools.bench.names import LINK, MEMORY, add_link_limits
from oktopk.tools.bench.plan import Plan, free_memory
from oktopk.tools.bench.records import Record
from oktopk.tools.bench.tables import phases, text
from oktopk.tools.bench.workloads import MODELS
from oktopk.tools.lab import lab_problem
from oktopk.tools.tables import format_table

SIXTEEN_BIT, EIGHT_BIT, AUTO, APART = "oktopk:fp16", "oktopk:e4m3", "oktopk:fp16:auto", "oktopk:fp16:apart"
OURS = (SIXTEEN_BIT, EIGHT_BIT)
"""Both are judged: 8-bit values are the faster form, and an option."""
MAIN, AUTOMATIC, TINY, HALF, COMPUTING = "main", "auto", "tiny", "half", "computing"
HOOKS = ("ddp", "ddp-fp16", "ddp-bf16", "powersgd")
SCENES: dict[str, dict[str, object]] = {
    MAIN: {},
    AUTOMATIC: {},
    TINY: {"model": "synthetic", "params": 10_000},
    HALF: {"density": 0.5},
    COMPUTING: {"model": "transformer", "params": MODELS["transformer"][0], "bucket_mb": 1.0},
}
FEW = ("backward", "ddp", SIXTEEN_BIT, APART, AUTO)
"""Who takes part in the other scenes."""
RIVALS = tuple(f"{name}:e4m3" for name in ALGORITHMS if name not in ("dense", "oktopk"))
"""The other algorithms, each with the values that are the fastest."""
HEADERS = ["scene", "link", "of", "figure", "asked", "found", "enough"]


@dataclass(frozen=True)
class Line:
    """One target for one contender, relative to another one if given."""

    scene: str
    link: str
    name: str
    figure: str
    asked: float
    against: str | None = None


def _faster(link: str, asked: float, *others: str) -> list[Line]:
    return [Line(MAIN, link, name, "times as fast as", asked, other) for name in OURS for other in others]


LINKS = ("none", "1gbit", "100mbit")
ASKED = (
    *_faster("none", 2.5, *HOOKS),
    *_faster("1gbit", 9.0, "ddp"),
    *_faster("1gbit", 5.0, "ddp-fp16", "ddp-bf16"),
    *_faster("1gbit", 3.0, "powersgd"),
    *_faster("100mbit", 60.0, "ddp"),
    *_faster("100mbit", 2.5, "powersgd"),
    *(Line(MAIN, "1gbit", name, "above backward, share of", 1 / 18, "ddp") for name in OURS),
    *(Line(MAIN, "1gbit", name, "above backward over both limits", 2.0) for name in OURS),
    *(Line(MAIN, link, SIXTEEN_BIT, "MB sent", 1.30) for link in LINKS),
    *(Line(MAIN, link, EIGHT_BIT, "MB sent", 0.90) for link in LINKS),
    *(Line(MAIN, link, name, "CPU ms above", 30.0, "backward") for link in LINKS for name in OURS),
    *(Line(scene, link, AUTO, "share of the tolerated slowness, against", 1.0, "ddp")
      for scene in (AUTOMATIC, TINY, HALF) for link in LINKS),
)  # fmt: skip
TOLERATED_SHARE, TOLERATED_SECONDS = 0.03, 0.3e-3
"""How much slower than DDP `auto` may be: the larger of both."""


def _share_of_above(own: Record, other: Record) -> float:
    return own["above_backward_seconds"] / other["above_backward_seconds"]


def _slowness(own: Record, other: Record) -> float:
    dense = other["median_step_seconds"]
    return (own["median_step_seconds"] - dense) / max(TOLERATED_SHARE * dense, TOLERATED_SECONDS)


FIGURES: dict[str, Callable[[Record, Record], float]] = {
    "times as fast as": lambda own, other: other["median_step_seconds"] / own["median_step_seconds"],
    "above backward, share of": _share_of_above,
    "above backward over both limits": lambda own, other: own["above_over_limits"],
    "MB sent": lambda own, other: own["sent_bytes"] / 1e6,
    "CPU ms above": lambda own, other: 1e3 * (own["cpu_seconds"] - other["cpu_seconds"]),
    "share of the tolerated slowness, against": _slowness,
}
AT_LEAST = ("times as fast as",)
"""The others are at most what is asked."""


@dataclass(frozen=True)
class Verdict:
    line: Line
    found: float | None
    """None if this run cannot tell: somebody did not take part."""

    @property
    def enough(self) -> bool | None:
        if self.found is None:
            return None
        asked = self.line.asked
        return self.found >= asked if self.line.figure in AT_LEAST else self.found <= asked

    def row(self) -> list[object]:
        line, sign = self.line, "≥" if self.line.figure in AT_LEAST else "≤"
        figure = f"{line.figure} {line.against or ''}".strip()
        enough = None if self.enough is None else "yes" if self.enough else "NO"
        return [line.scene, line.link, line.name, figure, f"{sign} {line.asked:.3g}", self.found, enough]


def judge(lines: Sequence[Line], records: Sequence[Record]) -> list[Verdict]:
    """Check the targets against records with their scene."""
    known = {(record["scene"], record["link"], record["name"]): record for record in records}
    verdicts = []
    for line in lines:
        own = known.get((line.scene, line.link, line.name))
        other = known.get((line.scene, line.link, line.against or line.name))
        found = None if own is None or other is None else FIGURES[line.figure](own, other)
        verdicts.append(Verdict(line, found))
    return verdicts


def plan_of(scene: str, options: argparse.Namespace) -> Plan:
    """All contenders in the main scene, a few of them in the others."""
    everybody = ["backward", *HOOKS, MEMORY, "dense", *RIVALS, "oktopk", *OURS, LINK]
    names = tuple(add_link_limits(everybody if scene == MAIN else FEW))
    plan = Plan((names,), options.ranks, steps=options.steps, timeout=options.timeout, **SCENES[scene])  # type: ignore[arg-type]
    return plan.fit_to_memory(free_memory())


def unanswered(verdicts: Sequence[Verdict], scenes: Sequence[str], links: Sequence[str]) -> list[Line]:
    """Targets without a measurement."""
    lines = [verdict.line for verdict in verdicts if verdict.found is None]
    return [line for line in lines if line.scene in scenes and line.link in links]


def measured(options: argparse.Namespace) -> tuple[list[Record], bool]:
    """Measure all scenes and show their records; also returns whether some could not be measured."""
    records: list[Record] = []
    failed = False
    for scene in options.scenes:
        try:
            for found in measure(plan_of(scene, options), options.links):
                records += ({"scene": scene, **record} for record in found)
                print(f"{scene}\n\n{text(found)}\n\n{phases(found)}\n", flush=True)
        except OkTopkError as error:  # what was measured before is kept
            print(f"{scene}: {error}", file=sys.stderr)
            failed = True
    return records, failed


def main() -> int:
    parser = arguments(__doc__ or "", "judge")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--links", nargs="+", default=LINKS)
    parser.add_argument("--scenes", nargs="+", default=list(SCENES), choices=SCENES)
    parser.add_argument("--steps", type=int, default=15, help="that count, of each contender")
    parser.add_argument("--timeout", type=float, default=5400.0, help="seconds for each link of a scene")
    options = parser.parse_args()
    if problem := lab_problem():
        parser.error(problem)
    records, failed = measured(options)
    verdicts = judge(ASKED, records)
    answered = [verdict for verdict in verdicts if verdict.found is not None]
    print(format_table(HEADERS, [verdict.row() for verdict in answered]))
    missing = unanswered(verdicts, options.scenes, options.links)
    for line in missing:
        print(f"no answer: {line}", file=sys.stderr)
    if others := len(verdicts) - len(answered) - len(missing):
        print(f"{others} more lines are about what was not asked of this run")
    told = [{**asdict(verdict.line), "found": verdict.found, "enough": verdict.enough} for verdict in verdicts]
    write_json(options.json, records, verdicts=told)
    return int(failed or bool(missing) or any(verdict.enough is False for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
