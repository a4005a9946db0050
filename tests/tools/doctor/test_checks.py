"""The checks of oktopk doctor, on worlds that are made up: no processes, no clock."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oktopk.kernels import backend
from oktopk.tools.doctor import (
    CHECKS,
    OK,
    PROBLEM,
    WARNING,
    Finding,
    Request,
    World,
    exit_code,
    format_findings,
    run_checks,
)
from oktopk.tools.doctor.kernels import find_differences
from oktopk.tools.doctor.prediction import predict_steps
from oktopk.tools.model_step import ModelStep
from oktopk.utils.extras import install_command

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "oktopk": "0.1.0", "numpy": "2.4.6", "numba": "0.68.1"}
MPICH = {"mpi4py": "4.1.2", "library": "MPICH 5.0.2", "built_for": "MPICH 5.0.2", "abi": "18:2:6", "size": None}


def facts(**changes: Any) -> dict[str, Any]:
    """Of a healthy rank, alone on its host."""
    healthy = {
        "versions": VERSIONS,
        "extras": {"mpi": [], "train": [], "report": []},
        "backends": {"gloo": True, "nccl": False, "mpi": False, "gpus": 0},
        "mpi": MPICH,
        "threads": {"host": "a", "cores": list(range(8)), "threads": 1},
        "kernels": {"compiled": True, "differ": []},
        "data": None,
        "out": {"folder": "runs", "file": "x", "free_bytes": 1 << 36},
    }
    return healthy | changes


def link(peer: int, rate: float = 1e9) -> dict[str, Any]:
    return {"peer": peer, "latency_seconds": 1e-4, "bytes_per_second": rate, "bytes": 1 << 24}


def world(size: int, changed: dict[int, dict[str, Any]] | None = None, **rest: Any) -> World:
    """Healthy, but for the facts that are changed on some ranks."""
    told = tuple(facts(**(changed or {}).get(rank, {})) for rank in range(size))
    asked = {"launcher": "torchrun", "started": size, **rest.pop("asked", {})}
    measured = {"sees_out": [True] * size, "links": [link(peer) for peer in range(1, size)]}
    return World(told, Request(**asked), measured | rest.pop("measured", {}), **rest)


def found(name: str, of: World) -> Finding:
    (finding,) = (finding for finding in run_checks(of, CHECKS) if finding.check == name)
    return finding


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_healthy_world_has_no_problem_and_no_warning(size: int) -> None:
    findings = run_checks(world(size), CHECKS)
    assert [finding.check for finding in findings] == list(CHECKS)
    assert {finding.level for finding in findings} == {OK}
    assert exit_code(findings) == 0


@pytest.mark.parametrize("name", ["torch", "python", "oktopk"])
def test_a_rank_with_another_version_is_a_problem_that_names_ranks(name: str) -> None:
    odd = world(4, {2: {"versions": {**VERSIONS, name: "9.9"}}})
    finding = found("same versions", odd)
    assert finding.level == PROBLEM
    assert f"{name}: {VERSIONS[name]} on ranks 0, 1, 3; 9.9 on rank 2" in finding.found
    assert exit_code(run_checks(odd, CHECKS)) == 1


def test_another_numpy_is_a_warning_and_does_not_hide_another_torch() -> None:
    other = {**VERSIONS, "numpy": "1.26"}
    assert found("same versions", world(3, {1: {"versions": other}})).level == WARNING
    both = found("same versions", world(3, {1: {"versions": {**other, "torch": "2.9"}}}))
    assert both.level == PROBLEM
    assert "numpy" in both.found
    assert "torch" in both.found


@pytest.mark.parametrize(("size", "nworkers"), [(1, 2), (2, 3), (3, 1)])
def test_a_wrong_nworkers_is_a_problem(size: int, nworkers: int) -> None:
    finding = found("world", world(size, asked={"nworkers": nworkers}))
    assert finding.level == PROBLEM
    assert f"--nworkers is {nworkers}" in finding.found
    assert found("world", world(size, asked={"nworkers": size})).level == OK


def test_a_check_that_raises_is_a_problem_and_the_others_have_their_turn() -> None:
    def broken(_: World) -> Finding:
        raise ZeroDivisionError("oops")

    findings = run_checks(world(2), {"first": broken, **CHECKS})
    assert findings[0].level == PROBLEM
    assert "ZeroDivisionError: oops" in findings[0].found
    assert {finding.level for finding in findings[1:]} == {OK}


@pytest.mark.parametrize("topic", ["versions", "backends", "kernels", "data", "out", "threads"])
def test_what_a_rank_cannot_find_out_is_a_problem_of_that_rank(topic: str) -> None:
    findings = run_checks(world(3, {1: {topic: {"error": "it is gone"}}}), CHECKS)
    assert exit_code(findings) == 1
    assert any(finding.found == "rank 1: it is gone" for finding in findings)
    assert sum(finding.level == OK for finding in findings) >= len(CHECKS) - 3


def test_the_mpirun_of_another_mpi_is_a_problem() -> None:
    """Every process is then rank 0 of 1."""
    lonely = world(1, {0: {"mpi": {**MPICH, "size": 1}}}, asked={"launcher": "MPI", "started": 4})
    assert "mpirun started 4 processes, but each sees a world of 1" in found("MPI", lonely).found
    assert found("world", lonely).level == PROBLEM
    together = {rank: {"mpi": {**MPICH, "size": 3}} for rank in range(3)}
    assert found("MPI", world(3, together, asked={"launcher": "MPI"})).level == OK


def test_an_mpi4py_built_for_another_library_is_a_problem() -> None:
    other = {**MPICH, "library": "Open MPI v5.0.6"}
    assert "built for MPICH 5.0.2" in found("MPI", world(1, {0: {"mpi": other}})).found
    same = {**other, "built_for": "Open MPI 5.0.6"}
    assert found("MPI", world(1, {0: {"mpi": same}})).level == OK
    assert found("MPI", world(1, {0: {"mpi": None}})).level == OK


def threads(host: str, count: int, cores: int = 4) -> dict[str, Any]:
    return {"threads": {"host": host, "cores": list(range(cores)), "threads": count}}


def test_more_threads_than_cores_is_a_warning_with_the_value_to_set() -> None:
    crowded = found("threads", world(3, {rank: threads("a", 2) for rank in range(3)}))
    assert crowded.level == WARNING
    assert crowded.advice == "set OMP_NUM_THREADS=1"
    wider = found("threads", world(2, {rank: threads("a", 4) for rank in range(2)}))
    assert wider.advice == "set OMP_NUM_THREADS=2"
    assert found("threads", world(3, {rank: threads(str(rank), 4) for rank in range(3)})).level == OK
    assert "fewer ranks" in str(found("threads", world(5, {r: threads("a", 1) for r in range(5)})).advice)


def test_ranks_that_are_bound_to_different_cores_share_none() -> None:
    own = {rank: {"threads": {"host": "a", "cores": [2 * rank, 2 * rank + 1], "threads": 2}} for rank in range(3)}
    assert found("threads", world(3, own)).level == OK


def test_a_slow_link_is_a_warning_but_only_among_its_kind() -> None:
    slow = {"links": [link(1), link(2, 1e8), link(3)]}
    finding = found("links", world(4, measured=slow))
    assert finding.level == WARNING
    assert "slower than the others: to rank 2" in finding.found
    far = {2: threads("b", 1, cores=8)}
    assert found("links", world(4, far, measured=slow)).level == OK


def time_steps(dense: float, fastest: float, entries: int = 1000, spread: float = 1.1) -> dict[str, Any]:
    seconds = {("dense", "fp32"): dense, ("oktopk", "fp32"): 2 * fastest, ("oktopk", "fp16"): fastest}
    return {
        "entries": entries,
        "ways": [
            {"algorithm": algorithm, "values": values, "seconds": taken, "sent_bytes": 8e6, "spread": spread}
            for (algorithm, values), taken in seconds.items()
        ],
    }


def timed(size: int, ways: dict[str, Any], step: ModelStep | None = None, **asked: Any) -> World:
    """A world that has measured these ways, and predicted whole steps."""
    before = world(size, asked={"params": 1000, **asked})
    predicted = predict_steps(before.request, step, ways["ways"], before.measured["links"])
    found = {"ways": ways, "step": step and asdict(step), "prediction": predicted}
    return world(size, asked={"params": 1000, **asked}, measured=found)


def test_compression_that_pays_comes_with_settings() -> None:
    finding = found("compression", timed(3, time_steps(0.5, 0.1), density=0.02))
    assert finding.level == OK
    head, adds, without, *lines = finding.found.splitlines()
    assert head == (
        "pays: the exchange of a step takes about 500 ms dense, 100 ms with oktopk fp16 at density 0.02: "
        "5 times faster"
    )
    assert adds == (
        "dense adds 500 ms at this link (8 Gbit/s), oktopk fp16 adds 100 ms: pays; crossover rate B* > 8 Gbit/s"
    )
    assert "--compute-seconds" in without
    assert "scaled" not in finding.found
    assert [line.endswith("8 MB sent by a rank (ring)") for line in lines] == [True, False, False]
    # three ranks share eight cores
    assert finding.advice == 'settings: density=0.02, values="fp16", OMP_NUM_THREADS=2'


def test_a_busy_machine_is_told_of() -> None:
    steady, busy = (found("compression", timed(3, time_steps(0.5, 0.1, spread=spread))) for spread in (1.1, 3.0))
    assert "idle" not in steady.found
    assert "up to 3.0 times longer" in busy.found


def test_compression_that_does_not_pay_says_to_leave_auto_on() -> None:
    finding = found("compression", timed(2, time_steps(0.5, 0.49), params=4000))
    assert finding.level == WARNING
    assert finding.found.startswith("does not pay")
    assert "measured on 1,000 of 4,000 entries, and scaled" in finding.found
    assert "auto" in str(finding.advice)


def test_the_step_of_the_model_counts_and_its_backward_hides() -> None:
    """Five times faster in the exchange is next to nothing in a long step, and not all of it at a slow link."""
    ways = time_steps(0.5, 0.1)
    for way in ways["ways"][1:]:
        way["sent_bytes"] = 8e4
    long = ModelStep("gpt, AdamW, batch 16", 30.0, 60.0, 10.0)
    finding = found("compression", timed(2, ways, long))
    assert finding.level == WARNING
    assert finding.found.startswith("does not pay: a step takes about 100500 ms dense")
    assert "step without communication 100000 ms (gpt, AdamW, batch 16: forward 30000 ms" in finding.found
    slow = found("compression", timed(2, ways, ModelStep.given(1.0), link=1e6))
    assert slow.level == OK
    # 64 s on the link at 1 Mbit/s; one bucket waits for the end of backward, so that nothing of it is hidden
    assert "dense adds 64492 ms at 1 Mbit/s, oktopk fp16 adds 740 ms: pays" in slow.found


def test_a_crossover_below_the_measured_link_is_named() -> None:
    """Sparse costs 0.1 s more to compute, and sends 7.92 MB less: B* is where these take 0.1 s."""
    ways = time_steps(0.008, 0.10808)
    ways["ways"][2]["sent_bytes"] = 8e4
    finding = found("compression", timed(2, ways))
    assert finding.level == WARNING
    assert f"B* = {8 * 7.92 / 0.108:.3g} Mbit/s" in finding.found


def test_one_rank_hears_how_to_start_more() -> None:
    finding = found("compression", world(1, asked={"params": 1000}))
    assert finding.level == OK
    assert "torchrun --nproc-per-node 2 -m oktopk doctor --params 1000" in str(finding.advice)


def test_ranks_that_did_not_come_are_one_problem() -> None:
    apart = world(1, asked={"started": 4, "params": 1000}, broken="rank 3 does not answer")
    findings = {finding.check: finding for finding in run_checks(apart, CHECKS)}
    assert [name for name, finding in findings.items() if finding.level == PROBLEM] == ["world"]
    assert "4 ranks (torchrun), but rank 3 does not answer" in findings["world"].found
    assert {findings[name].level for name in ("same versions", "links", "compression")} == {WARNING}


def test_an_output_that_others_do_not_see_or_that_is_full_is_a_warning() -> None:
    blind = found("output", world(3, measured={"sees_out": [True, False, False]}))
    assert blind.level == WARNING
    assert "ranks 1, 2 cannot see" in blind.found
    # weights, momentum and three residuals of 2 · 10^9 parameters, three times
    big = found("output", world(3, asked={"params": 2 * 10**9}, measured={"ways": time_steps(1, 1)}))
    assert big.level == WARNING
    assert f"{3 * 40e9 / 2**30:.1f}" in big.found


def test_data_that_is_left_out_is_a_warning_and_different_data_a_problem() -> None:
    some = {"data": "10 utterances", "left_out": 1, "problems": ["m.csv:3: a.wav: No such file"], "parameters": 5}
    finding = found("data", world(2, {rank: {"data": some} for rank in range(2)}))
    assert finding.level == WARNING
    assert "m.csv:3: a.wav" in finding.found
    assert "fix-manifest" in str(finding.advice)
    other = {**some, "data": "9 utterances"}
    assert found("data", world(2, {0: {"data": some}, 1: {"data": other}})).level == PROBLEM


def test_missing_packages_are_named_with_the_extra_that_has_them() -> None:
    finding = found("extras", world(1, {0: {"extras": {"mpi": ["mpi4py"], "train": [], "report": ["plotly"]}}}))
    assert finding.level == OK
    assert "mpirun: missing mpi4py" in finding.found
    assert install_command("mpi", "report") in str(finding.advice)


def test_a_kernel_that_is_wrong_is_named() -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    good = backend(x)
    assert find_differences(good, x) == []
    names = {"accumulate_select", "kth_magnitude", "magnitude_histogram", "scatter_add_", "union_sum", "common"}
    kept = {name: getattr(good, name) for name in names | {"assign_"}}
    wrong: Any = SimpleNamespace(**kept, select=lambda x, t, capacity: good.select(x, 1.01 * t, capacity))
    assert "select" in find_differences(wrong, x)
    named = found("kernels", world(2, {1: {"kernels": {"compiled": True, "differ": ["select"]}}}))
    assert named.level == PROBLEM
    assert "rank 1: select" in named.found


def test_without_numba_it_is_slower_not_wrong() -> None:
    assert found("kernels", world(2, {1: {"kernels": {"compiled": False, "differ": []}}})).level == WARNING


def test_what_to_do_stands_below_what_was_found() -> None:
    lines = format_findings(
        [Finding(OK, "a\nb", None, "one"), Finding(PROBLEM, "c", "do d", "three")]
    ).splitlines()
    assert lines == [
        "     ok  one    a",
        "                b",
        "problem  three  c",
        "                -> do d",
    ]
