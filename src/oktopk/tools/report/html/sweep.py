"""The headline and the table of several runs: one row for each setting, over its seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oktopk.metrics.events import DENSE, SPARSE

from ..units import format_bytes, format_seconds, percent
from .comparison import compared_metric
from .groups import Group, group_runs, spread
from .tables import table
from .tiles import BAD, PLAIN, Spread, Tile, compare, compare_bytes, is_clear

Row = Mapping[str, Any]
_BETTER_IF_HIGH = ("acc", "top-1", "top1", "bleu", "f1", "auc")
_BETTER_IF_LOW = ("loss", "wer", "cer", "perplexity", "ppl", "error", "rate")


@dataclass(frozen=True)
class Setting:
    """A group of runs, and its rows of the table of all runs."""

    group: Group
    rows: Sequence[Row]

    @property
    def is_dense(self) -> bool:
        return self.group.algorithm == DENSE

    @property
    def is_done(self) -> bool:
        return all(row["finished"] for row in self.rows)

    @property
    def stays_sparse(self) -> bool:
        return all(run["now"]["phase"] == SPARSE for run in self.group.runs)

    def byte_share(self) -> float | None:
        """Bytes against dense: of sparse steps, or of all steps if the last ones were dense."""
        if self.stays_sparse:
            return self.mean("of_dense")
        found = spread([_share_of_all(row) for row in self.rows])
        return None if found is None else found[0]

    def mean(self, name: str) -> float | None:
        found = self.spread(name)
        return None if found is None else found[0]

    def spread(self, name: str) -> Spread | None:
        return spread([row[name] for row in self.rows])

    def metric(self, name: str | None) -> Spread | None:
        return spread([row["validation"].get(name) for row in self.rows])


def _share_of_all(row: Row) -> float | None:
    """What a run sent in all steps, against a dense one."""
    if not (row["of_dense"] and row["sent_bytes"] and row["steps"] and row["sent_so_far_bytes"]):
        return None
    dense = row["sent_bytes"] / row["of_dense"]
    return float(row["sent_so_far_bytes"] / (row["steps"] * dense))


def list_settings(document: Row) -> list[Setting]:
    return [Setting(group, group.finals(document["finals"])) for group in group_runs(document["runs"])]


def sweep_tiles(document: Row) -> list[Tile]:
    """The headline of several runs: the best setting by bytes, by time and by quality, beside dense.

    Settings whose runs have not finished take no part, unless there is no other.
    """
    settings = list_settings(document)
    done = [one for one in settings if one.is_done] or settings
    tiles = [_least_bytes(done), _fastest(done), _best(done, compared_metric(document["runs"]))]
    return [*(tile for tile in tiles if tile is not None), _finished(document["finals"])]


def _least_bytes(settings: Sequence[Setting]) -> Tile | None:
    """By sparse steps; a setting that went back to dense counts with all of its steps."""
    label = "Fewest bytes against dense"
    known = [(share, one) for one in settings if not one.is_dense and (share := one.byte_share())]
    if not known:
        return None
    share, least = min(known, key=lambda pair: pair[0])
    steps = "a sparse step sends" if least.stays_sparse else "all steps together send"
    detail = f"{least.group.name}: {steps} {percent(share)} of dense (ring, modelled)."
    return Tile(label, *compare_bytes(share, 1.0, detail))


def _fastest(settings: Sequence[Setting]) -> Tile | None:
    known = [(seconds, one) for one in settings if (seconds := one.spread("step_seconds"))]
    if not known:
        return None
    dense = next((seconds for seconds, one in known if one.is_dense), None)
    others = [pair for pair in known if not pair[1].is_dense]
    seconds, fastest = min(others or known, key=lambda pair: pair[0][0])
    if dense is None or not others:
        missing = "dense" if dense is None else "sparse"
        return Tile(
            "Fastest step", format_seconds(seconds[0]), f"{fastest.group.name}; no {missing} run beside it."
        )
    value, tone = compare(seconds[0], dense[0], "faster", "slower", "as fast")
    detail = f"{fastest.group.name}: {format_seconds(seconds[0])}; dense takes {format_seconds(dense[0])}."
    if not is_clear(seconds, dense):
        value, tone = "no clear difference", PLAIN
        detail += " That is within the spread over seeds."
    return Tile("Fastest step against dense", value, detail, tone)


def _best(settings: Sequence[Setting], metric: str | None) -> Tile | None:
    """The best value of a metric whose direction its name tells, or else the range."""
    known = [(found[0], one) for one in settings if (found := one.metric(metric)) is not None]
    if metric is None or not known:
        return None
    low, high = (choose(known, key=lambda pair: pair[0]) for choose in (min, max))
    high_is_good, low_is_good = (
        any(word in metric.lower() for word in words) for words in (_BETTER_IF_HIGH, _BETTER_IF_LOW)
    )
    if high_is_good == low_is_good:
        detail = f"{low[1].group.name} to {high[1].group.name}, at the last validation."
        return Tile(metric, f"{low[0]:.4g} to {high[0]:.4g}", detail)
    value, best = high if high_is_good else low
    dense = next((one.metric(metric) for _, one in known if one.is_dense), None)
    beside = "" if dense is None or best.is_dense else f"; dense has {_plus_minus(dense, '{:.4g}'.format)}"
    if best.is_dense and len(known) > 1:
        rest = [pair for pair in known if not pair[1].is_dense]
        value2, second = (max if high_is_good else min)(rest, key=lambda pair: pair[0]) if rest else known[0]
        beside = f"; {second.group.name} has {value2:.4g}"
    return Tile(f"Best {metric}", f"{value:.4g}", f"{best.group.name}, at the last validation{beside}.")


def _finished(finals: Sequence[Row]) -> Tile:
    done, skipped = sum(row["finished"] for row in finals), sum(row["skipped"] for row in finals)
    left = len(finals) - done
    detail = "All runs finished." if not left else f"{left} not finished: their figures are those so far."
    more = f" {skipped:,} skipped steps." if skipped else ""
    return Tile("Runs", f"{done} of {len(finals)} finished", detail + more, BAD if left or skipped else PLAIN)


def settings_table(document: Row) -> str:
    """Means over seeds, a row for each setting."""
    settings, metric = list_settings(document), compared_metric(document["runs"])
    columns: dict[str, Callable[[Setting], object]] = {
        "setting": lambda one: one.group.name,
        "seeds": lambda one: len(one.rows),
        **({str(metric): lambda one: _plus_minus(one.metric(metric), "{:.4g}".format)} if metric else {}),
        "last loss": lambda one: _plus_minus(one.spread("loss"), "{:.4g}".format),
        "sent per step": _mean("sent_bytes", format_bytes),
        "of dense": _mean("of_dense", percent),
        "time per step": lambda one: _plus_minus(one.spread("step_seconds"), format_seconds),
        "hidden": _mean("hidden_work_share", percent),
        "density sent": _mean("local_density", percent),
        "sent in all": _mean("sent_so_far_bytes", format_bytes),
        "time in steps": _mean("elapsed_seconds", format_seconds),
    }
    caption = (
        "Means over seeds ± standard deviation, of the sparse phase, or of the dense one if there is no other; "
        "times leave out its first step. Bytes are those of rank 0; of dense: against a ring of fp32. Hidden: the "
        "share of the reductions' work that ran during backward and cost no time."
    )
    rows = [[of(one) for of in columns.values()] for one in settings]
    return table(list(columns), rows, long=0) + f'<p class="soft">{caption}</p>'


def _mean(name: str, form: Callable[[Any], str]) -> Callable[[Setting], object]:
    return lambda one: None if (mean := one.mean(name)) is None else form(mean)


def _plus_minus(found: Spread | None, form: Callable[[Any], str]) -> str | None:
    """
    >>> _plus_minus((0.5, 0.01), "{:.3g}".format), _plus_minus((0.5, None), "{:.3g}".format)
    ('0.5 ± 0.01', '0.5')
    """
    if found is None:
        return None
    mean, deviation = found
    return form(mean) + ("" if deviation is None else f" ± {form(float(f'{deviation:.2g}'))}")
