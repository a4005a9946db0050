"""density="auto" on a link that changes in mid-run: is the budget kept again within 64 steps?

    .venv/bin/python benchmarks/budget.py                                    1gbit, 50mbit, 1gbit: 128 steps each
    .venv/bin/python benchmarks/budget.py --rates 100mbit,20mbit --steps 96

Two hosts, each with a core of its own. A step multiplies matrices for --compute seconds, instead of a forward and
backward pass, and averages random gradients. Then steps with hardly any entries at each rate tell the fixed costs:
what other steps are exposed longer is the cost of their density. Needs root or user namespaces.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import write_json

import oktopk
from oktopk.metrics.sinks import MemorySink
from oktopk.tools.lab import Lab, enter_user_namespace, lab_problem
from oktopk.tools.tables import format_table

SETTLE = 64
"""Steps after a change of the link within which the budget must be kept again."""
GROUP = 8
"""Steps whose median counts."""
NEXT_TO_NOTHING, FIXED_STEPS = 1e-4, 16
AUTO, FIXED = "auto", "fixed"
Row = dict[str, Any]


def job(options: argparse.Namespace) -> None:
    """One rank: steps with a density by measurement, then steps that send next to nothing, at each rate."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rates, rows = options.rates.split(","), []
    scale = torch.randn(options.params, generator=torch.Generator().manual_seed(99)).pow(3)
    random = torch.Generator().manual_seed(dist.get_rank())
    weights = [("w", torch.zeros(options.params, requires_grad=True))]
    chosen: Row = {"density": "auto", "budget": options.budget, "min_density": options.min_density}
    fixed: Row = {"density": NEXT_TO_NOTHING}
    for kind, settings, steps in ((AUTO, chosen, options.steps), (FIXED, fixed, FIXED_STEPS)):
        memory = MemorySink()
        with oktopk.AllReducer(weights, warmup_steps=0, sinks=[memory], timeout=60, **settings) as reducer:
            for step in range(steps * len(rates)):
                if step % steps == 0:
                    ask_for(f"{kind} {step // steps} {rates[step // steps]}")
                    dist.barrier()
                compute(options.compute)
                reducer.sync({"w": scale * torch.randn(options.params, generator=random)})
        rows += [
            {
                "kind": kind, "part": one.step // steps, "density": one.target_density, "exposed": one.exposed,
                "period": one.stop - before.stop,
            }
            for before, one in itertools.pairwise([memory.steps[0], *memory.steps])
        ]  # fmt: skip
    exposed = torch.tensor([row["exposed"] for row in rows], dtype=torch.float64)
    dist.all_reduce(exposed, dist.ReduceOp.MIN)  # without waiting for the other one
    if dist.get_rank() == 0:
        print(json.dumps([row | {"exposed": least} for row, least in zip(rows, exposed.tolist(), strict=True)]))
    dist.destroy_process_group()


def compute(seconds: float) -> None:
    """A core that sleeps takes milliseconds to wake up, and a real model lets none sleep."""
    end, matrix = time.perf_counter() + seconds, torch.eye(256)
    while time.perf_counter() < end:
        matrix = matrix @ matrix


def ask_for(change: str) -> None:
    """Ask for another rate, and wait until it is set."""
    folder = Path(os.environ["CHANGES"])
    folder.joinpath("asked").write_text(change)
    while not folder.joinpath(change).exists():
        time.sleep(0.01)


def change_rates(lab: Lab, folder: Path, ended: threading.Event) -> None:
    while not ended.wait(0.02):
        change = folder.joinpath("asked").read_text() if folder.joinpath("asked").exists() else ""
        if len(change.split()) == 3 and not folder.joinpath(change).exists():
            lab.set_rate(change.split()[2])
            folder.joinpath(change).touch()


def run(options: argparse.Namespace) -> list[Row]:
    """The steps of rank 0, while links have the rates that it asks for."""
    names = ("rates", "steps", "params", "compute", "budget", "min_density")
    words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder, Lab(hosts=2, rate=options.rates.split(",")[0]) as lab:
        changing = threading.Thread(target=change_rates, args=(lab, Path(folder), ended))
        changing.start()
        try:
            ranks = lab.run([sys.executable, __file__, "--job", *words], env={"CHANGES": folder}, timeout=1800)
        finally:
            ended.set()
            changing.join()
        sys.stderr.write(ranks[0].stderr)
        found: list[Row] = json.loads(ranks[0].stdout.strip().splitlines()[-1])
        return found


def judge(rows: list[Row], options: argparse.Namespace) -> list[Row]:
    """For each rate: the density that was found, its cost, and how soon the budget was kept for good."""
    found = []
    for part, rate in enumerate(options.rates.split(",")):
        chosen, fixed = ([r for r in rows if (r["kind"], r["part"]) == (kind, part)] for kind in (AUTO, FIXED))
        free = median(row["exposed"] for row in fixed)
        groups = [chosen[start : start + GROUP] for start in range(0, len(chosen), GROUP)]
        costs = [max(0.0, median(row["exposed"] for row in group) - free) for group in groups]
        shares = [
            cost / (median(row["period"] for row in group) - cost)
            for cost, group in zip(costs, groups, strict=True)
        ]
        over = [
            GROUP * (number + 1) for number, share in enumerate(shares) if share > options.most * options.budget
        ]
        late = SETTLE // GROUP
        found.append({
            "rate": rate, "fixed_ms": 1e3 * free, "density": median(row["density"] for row in chosen[SETTLE:]),
            "cost_ms": 1e3 * median(costs[late:]), "share": median(shares[late:]),
            "kept_after_steps": max(over, default=0), "shares": shares,
        })  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1gbit,50mbit,1gbit", help="rates of the links, one after the other")
    parser.add_argument("--steps", type=int, default=128, help="steps at each of them")
    parser.add_argument("--params", type=int, default=3_200_000)
    parser.add_argument("--compute", type=float, default=0.2, help="seconds of a step besides its exchange")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--min-density", type=float, default=0.002)
    parser.add_argument("--most", type=float, default=1.5, help="budgets up to which it counts as kept")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options)
        return 0
    enter_user_namespace()
    if problem := lab_problem():
        print(problem, file=sys.stderr)
        return 2
    found = judge(run(options), options)
    head = ["link", "fixed ms", "density", "its cost, ms", "of the step", "kept after steps"]
    forms = ("{}", "{:.1f}", "{:.2%}", "{:.1f}", "{:.1%}", "{}")
    cells = [[form.format(x) for form, x in zip(forms, row.values(), strict=False)] for row in found]
    print(format_table(head, cells))
    if options.json is not None:
        write_json(options.json, found)
    return int(any(row["kept_after_steps"] > SETTLE for row in found))


if __name__ == "__main__":
    sys.exit(main())
