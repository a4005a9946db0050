"""What a simulation found, for programs and for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from oktopk.tools.tables import table

from .crossings import bounds, crossings
from .measure.costs import Costs
from .study import Answer, Question

GIVEN, HALF_GIVEN = "given", "overhead measured"
_HEAD = ["ranks", "algorithm", "step ms", "work ms", "MB sent", "messages", "words/k", "6k", "2k", "n recorded"]
_ORIGINS = """\
recorded: messages, their order and their entries: the real algorithms on this many ranks, which are threads,
          with a tensor of "n recorded" entries; the median of three steps, from 128 ranks on a single one.
          Steps that evaluate thresholds exactly have their share in it.
measured: work, by timing the real code on this machine with {each} on each core.
{link}
modelled: the time of messages on that link; their size at {params:,} parameters; a library's allreduce (dense,
          and small sums of oktopk) as a ring. There is no other traffic, and the switch has no limit.

A step is the reduction alone; work is the part of it in which a rank computes. MB sent is per rank and step.
words/k: words of four bytes over k, with a word for an index, as the bounds 6k(P-1)/P and 2k(P-1)/P count."""


def report(question: Question, costs: Costs, answers: Sequence[Answer], link: str) -> dict[str, Any]:
    """`link` says where α and β come from."""
    return {
        "question": {
            "params": question.size, "density": question.density, "k": question.k,
            "latency_seconds": question.network.latency, "bandwidth_bytes": question.network.bandwidth,
            "overhead_seconds": question.network.overhead or 0.0,
            "link": link, "ranks_per_core": costs.ranks_per_core,
        },
        "answers": [_answer(one, question) for one in answers],
        "bounds": [
            {"ranks": ranks, **{f"{name}_words": words for name, words in asdict(found).items()}}
            for ranks in question.ranks
            for found in [bounds(ranks, question.size, question.k)]
        ],
        "crossings": [asdict(crossing) for crossing in crossings(answers)],
        "costs": asdict(costs),
    }  # fmt: skip


def _answer(one: Answer, question: Question) -> dict[str, Any]:
    return {
        "ranks": one.ranks, "algorithm": one.algorithm, **asdict(one.step),
        "words_per_k": one.step.words / question.k, "usual_step_seconds": one.usual_seconds,
        "exact_step_seconds": one.exact_seconds,
        "recorded_params": one.recorded_size, "recorded_k": one.recorded_k,
    }  # fmt: skip


def text(told: dict[str, Any]) -> str:
    """The table, who overtakes whom, and where the figures come from."""
    k, limits = told["question"]["k"], {one["ranks"]: one for one in told["bounds"]}
    rows = [
        [
            one["ranks"], one["algorithm"], 1e3 * one["seconds"], 1e3 * one["work_seconds"],
            one["sent_bytes"] / 1e6, f"{one['messages']:.0f}", f"{one['words_per_k']:.2f}",
            *(f"{limits[one['ranks']][name] / k:.2f}" for name in ("oktopk_words", "sparse_words")),
            f"{one['recorded_params']:,}",
        ]
        for one in told["answers"]
    ]  # fmt: skip
    return "\n\n".join([table(_HEAD, rows), _crossings(told["crossings"]), _origins(told["question"])])


def _crossings(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"  {one['faster']} becomes faster than {one['slower']} at about {one['ranks']:.3g} ranks "
        f"(between {one['after']} and {one['until']})"
        for one in found
    ]
    return "\n".join(["crossings:", *(lines or ["  none among these numbers of ranks"])])


def _origins(asked: dict[str, Any]) -> str:
    gbit, micro, each = asked["bandwidth_bytes"] * 8e-9, asked["latency_seconds"] * 1e6, asked["ranks_per_core"]
    link = f"a link of {gbit:.4g} Gbit/s and {micro:.4g} µs for each rank"
    message = f"{asked['overhead_seconds'] * 1e6:.4g} µs of a rank for each message"
    links = {
        GIVEN: f"given:    {link}, {message}.",
        HALF_GIVEN: f"measured: {message}, over TCP on the loopback.\ngiven:    {link}.",
    }
    told = links.get(asked["link"], f"measured: {link}, {message},\n          {asked['link']}.")
    return _ORIGINS.format(each="one rank" if each == 1 else f"{each} ranks", link=told, params=asked["params"])
