"""Format the records as text tables."""

from __future__ import annotations

from collections.abc import Sequence

from oktopk.algorithms.volume import WORD_BYTES, ring_words
from oktopk.tools.tables import format_table

from .records import INTERFACE, MODELLED, Record

_HEAD = (
    *("link", "contender", "step ms", "best ms", "ddp / it", "above backward ms", "CPU ms"),
    *("MB sent", "of dense", "exposed ms", "hidden"),
)
_LIMITS = ("limits ms", "above / limits")
_HOST = "MB over the host's link"
_MARKS = {MODELLED: " (model)", INTERFACE: " (link)"}
_MEANINGS = {
    MODELLED: "(model): bytes that the algorithm must send; the library's collective does not report its own",
    INTERFACE: "(link): bytes counted by the host's interface, with headers and acknowledgements",
}

_EXPLANATIONS = """\
exposed: the step waited for it after backward; hidden: the share of the exchange that ran during backward
of dense: bytes that a rank sent, against a ring of fp32 (2n(P-1)/P words)"""


def text(records: Sequence[Record]) -> str:
    """Format one row per contender and link, and notes below."""
    head, rows = list(_HEAD), [_row(record) for record in records]
    if any(record["limits_seconds"] is not None for record in records):
        head += _LIMITS
        rows = [row + _limits(record) for row, record in zip(rows, records, strict=True)]
    if any(record["ranks_per_host"] > 1 and record["interface_bytes"] is not None for record in records):
        head.append(_HOST)
        rows = [[*row, _over_link(record)] for row, record in zip(rows, records, strict=True)]
    shown = [format_table(head, rows)]
    sources = {record["sent_bytes_source"] for record in records}
    shown += [meaning for source, meaning in _MEANINGS.items() if source in sources]
    if any(record["exposed_seconds"] is not None for record in records):
        shown.append(_EXPLANATIONS)
    shown.append(_asked(records[0]))
    return "\n".join(shown)


def _row(record: Record) -> list[object]:
    hidden = record["hidden_share"]
    return [
        record["link"] or "loopback",
        record["name"],
        _milliseconds(record["median_step_seconds"]),
        _milliseconds(record["best_step_seconds"]),
        record["ddp_over_it"],
        _milliseconds(record["above_backward_seconds"]),
        _milliseconds(record["cpu_seconds"]),
        _megabytes(record),
        _of_dense(record),
        _milliseconds(record["exposed_seconds"]),
        None if hidden is None else f"{100 * hidden:.0f} %",
    ]


def _asked(record: Record) -> str:
    """What was asked for; the reduction of entries is not that of bytes."""
    density = record["density"]
    known = "by measurement" if isinstance(density, str) else f"{density:g}, so that n/k is {1 / density:.4g}"
    return (
        f"density asked for: {known} in entries; {record['ranks']} "
        f"rank{'s' * (record['ranks'] > 1)}, {record['params']:,} parameters; kernels compiled in untimed steps"
    )


def _of_dense(record: Record) -> str | None:
    ring = WORD_BYTES * ring_words(record["params"], record["ranks"])
    sent = record["sent_bytes"]
    return None if sent is None or not ring else f"{100 * sent / ring:.3g} %"


def _limits(record: Record) -> list[object]:
    return [_milliseconds(record["limits_seconds"]), record["above_over_limits"]]


def phases(records: Sequence[Record]) -> str | None:
    """Format where the time of our algorithms went: until the last bucket was submitted, and in the worker's
    stages.
    """
    timed = [record for record in records if record["stage_seconds"] is not None]
    if not timed:
        return None
    stages = list(timed[0]["stage_seconds"])
    head = ("link", "ms of", "step", "backward", *stages, "all stages", "exposed")
    return format_table(head, [_phase_row(record, stages) for record in timed])


def _phase_row(record: Record, stages: Sequence[str]) -> list[object]:
    taken = [record["stage_seconds"][stage] for stage in stages]
    seconds = [record["median_step_seconds"], record["backward_seconds"], *taken, sum(taken)]
    shown = map(_milliseconds, [*seconds, record["exposed_seconds"]])
    return [record["link"] or "loopback", record["name"], *shown]


def _over_link(record: Record) -> str | None:
    counted = record["interface_bytes"]
    return None if counted is None else f"{counted / 1e6:.4g}"


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1e3 * seconds:,.{1 if seconds < 0.1 else 0}f}"


def _megabytes(record: Record) -> str | None:
    sent = record["sent_bytes"]
    return None if sent is None else f"{sent / 1e6:.4g}{_MARKS.get(record['sent_bytes_source'], '')}"
