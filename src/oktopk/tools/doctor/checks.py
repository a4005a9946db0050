"""The checks of a world: each looks at facts and gives one finding. A new one is a function here and a line in
CHECKS."""

from __future__ import annotations

from collections import defaultdict

from .findings import OK, PROBLEM, WARNING, Check, Finding, World, ranks
from .speed import link_speed, whether_it_pays

USES = {"mpi": "mpirun", "train": "oktopk train", "report": "pictures and reports"}
MUST_AGREE = ("python", "torch", "oktopk")
CHECKPOINT_BYTES = 4 * 3
"""Bytes for each parameter: weights, momentum, and the residual of a rank."""
LITTLE_SPACE = 1 << 30
OPEN_MPI = "Open MPI"
"""Has an ABI of its own; MPICH, Intel MPI, Cray MPICH and MVAPICH share one."""


def versions(world: World) -> Finding:
    own = world.of("versions")[0]
    return Finding(OK, ", ".join(f"{name} {version or 'missing'}" for name, version in own.items()))


def same_versions(world: World) -> Finding:
    """Ranks with other versions may compute other bits, or speak another protocol."""
    if world.apart:
        return world.apart
    told, level, layout_mismatch = world.of("versions"), OK, []
    for name in told[0]:
        found: dict[str, list[int]] = defaultdict(list)
        for rank, own in enumerate(told):
            found[str(own.get(name))].append(rank)
        if len(found) > 1:
            level = PROBLEM if name in MUST_AGREE or level == PROBLEM else WARNING
            layout_mismatch.append(f"{name}: " + "; ".join(f"{v} on {ranks(who)}" for v, who in found.items()))
    if layout_mismatch:
        return Finding(level, "\n".join(layout_mismatch), "install the same versions for all ranks")
    return Finding(OK, f"the same on all {world.size} ranks" if world.size > 1 else "there is one rank")


def extras(world: World) -> Finding:
    """What is optional is no problem when it is missing: whoever wants it hears how to get it."""
    missing = {extra: packages for extra, packages in world.of("extras")[0].items() if packages}
    if not missing:
        return Finding(OK, f"all packages for {', '.join(USES.values())} are there")
    lines = [f"for {USES[extra]} there is no {', '.join(packages)}" for extra, packages in missing.items()]
    return Finding(OK, "\n".join(lines), f"if you want that: pip install 'oktopk[{','.join(missing)}]'")


def backends(world: World) -> Finding:
    told = world.of("backends")
    without = [rank for rank, own in enumerate(told) if not own["gloo"]]
    if without:
        return Finding(PROBLEM, f"no gloo on {ranks(without)}", "use a build of torch with gloo: ranks meet by it")
    own = told[0]
    there = [name for name in ("gloo", "nccl", "mpi") if own[name]]
    blind = [rank for rank, own in enumerate(told) if own["gpus"] and not own["nccl"]]
    if blind:
        return Finding(WARNING, f"GPUs but no nccl on {ranks(blind)}", "dense sums of GPU tensors go by the CPU")
    return Finding(OK, f"torch has {', '.join(there)}; {own['gpus'] or 'no'} GPUs")


def mpi(world: World) -> Finding:
    """A process that mpirun has started as one of several, and that is alone in MPI's eyes, has another MPI."""
    told = world.of("mpi")
    own = told[0]
    if own is None:
        return Finding(OK, "mpi4py is not installed", "only mpirun needs it: pip install 'oktopk[mpi]'")
    abi = f", ABI {own['abi']}" if own["abi"] else ""
    library = f"mpi4py {own['mpi4py']} with {own['library']}{abi}"
    if (OPEN_MPI in own["built_for"]) != (OPEN_MPI in own["library"]):
        advice = "install mpi4py for the library that is there, or oktopk[mpi], which brings both"
        return Finding(PROBLEM, f"{library}, but built for {own['built_for']}", advice)
    if own["size"] is not None and own["size"] != world.asked.started:
        found = f"mpirun has started {world.asked.started} processes, but each finds {own['size']} in its world"
        advice = "start them with the mpirun of that library; pip's mpich has its own, beside python"
        return Finding(PROBLEM, f"{found}: mpirun is not that of {own['library']}", advice)
    if len({str(theirs) for theirs in told}) > 1:
        return Finding(PROBLEM, "ranks have different MPI libraries", "--json tells those of each rank")
    return Finding(OK, library)


