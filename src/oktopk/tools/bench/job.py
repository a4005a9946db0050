"""The program of every rank: `python -m oktopk.tools.bench.job PLAN`. Rank 0 prints the records."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from oktopk.engine.voice.speaking import hushed

from .contenders import make_contender
from .names import warmup_steps
from .plan import Plan
from .records import make_records
from .steps import TimedStep
from .workloads import Workload, make_workload


def measure(plan: Plan, workload: Workload, done: Callable[[str], object]) -> dict[str, list[TimedStep]]:
    """Time the contenders of each group in turn, step by step; those with a longer warm-up start earlier."""
    steps: dict[str, list[TimedStep]] = {name: [] for name in plan.names}
    sent: dict[str, int] = {}
    prepared = itertools.count()
    for group in plan.groups:
        contenders = {name: make_contender(name, workload, plan, sent) for name in group}
        for step in range(-max(map(warmup_steps, group)), plan.steps):
            workload.prepare(next(prepared))
            for name, contender in contenders.items():
                if step < -warmup_steps(name):
                    continue
                timed = contender.step()
                sent[name] = timed.reduced.sent_bytes or 0
                if step >= 0:
                    steps[name].append(timed)
                done(name)
        for contender in contenders.values():
            contender.close()
        del contenders, contender
        gc.collect()  # models and their hooks reference each other
    return steps


def make_progress(plan: Plan) -> Callable[[str], object]:
    """Make a progress callback: a bar on stderr if the plan asks for one."""
    if not plan.progress:
        return lambda name: None
    from tqdm import tqdm

    total = sum(warmup_steps(name) + plan.steps for group in plan.groups for name in group)
    bar = tqdm(total=total, unit="step", desc=plan.link or "loopback", disable=dist.get_rank() > 0, leave=False)

    def done(name: str) -> None:
        bar.set_postfix_str(name, refresh=False)
        bar.update()
        if bar.n == total:
            bar.close()

    return done


def peak_memory() -> int:
    """Peak memory of this process in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(text: str) -> None:
    plan = Plan.from_json(text)
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan.timeout))
    try:
        workload = make_workload(plan.model, plan.params, dist.get_rank())
        with hushed():
            steps = measure(plan, workload, make_progress(plan))
        of_ranks: list[dict[str, list[TimedStep]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, steps)
        dist.all_reduce(peak := torch.tensor(peak_memory()), dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            found = make_records(plan, workload.size, of_ranks)
            print(json.dumps([{**record, "peak_memory_bytes": int(peak)} for record in found]), flush=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # everything is reported; on a busy machine torch sometimes aborts while DDP's threads end
