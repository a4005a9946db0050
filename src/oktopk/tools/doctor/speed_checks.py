"""Checks of the measurements: link speed, and whether compression is faster than dense."""

from __future__ import annotations

import statistics
from typing import Any

from oktopk.tools.crossover import AT_NO_RATE, format_rate

from .findings import OK, WARNING, Finding, World, format_ranks
from .step_times import DENSE

UNSTEADY = 2.0
"""If the median step takes this many times longer than the best, the machine is busy."""
MIN_SPEEDUP = 1.1
"""Smallest speedup to report: less is within measurement noise."""
SLOW = 4.0
"""Warn about a link that is this many times slower than others of its kind."""


def link_speed(world: World) -> Finding:
    """Check the links from rank 0 to ranks on its host, and to those on other hosts."""
    if world.disconnected:
        return world.disconnected
    if world.size == 1:
        return Finding(OK, "only one rank: no links", "--ranks 2 starts two ranks on this machine")
    hosts = [own["host"] for own in world.of("threads")]
    near: list[dict[str, Any]] = []
    far: list[dict[str, Any]] = []
    for link in world.result("links"):
        (near if hosts[link["peer"]] == hosts[0] else far).append(link)
    lines = [_range(links, where) for links, where in ((near, "this host"), (far, "other hosts")) if links]
    slow = [link["peer"] for links in (near, far) for link in _slow(links)]
    found = "\n".join(lines)
    if slow:
        return Finding(
            WARNING, f"{found}\nmuch slower than the others: to {format_ranks(slow)}", "check these links"
        )
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


def compression_speedup(world: World) -> Finding:
    request = world.request
    if world.disconnected:
        return world.disconnected
    if request.params is None:
        return Finding(OK, "not measured", "pass --params 25M or --dnn NAME to measure it")
    if world.size == 1:
        advice = f"torchrun --nproc-per-node 2 -m oktopk doctor --params {request.params}, or add --ranks 2"
        return Finding(OK, "only one rank: nothing to send", advice)
    result, step = world.result("ways"), world.result("step")
    predicted = world.result("prediction")
    dense, *sparse = _whole_steps(result["ways"], predicted)
    best = min(sparse, key=lambda way: way["whole"])
    gain = dense["whole"] / best["whole"]
    pays = gain >= MIN_SPEEDUP
    lines = [
        *_describe_step(step, predicted, dense, best, pays),
        *_describe_scaling(request.params, result["entries"]),
        *(_line(way) for way in (dense, *sparse)),
        *_describe_noise(result["ways"]),
    ]
    what = "a step" if step else "the exchange of a step"
    head = f"{'pays' if pays else 'does not pay'}: {what} takes about {_ms(dense['whole'])} dense"
    head += f", {_ms(best['whole'])} with {_name(best)} at density {request.density:.3g}: {_times(gain)}"
    if pays:
        return Finding(OK, "\n".join([head, *lines]), _settings(world, best))
    advice = "keep auto on (auto=True, --auto): it then uses dense"
    return Finding(WARNING, "\n".join([head, *lines]), advice)


def _whole_steps(ways: list[dict[str, Any]], predicted: dict[str, Any]) -> list[dict[str, Any]]:
    """Each way with its prediction, and the time of a whole step."""
    compute = predicted["step_seconds"] or 0.0
    return [
        {**way, **more, "measured_rate": predicted["measured_rate"], "whole": compute + more["adds_seconds"]}
        for way, more in zip(ways, predicted["ways"], strict=True)
    ]


def _describe_step(
    step: dict[str, Any] | None,
    predicted: dict[str, Any],
    dense: dict[str, Any],
    best: dict[str, Any],
    pays: bool,
) -> list[str]:
    rate, name = format_rate(predicted["rate"]), _name(best)
    link = f"at this link ({rate})" if predicted["rate"] == predicted["measured_rate"] else f"at {rate}"
    verdict = "pays" if pays else "does not pay"
    adds = (
        f"dense adds {_ms(dense['adds_seconds'])} {link}, {name} adds {_ms(best['adds_seconds'])}: {verdict}; "
        f"crossover rate {_crossover(best)}"
    )
    if step is None:
        return [adds, "without backward, which hides a part: pass --dnn NAME or --compute-seconds S to include it"]
    parts = ", ".join(f"{part} {_ms(step[part])}" for part in ("forward", "backward", "update"))
    measured = f" ({step['what']})" if not step["update"] else f" ({step['what']}: {parts})"
    return [f"step without communication {_ms(predicted['step_seconds'])}{measured}", adds]


def _crossover(way: dict[str, Any]) -> str:
    """B*, the rate below which it is faster than dense; not beyond what was measured."""
    if way["faster"] == AT_NO_RATE:
        return "B*: none, dense is faster at any rate"
    known = way["crossover"] is not None and way["crossover"] <= way["measured_rate"]
    return f"B* = {format_rate(way['crossover'])}" if known else f"B* > {format_rate(way['measured_rate'])}"


def _times(gain: float) -> str:
    return f"{gain:.3g} times faster" if gain >= 1 else f"{1 / gain:.3g} times slower"


def _describe_scaling(params: int, entries: int) -> list[str]:
    if entries == params:
        return []
    return [f"measured on {entries:,} of {params:,} entries, and scaled"]


def _describe_noise(ways: list[dict[str, Any]]) -> list[str]:
    spread = max(way["spread"] for way in ways)
    busy = f"steps took up to {spread:.1f} times longer than these: repeat this on an idle machine"
    return [busy] if spread > UNSTEADY else []


def _line(way: dict[str, Any]) -> str:
    ring, wins = "", ""
    if way["algorithm"] == DENSE:
        ring = " (ring)"  # modelled: the library's all-reduce does not report its bytes
    else:
        wins = f", {_crossover(way)}"
    sent = f"{way['sent_bytes'] / 1e6:.3g} MB sent by a rank{ring}{wins}"
    return f"  {_name(way):<12}  exchange {_ms(way['seconds']):>9}  adds {_ms(way['adds_seconds']):>9}  {sent}"


def _name(way: dict[str, Any]) -> str:
    return DENSE if way["algorithm"] == DENSE else f"{way['algorithm']} {way['values']}"


def _ms(seconds: float) -> str:
    taken = 1e3 * seconds
    return f"{taken:.0f} ms" if taken >= 100 else f"{taken:.3g} ms"


def _settings(world: World, best: dict[str, Any]) -> str:
    """The recommended settings of a program and its environment."""
    facts = world.of("threads")
    local = sum(own["host"] == facts[0]["host"] for own in facts)
    algorithm = "" if best["algorithm"] == "oktopk" else f'algorithm="{best["algorithm"]}", '
    threads = max(1, len(facts[0]["cores"]) // local)
    values = f'values="{best["values"]}"'
    return f"settings: {algorithm}density={world.request.density}, {values}, OMP_NUM_THREADS={threads}"