def world_size(world: World) -> Finding:
    asked = world.asked
    if world.broken is not None:
        advice = "start all of them, let them reach each other (host, port, firewall), or give them more --timeout"
        return Finding(PROBLEM, f"{asked.started} ranks ({asked.how}), but {world.broken}", advice)
    if asked.nworkers is not None and asked.nworkers != world.size:
        advice = f"start {asked.nworkers} by torchrun or mpirun, or by --ranks {asked.nworkers}; or leave it out"
        return Finding(PROBLEM, f"--nworkers is {asked.nworkers}, but there {_are(world.size)}", advice)
    if asked.started != world.size:
        found = f"{asked.started} processes were started, but there {_are(world.size)}"
        return Finding(PROBLEM, found, "see what is said of MPI")
    return Finding(OK, f"{_number(world.size, 'rank')} ({asked.how})")


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {_number(count, 'rank')}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def threads(world: World) -> Finding:
    """Ranks of one host share its cores."""
    hosts: dict[str, list[int]] = defaultdict(list)
    told = world.of("threads")
    for rank, own in enumerate(told):
        hosts[own["host"]].append(rank)
    lines, advice = [], None
    for host, here in hosts.items():
        cores = len({core for rank in here for core in told[rank]["cores"]})
        used = sum(told[rank]["threads"] for rank in here)
        if used > cores:
            lines.append(f"{_number(len(here), 'rank')} with {used} threads on {cores} cores of {host}")
            wanted = max(1, cores // len(here))
            advice = f"set OMP_NUM_THREADS={wanted}" if used > len(here) else "fewer ranks: they compute in turns"
    if lines:
        return Finding(WARNING, "\n".join(lines), advice)
    each = " or ".join(sorted({str(own["threads"]) for own in told}))
    cores = len(told[0]["cores"])
    return Finding(OK, f"{each} for each rank, which has {cores} cores; {_number(len(hosts), 'host')}")


def kernels(world: World) -> Finding:
    told = world.of("kernels")
    for rank, own in enumerate(told):
        if own["differ"]:
            found = f"rank {rank}: {', '.join(own['differ'])} differ from the reference"
            return Finding(PROBLEM, found, "clear Numba's cache (__pycache__ of oktopk), or reinstall numba")
    slow = [rank for rank, own in enumerate(told) if not own["compiled"]]
    if slow:
        return Finding(WARNING, f"no Numba on {ranks(slow)}: torch does the same, slower", "pip install numba")
    return Finding(OK, "Numba's agree with the reference")


def data(world: World) -> Finding:
    told = world.of("data")
    if told[0] is None:
        return Finding(OK, "not looked at", "--data-dir DIR with --dnn or --dataset looks at it")
    if len({own["data"] for own in told}) > 1:
        lines = "\n".join(f"rank {rank}: {own['data']}" for rank, own in enumerate(told))
        return Finding(PROBLEM, f"ranks find different data\n{lines}", "give all hosts the same --data-dir")
    own = told[0]
    if own["problems"]:
        left_out = "\n".join([own["data"], f"{own['left_out']} left out:", *own["problems"]])
        return Finding(WARNING, left_out, "mend paths by: oktopk data fix-manifest; all of it: oktopk data check")
    return Finding(OK, own["data"])


def output(world: World) -> Finding:
    told, asked = world.of("out"), world.asked
    blind = [rank for rank, seen in enumerate(world.measured.get("sees_out", ())) if not seen]
    if blind:
        found = f"{ranks(blind)} do not see what rank 0 writes to {told[0]['folder']}"
        return Finding(WARNING, found, "oktopk train needs an --out that all ranks share")
    free = min(own["free_bytes"] for own in told)
    need = LITTLE_SPACE
    if asked.params is not None:
        need = 3 * asked.params * (CHECKPOINT_BYTES + 4 * (world.size - 1))  # --keep is 3
    text = f"{told[0]['folder']} can be written to, {free / 2**30:.1f} GiB free"
    if free < need:
        return Finding(WARNING, f"{text}; three checkpoints take {need / 2**30:.1f}", "make room, or --keep 1")
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
    "compression": whether_it_pays,
}
