"""What every rank of a measurement runs: `python -m oktopk.tools.bench.job PLAN`. Rank 0 prints the records."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from .contenders import Contender, Turn
from .figures import records
from .plan import Plan
from .workloads import Workload, make_workload

WARMUP = 3
"""Steps of each contender that do not count: kernels are compiled, DDP arranges its buckets anew after the first,
PowerSGD begins with the third, and thresholds are found exactly in the first one of a bucket."""


def measure(plan: Plan, workload: Workload, done: Callable[[str], object]) -> dict[str, list[Turn]]:
    """Contenders take turns step by step, group after group."""
    turns: dict[str, list[Turn]] = {name: [] for name in plan.names}
    for number, group in enumerate(plan.groups):
        contenders = {name: Contender(name, workload, plan) for name in group}
        for step in range(WARMUP + plan.steps):
            workload.prepare(number * (WARMUP + plan.steps) + step)
            for name, contender in contenders.items():
                turn = contender.turn()
                if step >= WARMUP:
                    turns[name].append(turn)
                done(name)
        for contender in contenders.values():
            contender.close()
        del contenders, contender
        gc.collect()  # models and their hooks know each other
    return turns


def progress(plan: Plan) -> Callable[[str], object]:
    """A bar on stderr, if it was asked for: whoever started this rank knows whether somebody looks."""
    if not plan.progress:
        return lambda name: None
    from tqdm import tqdm

    total = (WARMUP + plan.steps) * sum(map(len, plan.groups))
    bar = tqdm(total=total, unit="step", desc=plan.link or "loopback", disable=dist.get_rank() > 0, leave=False)

    def done(name: str) -> None:
        bar.set_postfix_str(name, refresh=False)
        bar.update()
        if bar.n == total:
            bar.close()

    return done


def main(text: str) -> None:
    plan = Plan.from_json(text)
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan.timeout))
    try:
        workload = make_workload(plan.model, plan.params, dist.get_rank())
        turns = measure(plan, workload, progress(plan))
        of_ranks: list[dict[str, list[Turn]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, turns)
        if dist.get_rank() == 0:
            size = sum(parameter.numel() for parameter in workload.replica().parameters())
            print(json.dumps(records(plan, size, of_ranks)), flush=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
