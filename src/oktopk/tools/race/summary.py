"""What the finished cells of a race say together: one document for the table, JSON, CSV, page and picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oktopk.algorithms.volume import WORD_BYTES, ring_words
from oktopk.tools.crossover import Cost, measure_crossover, predict_crossover
from oktopk.tools.hooks import DDP
from oktopk.utils.schemas import add_schema

from .cells import Finished, Point
from .compose import UNSTEADY, PhaseMean, compose, phase_means
from .links import link_rate
from .spec import FULL, QUALITY, TIMING, Race, RaceError

COMPOSED = "composed"


@dataclass(frozen=True)
class Trial:
    """One contender on one link with one seed: run in full, or composed."""

    contender: str
    link: str
    seed: int
    how: str
    ended: str
    steps: int
    seconds: float
    sent_bytes: float
    phases: Mapping[str, PhaseMean]
    curve: Sequence[Point]
    parameters: int
    metric: str

    def reached(self, race: Race) -> Point | None:
        """The first validation that reached the target."""
        target = race.target
        return None if target is None else next((p for p in self.curve if target.reached(p.metrics)), None)

    def best(self, race: Race) -> float | None:
        """The best value of the metric that is compared."""
        known = [value for point in self.curve if (value := point.metrics.get(self.compared(race))) is not None]
        if not known:
            return None
        return min(known) if race.target is None or race.target.at_most else max(known)

    def compared(self, race: Race) -> str:
        return self.metric if race.target is None else race.target.metric


def make_trials(cells: Iterable[Finished]) -> list[Trial]:
    """All trials that the finished cells make: full cells, and quality cells composed with every timed link."""
    found = list(cells)
    trials = [_full(cell) for cell in found if cell.spec.cell.kind == FULL]
    timed = {
        (one.spec.cell.contender, one.spec.cell.link): phase_means(one.steps, UNSTEADY)
        for one in found
        if one.spec.cell.kind == TIMING
    }
    for cell in found:
        if cell.spec.cell.kind == QUALITY:
            name = cell.spec.cell.contender
            trials += [_composed(cell, link, means) for (who, link), means in timed.items() if who == name]
    return trials


def _full(cell: Finished) -> Trial:
    return _trial(cell, cell.spec.cell.link, FULL, phase_means(cell.steps), cell.curve)


def _composed(cell: Finished, link: str, means: Mapping[str, PhaseMean]) -> Trial:
    steps, curve = compose(cell.steps, cell.curve, means)
    return _trial(cell, link, COMPOSED, phase_means(steps), curve)


def _trial(cell: Finished, link: str, how: str, phases: Mapping[str, PhaseMean], curve: Sequence[Point]) -> Trial:
    spec, result = cell.spec.cell, cell.result
    seconds = sum(mean.steps * mean.seconds for mean in phases.values())
    sent = sum(mean.steps * mean.sent_bytes for mean in phases.values())
    try:
        ended, metric = str(result["ended"]), str(result["metric"])
        steps, parameters = int(result["steps"]), int(result["parameters"])
    except (LookupError, TypeError, ValueError) as error:
        raise RaceError(f"the result of {cell.spec.cell} is incomplete or damaged: remove its folder") from error
    return Trial(
        spec.contender, link, spec.seed, how, ended, steps, seconds, sent, phases, curve, parameters, metric
    )


def build_summary(
    race: Race, cells: Iterable[Finished], failures: Sequence[Mapping[str, str]] = ()
) -> dict[str, Any]:
    """Build the document of a race, of primitives only."""
    trials = make_trials(cells)
    rows = [_row(race, group) for group in _groups(trials)]
    for row in rows:
        dense = next((one for one in rows if _beside(one, row)), None)
        times = [one["seconds"]["mean"] for one in (dense, row) if one and one["seconds"]]
        row["ddp_over_it"] = times[0] / times[1] if len(times) == 2 and times[1] else None
    rows.sort(key=_rank)
    document = {
        "target": None if race.target is None else str(race.target),
        "seconds": race.seconds,
        "metric": trials[0].compared(race) if trials else None,
        "race": asdict(race),
        "rows": rows,
        "trials": [_describe(race, trial) for trial in trials],
        "crossovers": _crossovers(race, trials),
        "deviations": _deviations(race, trials),
        "failures": [dict(one) for one in failures],
    }
    return add_schema("race", document)


def _groups(trials: Sequence[Trial]) -> list[list[Trial]]:
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.contender, trial.link, trial.how), []).append(trial)
    return list(groups.values())


def _beside(one: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether this is the row of DDP to compare another one with."""
    return one["contender"] == DDP and (one["link"], one["how"]) == (row["link"], row["how"])


