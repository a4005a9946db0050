"""Report a simulation, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from oktopk.tools.crossover import crossover_figures, format_rate
from oktopk.tools.tables import format_table
from oktopk.utils.schemas import add_schema

from .crossings import bounds, find_crossings
from .measure.costs import Costs
from .study import DENSE, Answer, Question

GIVEN, HALF_GIVEN = "given", "overhead measured"
_HEAD = ["ranks", "algorithm", "step ms", "work ms", "MB sent", "messages", "words/k", "6k", "2k", "n recorded"]
_ORIGINS = """\
recorded: messages, their order and their entries, from the real algorithms on this many ranks (threads) with a
          tensor of "n recorded" entries; the median of three steps, or a single step from 128 ranks on. Steps with
          exact thresholds contribute their share.
measured: work, by timing the real code on this machine with {each} per core.
{link}
modelled: the time of messages on that link; their size at {params:,} parameters; the library's all-reduce (dense,
          and the small sums of oktopk) as a ring. There is no other traffic, and the switch has no limit.

In the first table a step is the all-reduce alone; work is the part in which a rank computes. MB sent is per rank
and step.
words/k: words of four bytes divided by k, with one word per index, as in the bounds 6k(P-1)/P and 2k(P-1)/P."""


def report(question: Question, costs: Costs, answers: Sequence[Answer], link: str) -> dict[str, Any]:
    """Build the report; `link` says where α and β come from."""
    document = {
        "question": {
            "params": question.size, "density": question.density, "k": question.k,
            "latency_seconds": question.network.latency, "bandwidth_bytes": question.network.bandwidth,
            "overhead_seconds": question.network.overhead or 0.0,
            "link": link, "ranks_per_core": costs.ranks_per_core,
            "model_step": question.step and {**asdict(question.step), "seconds": question.step.seconds},
        },
        "answers": [_answer(one, question) for one in answers],
        "whole_steps": whole_steps(question, answers),
        "bounds": [
            {"ranks": ranks, **{f"{name}_words": words for name, words in asdict(found).items()}}
            for ranks in question.ranks
            for found in [bounds(ranks, question.size, question.k)]
        ],
        "crossings": [asdict(crossing) for crossing in find_crossings(answers)],
        "costs": asdict(costs),
    }  # fmt: skip
    return add_schema("simulate", document)


def _answer(one: Answer, question: Question) -> dict[str, Any]:
    return {
        "ranks": one.ranks, "algorithm": one.algorithm, **asdict(one.step),
        "words_per_k": one.step.words / question.k, "usual_step_seconds": one.usual_seconds,
        "exact_step_seconds": one.exact_seconds,
        "recorded_params": one.recorded_size, "recorded_k": one.recorded_k,
    }  # fmt: skip


def whole_steps(question: Question, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Whole steps of the model with each algorithm, and the rate below which it is faster than dense."""
    rate = 8 * question.network.bandwidth
    dense = {one.ranks: one.cost(question) for one in answers if one.algorithm == DENSE}
    found = []
    for one in answers:
        cost, other = one.cost(question), dense.get(one.ranks)
        if one.ranks > 1:
            against: dict[str, Any] = {"dense_over_it": None, "crossover": None, "faster": None}
            if other is not None and one.algorithm != DENSE:
                against = {"dense_over_it": other.at(rate) / cost.at(rate), **crossover_figures(other, cost)}
            found.append({"ranks": one.ranks, "algorithm": one.algorithm, "seconds": cost.at(rate), **against})
    return found


def text(report: dict[str, Any]) -> str:
    """Format the table, the crossings, and the origin of the numbers."""
    k, limits = report["question"]["k"], {one["ranks"]: one for one in report["bounds"]}
    rows = [
        [
            one["ranks"], one["algorithm"], 1e3 * one["seconds"], 1e3 * one["work_seconds"],
            one["sent_bytes"] / 1e6, f"{one['messages']:.0f}", f"{one['words_per_k']:.2f}",
            *(f"{limits[one['ranks']][name] / k:.2f}" for name in ("oktopk_words", "sparse_words")),
            f"{one['recorded_params']:,}",
        ]
        for one in report["answers"]
    ]  # fmt: skip
    parts = [format_table(_HEAD, rows), _does_it_pay(report), _crossings(report["crossings"])]
    return "\n\n".join([*parts, _origins(report["question"])])


def _does_it_pay(report: dict[str, Any]) -> str:
    question, step = report["question"], report["question"]["model_step"]
    rate = format_rate(8 * question["bandwidth_bytes"])
    rows = [
        [
            one["ranks"], one["algorithm"], 1e3 * one["seconds"],
            None if one["dense_over_it"] is None else f"{one['dense_over_it']:.2f}", one["faster"],
        ]
        for one in report["whole_steps"]
    ]  # fmt: skip
    if not rows:
        return "does it pay? On one rank there is nothing to exchange."
    if step is None:
        head = (
            f"does it pay at {rate}? The exchange alone; --dnn NAME or --compute-seconds S adds the model's step."
        )
    else:
        head = (
            f"does it pay at {rate}? A step without communication takes {1e3 * step['seconds']:.4g} ms "
            f"({step['what']}); backward hides a part of the exchange."
        )
    names = ["ranks", "algorithm", "whole step ms" if step else "step ms", "dense / it", "faster than dense (B*)"]
    return "\n".join([head, format_table(names, rows)])


def _crossings(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"  {one['faster']} becomes faster than {one['slower']} at about {one['ranks']:.3g} ranks "
        f"(between {one['after']} and {one['until']})"
        for one in found
    ]
    return "\n".join(["crossings:", *(lines or ["  none in this range of ranks"])])


def _origins(question: dict[str, Any]) -> str:
    gbit, micro, each = (
        question["bandwidth_bytes"] * 8e-9,
        question["latency_seconds"] * 1e6,
        question["ranks_per_core"],
    )
    link = f"a link of {gbit:.4g} Gbit/s and {micro:.4g} µs per rank"
    message = f"{question['overhead_seconds'] * 1e6:.4g} µs of a rank per message"
    links = {
        GIVEN: f"given:    {link}, {message}.",
        HALF_GIVEN: f"measured: {message}, over TCP on loopback.\ngiven:    {link}.",
    }
    origin = links.get(question["link"], f"measured: {link}, {message},\n          {question['link']}.")
    return _ORIGINS.format(
        each="one rank" if each == 1 else f"{each} ranks", link=origin, params=question["params"]
    )
