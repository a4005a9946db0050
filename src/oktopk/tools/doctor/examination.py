"""Gather facts and measurements from all ranks; every rank gets the same World."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from oktopk.comm import Communicator, gather_json
from oktopk.errors import CommError
from oktopk.tools.model_step import ModelStep

from .facts import is_visible, local_facts, probe_output
from .findings import Request, World, collect_fact
from .links import measure_links
from .prediction import predict_steps
from .step_times import time_steps

Data = Callable[[], Any]
"""Loads the data of this rank: {"data": description, "problems": [...], "left_out": count, "parameters": count}.
"""
TimeModel = Callable[[], ModelStep]
"""Times the step of the loaded model on this rank, without communication."""


def examine(
    comm: Communicator, request: Request, data: Data | None = None, time_model: TimeModel | None = None
) -> World:
    """Examine all ranks; collective. A fact that one rank cannot determine becomes an error in the World. If the
    ranks lose contact, the World only has what this rank knows.
    """
    facts = local_facts(data)
    try:
        world = _gather_facts(comm, request, facts)
    except CommError as error:
        return _world_of_one(request, str(error), facts)
    return replace(world, measured={**world.measured, **_measure(comm, world, time_model)})


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


def _measure(comm: Communicator, world: World, time_model: TimeModel | None) -> dict[str, Any]:
    request = world.request
    if comm.world == 1:
        return {}
    links = collect_fact(lambda: measure_links(comm))
    if request.params is None:
        return {"links": links}
    params, lost = request.params, isinstance(links, dict)
    if lost:
        return {"links": links, "ways": {"error": "not measured, because measuring the links failed"}}
    loaded = all("error" not in (facts["data"] or {}) for facts in world.facts)
    step = collect_fact(lambda: _time_model(comm, request, time_model if loaded else None))
    ways = collect_fact(lambda: time_steps(comm, params, request.density))
    found = {"links": links, "step": step, "ways": ways}
    if all("error" not in (part or {}) for part in (step, ways)):
        known = ModelStep(**step) if step else None
        found["prediction"] = predict_steps(request, known, ways["ways"], links)
    return found


def _time_model(comm: Communicator, request: Request, time_model: TimeModel | None) -> dict[str, Any] | None:
    """The step without communication: as given, or timed on all ranks at once, as slow as on the slowest."""
    if request.compute_seconds is not None:
        return asdict(ModelStep.given(request.compute_seconds))
    if time_model is None:
        return None
    comm.all_gather_ints([0], "doctor")  # all ranks start together
    steps: list[dict[str, Any]] = gather_json(comm, collect_fact(lambda: asdict(time_model())), "doctor model")
    failed = next((step for step in steps if "error" in step), None)
    return failed or max(steps, key=lambda step: ModelStep(**step).seconds)
