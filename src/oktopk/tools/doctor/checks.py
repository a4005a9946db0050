"""The checks. To add one, write a function from World to Finding and add it to CHECKS."""

from __future__ import annotations

from collections import defaultdict

from oktopk.utils.extras import install_command

from .findings import OK, PROBLEM, WARNING, Check, Finding, World, format_ranks
from .speed_checks import compression_speedup, link_speed

USES = {"mpi": "mpirun", "train": "oktopk train", "report": "plots and reports"}
MUST_AGREE = ("python", "torch", "oktopk")
CHECKPOINT_BYTES = 4 * 3
"""Bytes per parameter: weights, momentum, and the residual of a rank."""
LITTLE_SPACE = 1 << 30
OPEN_MPI = "Open MPI"
"""Open MPI has its own ABI; MPICH, Intel MPI, Cray MPICH and MVAPICH share one."""


def versions(world: World) -> Finding:
    own = world.of("versions")[0]
    return Finding(OK, ", ".join(f"{name} {version or 'missing'}" for name, version in own.items()))


def same_versions(world: World) -> Finding:
    """Ranks with different versions may compute different bits or use another protocol."""
    if world.disconnected:
        return world.disconnected
    facts, level, differences = world.of("versions"), OK, []
    for name in facts[0]:
        found: dict[str, list[int]] = defaultdict(list)
        for rank, own in enumerate(facts):
            found[str(own.get(name))].append(rank)
        if len(found) > 1:
            level = PROBLEM if name in MUST_AGREE or level == PROBLEM else WARNING
            differences.append(f"{name}: " + "; ".join(f"{v} on {format_ranks(who)}" for v, who in found.items()))
    if differences:
        return Finding(level, "\n".join(differences), "install the same versions on all hosts")
    return Finding(OK, f"the same on all {world.size} ranks" if world.size > 1 else "only one rank")


def extras(world: World) -> Finding:
    """A missing optional package is not a problem; the advice says how to install it."""
    missing = {extra: packages for extra, packages in world.of("extras")[0].items() if packages}
    if not missing:
        return Finding(OK, f"all packages for {', '.join(USES.values())} are installed")
    lines = [f"{USES[extra]}: missing {', '.join(packages)}" for extra, packages in missing.items()]
    return Finding(OK, "\n".join(lines), f"if you need it: {install_command(*missing)}")


def backends(world: World) -> Finding:
    facts = world.of("backends")
    without = [rank for rank, own in enumerate(facts) if not own["gloo"]]
    if without:
        return Finding(
            PROBLEM,
            f"no gloo on {format_ranks(without)}",
            "install a build of torch with gloo, which the ranks need to connect",
        )
    own = facts[0]
    available = [name for name in ("gloo", "nccl", "mpi") if own[name]]
    without_nccl = [rank for rank, own in enumerate(facts) if own["gpus"] and not own["nccl"]]
    if without_nccl:
        found = f"GPUs but no nccl on {format_ranks(without_nccl)}"
        return Finding(WARNING, found, "dense all-reduces of GPU tensors go through the CPU")
    return Finding(OK, f"torch has {', '.join(available)}; {own['gpus'] or 'no'} GPUs")


def mpi(world: World) -> Finding:
    """If mpirun starts several processes but MPI sees only one, mpirun belongs to another MPI library."""
    facts = world.of("mpi")
    own = facts[0]
    if own is None:
        return Finding(OK, "mpi4py is not installed", f"needed for mpirun only: {install_command('mpi')}")
    abi = f", ABI {own['abi']}" if own["abi"] else ""
    library = f"mpi4py {own['mpi4py']} with {own['library']}{abi}"
    if (OPEN_MPI in own["built_for"]) != (OPEN_MPI in own["library"]):
        advice = f"install mpi4py for the installed library, or both: {install_command('mpi')}"
        return Finding(PROBLEM, f"{library}, but built for {own['built_for']}", advice)
    if own["size"] is not None and own["size"] != world.request.started:
        found = f"mpirun started {world.request.started} processes, but each sees a world of {own['size']}"
        advice = "use the mpirun of that library; pip's mpich installs its own beside python"
        return Finding(PROBLEM, f"{found}: mpirun does not belong to {own['library']}", advice)
    if len({str(theirs) for theirs in facts}) > 1:
        return Finding(PROBLEM, "ranks have different MPI libraries", "--json shows the library of each rank")
    return Finding(OK, library)


