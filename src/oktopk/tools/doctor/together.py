"""All ranks together: tell facts, measure, and look at the outcome. Every rank comes to the same findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oktopk.comm import Communicator, gather_json
from oktopk.errors import CommError

from .facts import footprint, local_facts, sees
from .findings import Asked, World, looked_into
from .links import links
from .pays import ways

Data = Callable[[], Any]
"""Looks at the data of this rank: {"data": words, "problems": [...], "left_out": count, "parameters": count}."""


def examine(comm: Communicator, asked: Asked, data: Data | None = None) -> World:
    """Collective. What one rank cannot find out is told as its error; when ranks cannot reach each other any more,
    the world is what this rank knows by then."""
    facts = local_facts(data)
    try:
        world = _told(comm, asked, facts)
    except CommError as error:
        return _alone(asked, str(error), facts)
    return replace(world, measured={**world.measured, **_measured(comm, world.asked)})


def examine_alone(asked: Asked, broken: str, data: Data | None = None) -> World:
    """Of a rank that does not reach the others."""
    return _alone(asked, broken, local_facts(data))


def _alone(asked: Asked, broken: str, facts: dict[str, Any]) -> World:
    with footprint(asked.out) as out:
        return World(({**facts, "out": out},), _with_size(asked, facts), broken=broken)


def _told(comm: Communicator, asked: Asked, facts: dict[str, Any]) -> World:
    with footprint(asked.out) as out:
        told = gather_json(comm, {**facts, "out": out}, "doctor facts")
        name = told[0]["out"].get("file")
        seen = gather_json(comm, name is None or sees(asked.out, name), "doctor output")
    return World(tuple(told), _with_size(asked, told[0]), {"sees_out": seen})


def _with_size(asked: Asked, facts: dict[str, Any]) -> Asked:
    """With the number of parameters of the network, where there is one and nobody has given a number."""
    if asked.params is not None:
        return asked
    return replace(asked, params=(facts["data"] or {}).get("parameters"))


def _measured(comm: Communicator, asked: Asked) -> dict[str, Any]:
    if comm.world == 1:
        return {}
    found = {"links": looked_into(lambda: links(comm))}
    if asked.params is not None:
        params, lost = asked.params, isinstance(found["links"], dict)
        failed = {"error": "not measured, because the links could not be"}
        found["ways"] = failed if lost else looked_into(lambda: ways(comm, params, asked.density))
    return found
