"""The headline of a race: who reached the target first on each link, or was best, and who sent least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oktopk.tools.hooks import DDP
from oktopk.tools.report.html.tiles import BAD, Tile, compare, is_clear
from oktopk.tools.report.units import format_bytes, format_seconds, percent

from ..links import link_name

Document = Mapping[str, Any]
Row = Mapping[str, Any]
_MOST_LINKS = 4


def race_tiles(document: Document, links: Sequence[str]) -> list[Tile]:
    outcome = _first if document["target"] is not None else _best
    rows = {link: [row for row in document["rows"] if row["link"] == link] for link in links}
    tiles = [outcome(document, link, rows[link]) for link in links[:_MOST_LINKS]]
    return [*tiles, *_bytes(document["rows"]), _cells(document)]


def _first(document: Document, link: str, rows: Sequence[Row]) -> Tile:
    """The fastest to the target besides DDP, compared with it."""
    label = f"Time to {document['target']}, {link_name(link)}"
    reached = [row for row in rows if row["seconds"] is not None]
    dense = next((row for row in reached if row["contender"] == DDP), None)
    if not reached:
        steps = max((row["most_steps"] for row in rows), default=0)
        return Tile(
            label, "not reached", f"No contender reached it with all of its seeds in {steps:,} steps.", BAD
        )
    first, *others = sorted(reached, key=lambda row: float(row["seconds"]["mean"]))
    if dense is None or not others:
        beside = f"; {_named(others[0])} takes {_mean(others[0])}" if others else "; no other one reached it"
        return Tile(label, _mean(first), f"{_named(first)}{beside}.")
    ours = others[0] if first is dense else first
    times = [(row["seconds"]["mean"], row["seconds"]["std"]) for row in (ours, dense)]
    detail = f"{_named(ours)}: {_mean(ours)}; ddp takes {_mean(dense)}."
    if not times[0][0] or not times[1][0]:
        return Tile(label, _mean(first), detail)  # the first weights reach the target
    if not is_clear(*times):
        return Tile(label, "no clear difference", f"{detail} That is within the spread over seeds.")
    value, tone = compare(times[0][0], times[1][0], "faster than ddp", "slower than ddp", "as fast as ddp")
    return Tile(label, value, detail, tone)


def _best(document: Document, link: str, rows: Sequence[Row]) -> Tile:
    """The best metric at the end, beside DDP."""
    when = "at the end" if document["seconds"] is None else f"after {document['seconds']:g} s"
    label = f"Best {document['metric']} {when}, {link_name(link)}"
    known = [row for row in rows if row["final"] is not None]
    if not known:
        return Tile(label, "not known", "No validation was recorded.")
    choose = min if known[0]["less_is_better"] else max
    best = choose(known, key=lambda row: float(row["final"]["mean"]))
    dense = next((row for row in known if row["contender"] == DDP and row is not best), None)
    beside = "" if dense is None else f"; ddp has {dense['final']['mean']:.4g}"
    return Tile(label, f"{best['final']['mean']:.4g}", f"{_named(best)}{beside}.")


def _named(row: Row) -> str:
    return f"{row['contender']}{' (composed)' if row['how'] != 'full' else ''}"


def _mean(row: Row) -> str:
    return format_seconds(float(row["seconds"]["mean"]))


def _bytes(rows: Sequence[Row]) -> list[Tile]:
    known = [row for row in rows if row["of_dense"]]
    if not known:
        return []
    least = min(known, key=lambda row: float(row["of_dense"]))
    value, tone = compare(least["of_dense"], 1.0, "fewer", "more", "as many")
    sent = f"{format_bytes(least['sent_bytes'])} per step, dense ones included, {percent(least['of_dense'])}"
    return [Tile("Fewest bytes against dense", value, f"{_named(least)}: {sent} of a ring.", tone)]


def _cells(document: Document) -> Tile:
    failed, trials = len(document["failures"]), len(document["trials"])
    seeds = {row["seeds"] for row in document["rows"]}
    spread = "One seed each: nothing is known about their spread." if seeds == {1} else "Means over seeds."
    if failed:
        return Tile("Trials", f"{trials} and {failed} failed", f"Failures are named below. {spread}", BAD)
    return Tile("Trials", f"{trials}", spread)