def world_size(world: World) -> Finding:
    request = world.request
    if world.broken is not None:
        advice = "start all ranks, check that they can reach each other (host, port, firewall), or raise --timeout"
        return Finding(PROBLEM, f"{request.started} ranks ({request.launcher}), but {world.broken}", advice)
    if request.nworkers is not None and request.nworkers != world.size:
        advice = (
            f"start {request.nworkers} with torchrun, mpirun or --ranks {request.nworkers}; or remove --nworkers"
        )
        return Finding(PROBLEM, f"--nworkers is {request.nworkers}, but there {_are(world.size)}", advice)
    if request.started != world.size:
        found = f"{request.started} processes were started, but there {_are(world.size)}"
        return Finding(PROBLEM, found, "see the finding about MPI")
    return Finding(OK, f"{_number(world.size, 'rank')} ({request.launcher})")


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {_number(count, 'rank')}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def threads(world: World) -> Finding:
    """The ranks of a host share its cores."""
    hosts: dict[str, list[int]] = defaultdict(list)
    facts = world.of("threads")
    for rank, own in enumerate(facts):
        hosts[own["host"]].append(rank)
    lines, advice = [], None
    for host, here in hosts.items():
        cores = len({core for rank in here for core in facts[rank]["cores"]})
        used = sum(facts[rank]["threads"] for rank in here)
        if used > cores:
            lines.append(f"{_number(len(here), 'rank')} with {used} threads on {cores} cores of {host}")
            wanted = max(1, cores // len(here))
            advice = f"set OMP_NUM_THREADS={wanted}" if used > len(here) else "use fewer ranks: they share cores"
    if lines:
        return Finding(WARNING, "\n".join(lines), advice)
    each = " or ".join(sorted({str(own["threads"]) for own in facts}))
    cores = len(facts[0]["cores"])
    return Finding(OK, f"{each} per rank, {cores} cores available; {_number(len(hosts), 'host')}")


def kernels(world: World) -> Finding:
    facts = world.of("kernels")
    for rank, own in enumerate(facts):
        if own["differ"]:
            found = f"rank {rank}: {', '.join(own['differ'])} differ from the reference"
            return Finding(PROBLEM, found, "clear Numba's cache (__pycache__ of oktopk), or reinstall numba")
    slow = [rank for rank, own in enumerate(facts) if not own["compiled"]]
    if slow:
        return Finding(
            WARNING,
            f"no Numba on {format_ranks(slow)}: falling back to slower torch operations",
            "pip install numba",
        )
    return Finding(OK, "the Numba kernels agree with the reference")


def data(world: World) -> Finding:
    facts = world.of("data")
    if facts[0] is None:
        return Finding(OK, "not checked", "pass --data-dir DIR with --dnn or --dataset to check it")
    if len({own["data"] for own in facts}) > 1:
        lines = "\n".join(f"rank {rank}: {own['data']}" for rank, own in enumerate(facts))
        return Finding(PROBLEM, f"ranks find different data\n{lines}", "use the same --data-dir on all hosts")
    own = facts[0]
    if own["problems"]:
        left_out = "\n".join([own["data"], f"{own['left_out']} left out:", *own["problems"]])
        return Finding(
            WARNING,
            left_out,
            "repair paths with: oktopk data fix-manifest; list everything with: oktopk data check",
        )
    return Finding(OK, own["data"])


def output(world: World) -> Finding:
    facts, request = world.of("out"), world.request
    blind = [rank for rank, seen in enumerate(world.measured.get("sees_out", ())) if not seen]
    if blind:
        found = f"{format_ranks(blind)} cannot see what rank 0 writes to {facts[0]['folder']}"
        return Finding(WARNING, found, "oktopk train needs an --out folder that all ranks share")
    free = min(own["free_bytes"] for own in facts)
    need = LITTLE_SPACE
    if request.params is not None:
        need = 3 * request.params * (CHECKPOINT_BYTES + 4 * (world.size - 1))  # --keep is 3
    text = f"{facts[0]['folder']} is writable, {free / 2**30:.1f} GiB free"
    if free < need:
        return Finding(
            WARNING, f"{text}; three checkpoints need {need / 2**30:.1f}", "free some space, or pass --keep 1"
        )
    return Finding(OK, text)


CHECKS: dict[str, Check] = {
    "world": world_size,
    "versions": versions,
    "same versions": same_versions,
    "extras": extras,
    "backends": backends,
    "MPI": mpi,
    "threads": threads,
    "kernels": kernels,
    "links": link_speed,
    "data": data,
    "output": output,
    "compression": compression_speedup,
}
