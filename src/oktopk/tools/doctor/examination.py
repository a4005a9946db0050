"""Gather facts and measurements from all ranks; every rank gets the same World."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oktopk.comm import Communicator, gather_json
from oktopk.errors import CommError

from .facts import is_visible, local_facts, probe_output
from .findings import Request, World, collect_fact
from .links import measure_links
from .step_times import time_steps

Data = Callable[[], Any]
"""Loads the data of this rank: {"data": description, "problems": [...], "left_out": count, "parameters": count}.
"""


def examine(comm: Communicator, request: Request, data: Data | None = None) -> World:
    """Examine all ranks; collective. A fact that one rank cannot determine becomes an error in the World. If the
    ranks lose contact, the World only has what this rank knows.
    """
    facts = local_facts(data)
    try:
        world = _gather_facts(comm, request, facts)
    except CommError as error:
        return _world_of_one(request, str(error), facts)
    return replace(world, measured={**world.measured, **_measure(comm, world.request)})


def examine_alone(request: Request, broken: str, data: Data | None = None) -> World:
    """Examine this rank only, because it cannot reach the others."""
    return _world_of_one(request, broken, local_facts(data))


def _world_of_one(request: Request, broken: str, facts: dict[str, Any]) -> World:
    with probe_output(request.out) as out:
        return World(({**facts, "out": out},), _with_params(request, facts), broken=broken)


def _gather_facts(comm: Communicator, request: Request, facts: dict[str, Any]) -> World:
    with probe_output(request.out) as out:
        facts_of_all = gather_json(comm, {**facts, "out": out}, "doctor facts")
        name = facts_of_all[0]["out"].get("file")
        seen = gather_json(comm, name is None or is_visible(request.out, name), "doctor output")
    return World(tuple(facts_of_all), _with_params(request, facts_of_all[0]), {"sees_out": seen})


def _with_params(request: Request, facts: dict[str, Any]) -> Request:
    """Take the number of parameters from the network, unless the user gave one."""
    if request.params is not None:
        return request
    return replace(request, params=(facts["data"] or {}).get("parameters"))


def _measure(comm: Communicator, request: Request) -> dict[str, Any]:
    if comm.world == 1:
        return {}
    found = {"links": collect_fact(lambda: measure_links(comm))}
    if request.params is not None:
        params, lost = request.params, isinstance(found["links"], dict)
        failed = {"error": "not measured, because measuring the links failed"}
        found["ways"] = failed if lost else collect_fact(lambda: time_steps(comm, params, request.density))
    return found
