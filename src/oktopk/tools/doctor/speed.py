"""The checks of what was measured: links, and whether compression pays."""

from __future__ import annotations

import statistics
from typing import Any

from .findings import OK, WARNING, Finding, World, ranks
from .pays import DENSE

UNSTEADY = 2.0
"""A usual step that takes so many times longer than the best one tells of other work on the machine."""
PAYS = 1.1
"""Times faster that a sparse step must be: less is within what two measurements differ by."""
SLOW = 4.0
"""A link that is so many times slower than others of its kind is a warning."""


def link_speed(world: World) -> Finding:
    """Links within the host of rank 0, and those to other hosts."""
    if world.apart:
        return world.apart
    if world.size == 1:
        return Finding(OK, "there is one rank: nothing to talk to", "--ranks 2 starts two ranks of this machine")
    hosts = [own["host"] for own in world.of("threads")]
    near: list[dict[str, Any]] = []
    far: list[dict[str, Any]] = []
    for link in world.result("links"):
        (near if hosts[link["peer"]] == hosts[0] else far).append(link)
    lines = [_range(links, where) for links, where in ((near, "this host"), (far, "other hosts")) if links]
    slow = [link["peer"] for links in (near, far) for link in _slow(links)]
    found = "\n".join(lines)
    if slow:
        return Finding(WARNING, f"{found}\nmuch slower than the others: to {ranks(slow)}", "look at these links")
    return Finding(OK, found)


def _range(links: list[dict[str, Any]], where: str) -> str:
    latency = [1e3 * link["latency_seconds"] for link in links]
    rate = [8e-9 * link["bytes_per_second"] for link in links]
    return (
        f"rank 0 with {len(links)} of {where}: {_span(latency)} ms, {_span(rate)} Gbit/s "
        f"(messages of {max(link['bytes'] for link in links) / 2**20:.3g} MiB)"
    )


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def _slow(links: list[dict[str, Any]]) -> list[dict[str, Any]]:
    usual = statistics.median(link["bytes_per_second"] for link in links) if links else 0.0
    return [link for link in links if SLOW * link["bytes_per_second"] < usual]


def whether_it_pays(world: World) -> Finding:
    asked = world.asked
    if world.apart:
        return world.apart
    if asked.params is None:
        return Finding(OK, "not measured", "--params 25M or --dnn NAME measures whether it pays here")
    if world.size == 1:
        again = f"torchrun --nproc-per-node 2 -m oktopk doctor --params {asked.params}, or add --ranks 2"
        return Finding(OK, "one rank has nothing to send, so there is nothing to compress", again)
    result = world.result("ways")
    dense, *sparse = result["ways"]
    best = min(sparse, key=lambda way: way["seconds"])
    lines = [
        *_scaled(asked.params, result["entries"]),
        *(_line(way, dense) for way in result["ways"]),
        *_unsteady(result["ways"]),
    ]
    gain = dense["seconds"] / best["seconds"]
    if gain >= PAYS:
        head = f"pays: a dense step takes about {_ms(dense)}, {_name(best)} at {asked.density:.3g} {_ms(best)}"
        return Finding(OK, "\n".join([f"{head}, {gain:.1f} times faster", *lines]), _settings(world, best))
    head = f"does not pay here: a dense step takes about {_ms(dense)}, {_name(best)} {_ms(best)}"
    return Finding(WARNING, "\n".join([head, *lines]), "leave auto on (auto=True, --auto): it goes dense then")


def _scaled(params: int, entries: int) -> list[str]:
    if entries == params:
        return []
    return [f"measured on {entries:,} of {params:,} entries, and what grows with them is scaled"]


def _unsteady(ways: list[dict[str, Any]]) -> list[str]:
    spread = max(way["spread"] for way in ways)
    busy = f"steps took up to {spread:.1f} times longer than these: believe it when the machine is quiet"
    return [busy] if spread > UNSTEADY else []


def _line(way: dict[str, Any], dense: dict[str, Any]) -> str:
    ring = " (ring)" if way["algorithm"] == DENSE else ""  # a library's sum cannot be looked into
    sent = f"{way['sent_bytes'] / 1e6:.3g} MB sent by a rank{ring}"
    return f"  {_name(way):<12}  {_ms(way):>9}  {dense['seconds'] / way['seconds']:5.2f} x  {sent}"


def _name(way: dict[str, Any]) -> str:
    return DENSE if way["algorithm"] == DENSE else f"{way['algorithm']} {way['values']}"


def _ms(way: dict[str, Any]) -> str:
    taken = 1e3 * way["seconds"]
    return f"{taken:.0f} ms" if taken >= 100 else f"{taken:.3g} ms"


def _settings(world: World, best: dict[str, Any]) -> str:
    """What to write, for a program and for its environment."""
    told = world.of("threads")
    here = sum(own["host"] == told[0]["host"] for own in told)
    algorithm = "" if best["algorithm"] == "oktopk" else f'algorithm="{best["algorithm"]}", '
    threads = max(1, len(told[0]["cores"]) // here)
    return (
        f'settings: {algorithm}density={world.asked.density}, values="{best["values"]}", OMP_NUM_THREADS={threads}'
    )
