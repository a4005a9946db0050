"""One rank of tests/tools/bench/test_ranks.py: what each contender makes of the gradients of all ranks.

Rank 0 prints it.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.tools.bench.contenders import DdpContender
from oktopk.tools.bench.plan import Plan
from oktopk.tools.bench.workloads import make_workload

STEPS = 3


def main(text: str) -> None:
    plan = Plan.from_json(text)
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan.timeout))
    workload = make_workload(plan.model, plan.params, dist.get_rank())
    contenders = {name: DdpContender(name, workload, plan) for name in plan.names}
    for step in range(STEPS):
        workload.prepare(step)
        turns = {name: contender.step() for name, contender in contenders.items()}
    own = flat(contenders["backward"])
    dist.all_reduce(average := own / plan.ranks)
    told = {
        name: {
            "error": relative(flat(contender), average),
            "own_error": relative(flat(contender), own),
            "density": float(flat(contender).count_nonzero()) / plan.params,
            "seconds": turns[name].seconds,
            "sent_bytes": turns[name].reduced.sent_bytes,
            "interface_bytes": turns[name].interface_bytes,
        }
        for name, contender in contenders.items()
    }
    if dist.get_rank() == 0:
        print(json.dumps(told))
    for contender in contenders.values():
        contender.close()
    dist.destroy_process_group()


def flat(contender: DdpContender) -> Tensor:
    grads = [parameter.grad for parameter in contender.model.parameters()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


if __name__ == "__main__":
    main(sys.argv[1])
