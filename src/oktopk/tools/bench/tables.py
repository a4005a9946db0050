"""The records as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from oktopk.tools.tables import table

from .figures import INTERFACE, MODELLED, Record

_HEAD = (
    *("link", "contender", "step ms", "best ms", "ddp / it", "above backward ms", "CPU ms"),
    *("MB sent", "exposed ms", "hidden"),
)
_MARKS = {MODELLED: " (ring)", INTERFACE: " (link)"}
_MEANINGS = {
    MODELLED: "(ring): bytes of the ring algorithm; the inside of a library's collective cannot be seen",
    INTERFACE: "(link): bytes that the host's interface has counted, with headers and acknowledgements",
}


def text(records: Sequence[Record]) -> str:
    """A row per contender and link, and below it what is not plain."""
    shown = [table(_HEAD, [_row(record) for record in records])]
    sources = {record["sent_bytes_source"] for record in records}
    shown += [meaning for source, meaning in _MEANINGS.items() if source in sources]
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
        _milliseconds(record["exposed_seconds"]),
        None if hidden is None else f"{100 * hidden:.0f} %",
    ]


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1e3 * seconds:,.{1 if seconds < 0.1 else 0}f}"


def _megabytes(record: Record) -> str | None:
    sent = record["sent_bytes"]
    return None if sent is None else f"{sent / 1e6:.4g}{_MARKS.get(record['sent_bytes_source'], '')}"
