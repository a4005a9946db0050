"""Answer the user's first questions about a run, in words with units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oktopk.engine.settings import AUTO
from oktopk.metrics.events import DENSE, SPARSE

from ..units import format_bytes, format_seconds, percent
from .parsing import whole
from .runs import Decision, Run

Phases = Mapping[str, Mapping[str, Any]]


def answers(run: Run, phases: Phases, messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    if not run.steps:
        return [{"question": "What happened?", "answer": "No step has been recorded yet."}]
    last = SPARSE if SPARSE in phases else DENSE
    means = phases.get(last)
    texts = {"When did the sparse phase start?": _start(run, phases)}
    if run.decisions or run.plan.get("auto") is True:
        texts["What did auto decide?"] = _decided(run)
    if means is not None:
        texts |= {
            "What density was achieved?": _density(run, means, last),
            "How many bytes did a rank really send?": _bytes(run, means, last),
            "Where did the time of a step go?": _time(means, last),
            "How much of the reductions was hidden behind backward?": _hidden(means, last),
            "How large were the messages?": _messages(messages, last, means["steps"]),
        }
    texts |= {"Does it learn?": _learning(run), "Were steps skipped?": _skipped(run)}
    return [{"question": question, "answer": answer} for question, answer in texts.items()]


def first_sparse(run: Run) -> int | None:
    return next((step.number for step in run.steps if step.phase == SPARSE), None)


def _start(run: Run, phases: Phases) -> str:
    begin, total = first_sparse(run), len(run.steps)
    if begin is not None:
        step = next(step for step in run.steps if step.number == begin)
        epoch = step.train.get("epoch")
        where = f"At step {begin:,} (the first is 0)"
        if epoch is not None:
            where = f"At step {begin:,}, in epoch {epoch:.0f} (both count from 0)"
        dense, sparse = (phases.get(phase, {}).get("steps", 0) for phase in (DENSE, SPARSE))
        return f"{where}. Of {total:,} steps so far, {dense:,} were dense and {sparse:,} sparse."
    if run.algorithm == DENSE:
        return f"Never, as intended: this run is dense. It has {total:,} steps so far."
    planned = whole(run.plan, "dense_steps")
    until = "" if planned is None else f" The plan starts with {planned:,} dense steps."
    return f"Not yet: all {total:,} steps were dense.{until}"


def _decided(run: Run) -> str:
    """The first decision, and those that changed it; how often it was confirmed."""
    if not run.decisions:
        return "Nothing so far: it had not timed both dense and sparse steps."
    told, way = [], None
    for decision in run.decisions:
        if decision.dense is not way:
            verb = "it chose" if way is None else "it went back to" if decision.dense else "it changed to"
            told.append(f"From step {decision.step:,} on {verb} {_WAYS[decision.dense]}: {_measured(decision)}.")
        way = decision.dense
    tests = len(run.decisions)
    later = run.decisions[-1].figures.get("next_test")
    told.append(
        f"{tests} comparison{'s' * (tests > 1)} so far" + (f"; the next at step {later:,.0f}." if later else ".")
    )
    return " ".join(told)


_WAYS = {True: DENSE, False: SPARSE}


def _measured(decision: Decision) -> str:
    """Seconds and bytes of both ways, the one that was chosen first."""

    def both(unit: str, show: Callable[[float], str]) -> str:
        known = [decision.figures.get(f"{_WAYS[way]}_{unit}") for way in (decision.dense, not decision.dense)]
        return " instead of ".join(show(x) for x in known if x) if all(known) else ""

    times, sent = both("seconds", format_seconds), both("bytes", format_bytes)
    parts = [
        f"{times} per step, from its first bucket to its end" if times else "",
        f"{sent} sent" if sent else "",
    ]
    return ", ".join(part for part in parts if part) or "no times were recorded"


def _density(run: Run, means: Mapping[str, Any], phase: str) -> str:
    if phase == DENSE:
        return "All entries were sent: density 100 %."
    band = means["in_band_share"]
    kept = "" if band is None else f" {percent(band)} of the steps were within the algorithm's band around it."
    asked = run.lookup("density")
    wanted = f" {percent(asked)} was asked for." if isinstance(asked, float) else ""
    if asked == AUTO:
        wanted = " The density was chosen by measurement."
    return (
        f"Rank 0 sent {percent(means['local_density'])} of its entries in a sparse step on average; the target "
        f"was {percent(means['target_density'])}.{kept}{wanted} The result had density "
        f"{percent(means['global_density'])}."
    )


def _bytes(run: Run, means: Mapping[str, Any], phase: str) -> str:
    sent, dense = means["sent_bytes"], means["dense_bytes"]
    ranks = means["sent_bytes_by_rank"]
    every = (
        f" All ranks, in finished epochs: {format_bytes(min(ranks))} to {format_bytes(max(ranks))}."
        if ranks
        else ""
    )
    first = f"Rank 0 sent {format_bytes(sent)} per {phase} step on average.{every}"
    if run.world == 1:
        return f"{first} There is no other rank: nothing to exchange, and nothing that compression could save."
    if phase == DENSE:
        return f"{first} The library's all-reduce does not report its bytes: this is what a ring sends."
    if not sent or dense is None:
        return f"{first} The bytes of a dense step are not known."
    six, two = means["bound_6k_bytes"], means["bound_2k_bytes"]
    against = f"A dense step sends {format_bytes(dense)} (ring, modelled): {dense / sent:.3g} times as much"
    entries = means["target_density"]
    against += f", where the entries are {1 / entries:.3g} times fewer (n/k)." if entries else "."
    if not six or not two:
        return f"{first} {against}"
    return (
        f"{first} {against} The bound of 6k words is {format_bytes(six)}: the run used {percent(sent / six)} of "
        f"it. 2k words are {format_bytes(two)}; coded indices can go below that."
    )


def _time(means: Mapping[str, Any], phase: str) -> str:
    shares, seconds = means["shares"], means["step_seconds"]
    if not seconds:
        return "No times were recorded."
    names = _GROUP
    if not (means["seconds"].get("forward") or means["seconds"].get("backward")):  # not timed by the loop
        names = {group: name for group, name in _GROUP.items() if group != "compute"} | _NOT_TIMED
    parts = ", ".join(f"{names[group]} {percent(share)}" for group, share in shares.items() if group in names)
    first = " The first step of the phase, which may compile kernels, is left out." if means["steps"] > 1 else ""
    return (
        f"A {phase} step took {format_seconds(seconds)} on average: {parts}. Hidden work, which ran during "
        f"backward, is not included.{first}"
    )


_GROUP = {
    "compute": "compute (forward and backward)",
    "compress": "compress (select, encode, sums and copies)",
    "communicate": "communicate (exchange and loss round)",
    "wait": "wait for late ranks",
    "rest": "the rest (data, update)",
}
_NOT_TIMED = {
    "communicate": "communicate (exchange, and waking the main thread)",
    "rest": "the rest (data, forward, backward and update, which the loop did not time)",
}


def _hidden(means: Mapping[str, Any], phase: str) -> str:
    if means["hidden_work_share"] is None:
        return "Not recorded."
    hidden, busy = sum(means["hidden_seconds"].values()), means["reduction_seconds"]
    return (
        f"{percent(means['hidden_work_share'])} of their work. In a {phase} step they took "
        f"{format_seconds(busy)}, of which {format_seconds(hidden)} ran during backward (hidden: it cost the "
        f"step nothing) and {format_seconds(busy - hidden)} after it (exposed: the step waited)."
    )


def _messages(kinds: list[dict[str, Any]], phase: str, steps: int) -> str:
    ours = [kind for kind in kinds if kind["phase"] == phase]
    counted, total = sum(kind["messages"] for kind in ours), sum(kind["bytes"] for kind in ours)
    if not counted:
        return "No messages were recorded."
    main = max(ours, key=lambda kind: kind["bytes"])
    name = f"{main['operation']} ({main['stage']}{', modelled' if main['modelled'] else ''})"
    share = f" {name} carried {percent(main['bytes'] / total)} of the bytes." if total else ""
    return (
        f"Rank 0 sent {counted / steps:.3g} messages per {phase} step on average, of "
        f"{format_bytes(total / counted)} each.{share}"
    )


def _learning(run: Run) -> str:
    losses = [step.train["loss"] for step in run.steps if "loss" in step.train]
    tenth = max(1, len(losses) // 10)
    summary = "No loss was recorded."
    if losses:
        first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
        steps = "step" if tenth == 1 else f"{tenth:,} steps"
        summary = f"The loss went from {first:.4g} to {last:.4g} (means of the first and last {steps})."
    if not run.validations:
        return f"{summary} There is no validation yet."
    last_one = run.validations[-1]
    figures = ", ".join(f"{name} {value:.4g}" for name, value in last_one.figures.items())
    epoch = "" if last_one.epoch is None else f", epoch {last_one.epoch}"
    return f"{summary} Last validation (after {last_one.step:,} steps{epoch}): {figures or 'nothing'}."


def _skipped(run: Run) -> str:
    skipped = [step for step in run.steps if step.skipped]
    if not skipped:
        return "None: all losses and gradients were finite."
    first = f" The first was step {skipped[0].number:,}: {skipped[0].culprits or 'cause not known'}."
    return f"{len(skipped):,} of {len(run.steps):,}, because of non-finite values.{first}"
