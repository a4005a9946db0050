"""The headline of a page: a few tiles with a figure and what it means. A tile says less rather than too much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oktopk.metrics.events import DENSE, SPARSE

from ..analysis.times import GROUPS
from ..units import format_bytes, format_seconds, percent
from .comparison import compared_metric
from .tables import breakable, safe

GOOD, BAD, PLAIN = "good", "bad", "plain"
SAME = 0.03
"""Ratios closer to 1 than this are no difference."""
_SHORT = 14
"""Letters of a value in large type."""
_NOT_KNOWN = "not known"
_OTHER_MACHINE = 0.2
"""Difference of forward and backward, which is not that of the exchange, from which times are no verdict on it."""
_FEW = 5
"""Steps of a phase, below which a comparison of times says how many there were."""
Run = Mapping[str, Any]
Spread = tuple[float, "float | None"]
"""Mean and standard deviation."""


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    detail: str
    tone: str = PLAIN


def draw_tiles(tiles: Sequence[Tile]) -> str:
    return f'<div class="tiles">{"".join(map(_draw_tile, tiles))}</div>'


def _draw_tile(tile: Tile) -> str:
    size = " long" if len(tile.value) > _SHORT else ""
    return (
        f'<div class="tile {tile.tone}"><div class="what">{safe(tile.label)}</div>'
        f'<div class="value{size}">{safe(tile.value)}</div>'
        f'<div class="detail">{breakable(tile.detail)}</div></div>'
    )


def format_factor(ratio: float) -> str:
    """
    >>> format_factor(1.207), format_factor(6.02), format_factor(74.4)
    ('1.21×', '6.0×', '74×')
    """
    return f"{ratio:.{2 if ratio < 1.995 else 1 if ratio < 9.95 else 0}f}×"


def compare(ours: float, dense: float, less: str, more: str, same: str) -> tuple[str, str]:
    """In words, and with its tone, how an amount compares with that of dense; less is better.

    >>> compare(1.0, 74.4, "fewer", "more", "as many"), compare(3.0, 2.0, "faster", "slower", "as fast")
    (('74× fewer', 'good'), ('1.50× slower', 'bad'))
    """
    if abs(ours / dense - 1) < SAME:
        return same, PLAIN
    return (f"{format_factor(dense / ours)} {less}", GOOD) if ours < dense else (
        f"{format_factor(ours / dense)} {more}", BAD)  # fmt: skip


def is_clear(one: Spread, other: Spread) -> bool:
    """Whether two means differ by more than their standard deviations together.

    >>> is_clear((1.0, None), (2.0, None)), is_clear((1.0, 0.8), (2.0, 0.3))
    (True, False)
    """
    return abs(one[0] - other[0]) > (one[1] or 0.0) + (other[1] or 0.0)


def run_tiles(run: Run) -> list[Tile]:
    """The headline of a run."""
    if not run["about"]["steps"]:
        return [Tile("Steps", "none yet", "No step has been recorded.")]
    tiles = [_bytes(run), _time(run), _quality(run), _phase(run)]
    count = run["skipped"]["count"]
    if count:
        tiles.append(Tile("Skipped steps", f"{count:,}", f"of {run['about']['steps']:,}: non-finite values", BAD))
    return tiles


def _bytes(run: Run) -> Tile:
    label, phases = "Bytes against dense", run["phases"]
    sparse, dense = phases.get(SPARSE), phases.get(DENSE)
    if run["about"]["world"] == 1:
        return Tile(label, "nothing sent", "One rank: there is nothing to exchange, and nothing to save.")
    if sparse is None:
        if dense is None or not dense["sent_bytes"]:
            return Tile(label, _NOT_KNOWN, "No bytes were recorded.")
        return Tile(label, "no saving", f"{_why_dense(run)}: {format_bytes(dense['sent_bytes'])} per step.")
    sent, ring = sparse["sent_bytes"], sparse["dense_bytes"] or (dense or {}).get("sent_bytes")
    if not sent:
        why = "No bytes were recorded." if sent is None else "No other rank got anything."
        return Tile(label, _NOT_KNOWN if sent is None else "nothing sent", why)
    if not ring:
        return Tile(label, format_bytes(sent), "per sparse step; what a dense step sends is not known.")
    before = sum(means["steps"] * (means["dense_bytes"] or ring) for means in phases.values())
    total = (run["series"]["sent_so_far_bytes"] or [None])[-1]
    detail = f"{format_bytes(sent)} per sparse step, {format_bytes(ring)} dense (ring, modelled)."
    if not total or dense is None:
        return Tile(label, *compare_bytes(sent, ring, detail))
    if run["now"]["phase"] == SPARSE:
        return Tile(label, *compare_bytes(sent, ring, f"{detail} {percent(total / before)} over all steps."))
    counted = f"Over all steps: {sparse['steps']:,} of {run['about']['steps']:,} were sparse. "
    return Tile(label, *compare_bytes(total, before, counted + detail))


def compare_bytes(ours: float, dense: float, detail: str) -> tuple[str, str, str]:
    """The value, the detail and the tone of a tile about bytes."""
    value, tone = compare(ours, dense, "fewer", "more", "as many")
    return value, detail, tone


def _why_dense(run: Run) -> str:
    return "This run is dense" if run["about"]["algorithm"] == DENSE else "All steps were dense"


def _time(run: Run) -> Tile:
    label, phases = "Step time against dense", run["phases"]
    seconds = {phase: means["step_seconds"] for phase, means in phases.items() if means["step_seconds"]}
    if not seconds:
        return Tile(label, _NOT_KNOWN, "The training loop recorded no times.")
    if len(seconds) == 1:
        ((phase, only),) = seconds.items()
        other = "dense" if phase == SPARSE else "sparse"
        return Tile(label, format_seconds(only), f"per {phase} step; there is no {other} step to compare with.")
    value, tone = compare(seconds[SPARSE], seconds[DENSE], "faster", "slower", "as fast")
    few = [f"{means['steps']} {phase}" for phase, means in phases.items() if means["steps"] < _FEW]
    only_few = f" Only {' and '.join(few)} steps." if few else ""
    detail = f"{format_seconds(seconds[SPARSE])} sparse, {format_seconds(seconds[DENSE])} dense, means of rank 0."
    compute = [sum(phases[phase]["seconds"][stage] for stage in GROUPS["compute"]) for phase in (SPARSE, DENSE)]
    if all(compute) and abs(compute[0] / compute[1] - 1) > _OTHER_MACHINE:
        alone = " and ".join(map(format_seconds, compute))
        detail, tone = (
            f"{detail} Forward and backward alone took {alone}: the machine was not equally busy.",
            PLAIN,
        )
    if run["now"]["phase"] == DENSE:  # what it went back from
        label, tone = "Sparse steps against dense", PLAIN
    return Tile(label, value, detail + only_few, tone)


def _quality(run: Run) -> Tile:
    name = compared_metric([run])
    known = [one for one in run["validations"] if name in one["figures"]]
    if name is None or not known:
        return _loss(run)
    first, last = known[0]["figures"][name], known[-1]["figures"][name]
    others = ", ".join(f"{key} {value:.4g}" for key, value in known[-1]["figures"].items() if key != name)
    before = f" The first was {first:.4g}." if len(known) > 1 else ""
    detail = f"Validation after {known[-1]['step']:,} steps{others and '; ' + others[:80]}.{before}"
    return Tile(name, f"{last:.4g}", detail)


def _loss(run: Run) -> Tile:
    losses = [value for value in run["series"]["loss"]["mean"] if value is not None]
    if not losses:
        return Tile("Quality", _NOT_KNOWN, "Neither losses nor validations were recorded.")
    tenth = max(1, len(losses) // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    detail = f"Mean of the last tenth of the steps; {first:.4g} in the first. There is no validation."
    return Tile("Training loss", f"{last:.4g}", detail)


def _phase(run: Run) -> Tile:
    """What the steps were, and what `auto` decided."""
    about, now, sparse = run["about"], run["now"], run["phases"].get(SPARSE)
    label = "What auto decided" if about["auto"] else "Dense or sparse"
    if about["algorithm"] == DENSE:
        return Tile("Dense or sparse", "dense", "As asked for: the run compresses nothing.")
    if sparse is None:
        planned = run["plan"].get("dense_steps")
        until = f" The first {planned:,.0f} are a warm-up." if planned else ""
        value = "never sparse" if about["finished"] else "dense so far"
        return Tile(
            label, value, f"All {about['steps']:,} steps were dense.{until}", BAD if about["finished"] else PLAIN
        )
    counted = f"{sparse['steps']:,} of {about['steps']:,} steps were sparse"
    if now["phase"] == SPARSE:
        did, share = "selected" if about["world"] == 1 else "sent", sparse["local_density"]
        density = f"; rank 0 {did} {percent(share)} of its entries" if share else ""
        return Tile(label, f"sparse since step {now['since']:,}", f"{counted}{density}{_measured(run)}.")
    why = "auto found dense faster" if about["auto"] else "auto or a schedule went back to dense"
    return Tile(label, f"dense since step {now['since']:,}", f"{counted}: {why}{_measured(run)}.")


def _measured(run: Run) -> str:
    """The times that the last decision of `auto` was based on, if the run recorded it."""
    last = (run.get("decisions") or [{}])[-1]
    times = [last.get(name) for name in ("sparse_seconds", "dense_seconds")]
    if not all(times):
        return ""
    return f" ({format_seconds(times[0])} sparse, {format_seconds(times[1])} dense)"