def _rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Fast links first, then whoever was best."""
    best = row["seconds"]["mean"] if row["seconds"] else math.inf
    final = row["final"]["mean"] if row["final"] else math.inf
    return -link_rate(row["link"]), row["how"], best, final if row["less_is_better"] else -final


def _row(race: Race, trials: Sequence[Trial]) -> dict[str, Any]:
    """The row of one contender on one link, over its seeds."""
    first, reached = trials[0], [trial.reached(race) for trial in trials]
    hits = [point for point in reached if point is not None]
    steps, sent = sum(trial.steps for trial in trials), sum(trial.sent_bytes for trial in trials)
    ring = WORD_BYTES * ring_words(first.parameters, race.ranks)
    last = [trial.curve[-1].metrics.get(trial.compared(race)) for trial in trials if trial.curve]
    best = [value for trial in trials if (value := trial.best(race)) is not None]
    less = race.target is None or race.target.at_most
    return {
        "contender": first.contender,
        "link": first.link,
        "how": first.how,
        "seeds": len(trials),
        "step_seconds": sum(trial.seconds for trial in trials) / steps if steps else None,
        "phase_seconds": _phase_seconds(trials),
        "sent_bytes": sent / steps if steps else None,
        "of_dense": sent / steps / ring if steps and ring else None,
        "ended": [trial.ended for trial in trials],
        "steps": _spread([p.step for p in hits] if race.target else [trial.steps for trial in trials]),
        "reached": len(hits),
        "seconds": _spread([p.seconds for p in hits]) if len(hits) == len(trials) else None,
        "final": _spread([value for value in last if value is not None]),
        "best": (min(best) if less else max(best)) if best else None,
        "most_steps": max(trial.steps for trial in trials),
        "less_is_better": less,
    }


def _phase_seconds(trials: Sequence[Trial]) -> dict[str, float]:
    names = dict.fromkeys(name for trial in trials for name in trial.phases)
    found = {}
    for name in names:
        parts = [trial.phases[name] for trial in trials if name in trial.phases]
        found[name] = sum(p.steps * p.seconds for p in parts) / sum(p.steps for p in parts)
    return found


def _spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, and standard deviation of several values."""
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": deviation, "values": list(values)}


def _describe(race: Race, trial: Trial) -> dict[str, Any]:
    reached = trial.reached(race)
    names = ("contender", "link", "seed", "how", "ended", "steps", "seconds")
    return {
        **{name: getattr(trial, name) for name in names},
        "sent_bytes": trial.sent_bytes,
        "reached_step": reached and reached.step,
        "reached_seconds": reached and reached.seconds,
        "reached_bytes": reached and reached.sent_bytes,
        "best": trial.best(race),
        "phases": {name: asdict(mean) for name, mean in trial.phases.items()},
        "curve": [asdict(point) for point in trial.curve],
    }


def _deviations(race: Race, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """How far composed times are from those of the same cells in full."""
    full = {(one.contender, one.link, one.seed): one for one in trials if one.how == FULL}
    found = []
    for one in trials:
        same = full.get((one.contender, one.link, one.seed)) if one.how == COMPOSED else None
        reached = [trial.reached(race) for trial in (one, same) if trial is not None]
        times = [point.seconds for point in reached if point is not None and point.seconds]
        if len(times) == 2:
            share = times[0] / times[1] - 1
            found.append(
                {"contender": one.contender, "link": one.link, "seed": one.seed, "composed_over_full": share}
            )
    return found


def _crossovers(race: Race, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """B*, the rate below which a contender is faster to the target than DDP: measured and predicted."""
    totals: dict[str, dict[float, Cost]] = {}
    for group in sorted(_groups(trials), key=lambda one: one[0].how == FULL):  # full cells replace composed ones
        reached = [point for trial in group if (point := trial.reached(race)) is not None]
        if len(reached) == len(group):
            cost = Cost(
                statistics.fmean(p.seconds for p in reached), statistics.fmean(p.sent_bytes for p in reached)
            )
            totals.setdefault(group[0].contender, {})[link_rate(group[0].link)] = cost
    dense = totals.get(DDP, {})
    found = []
    for name, costs in totals.items():
        shared = sorted(set(costs) & set(dense))
        if name == DDP or not shared:
            continue
        limited = [rate for rate in shared if rate < math.inf]
        measured = measure_crossover(
            {rate: dense[rate].seconds for rate in limited}, {rate: costs[rate].seconds for rate in limited}
        )
        predicted = predict_crossover(_unlimited(dense, shared[-1]), _unlimited(costs, shared[-1]))
        found.append({
            "contender": name,
            "against": DDP,
            "measured": measured and measured[0],
            "between": measured and list(measured[1:]),
            "predicted": None if predicted is None or math.isinf(predicted) else predicted,
            "faster_on": [rate for rate in limited if costs[rate].seconds < dense[rate].seconds],
            "links": limited,
        })  # fmt: skip
    return found


def _unlimited(costs: Mapping[float, Cost], rate: float) -> Cost:
    """The cost at an unlimited rate, from that of the fastest link: without its bytes over that link."""
    known = costs[rate]
    return Cost(max(0.0, known.seconds - 8 * known.sent_bytes / rate), known.sent_bytes)


__all__ = ["COMPOSED", "Trial", "build_summary", "link_rate", "make_trials"]
