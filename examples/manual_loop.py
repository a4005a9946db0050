"""A hand-written loop: average gradients by name, handle skipped steps, and record metrics.

In step 60 the gradient of the last rank is made infinite. All ranks skip that step, and no parameter or residual
changes.

    python examples/manual_loop.py
    torchrun --nproc-per-node 2 examples/manual_loop.py --out run

With --out, the folder gets one line of JSON per event and rank, and a timeline of all ranks for
https://ui.perfetto.dev.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from common import accuracy, batches, digits, network, options, summary
from torch.nn.functional import cross_entropy

import oktopk
from oktopk.metrics.sinks import JSONLSink, MemorySink, TraceSink, merge_traces


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--bad-step",
        type=int,
        default=60,
        help="step with an infinite gradient, or -1 for none (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="output folder for events and the timeline")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")

    train, test = digits()
    model = network()
    parameters = dict(model.named_parameters())
    velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
    memory = MemorySink()
    with oktopk.AllReducer(
        parameters.items(), density=chosen.density, warmup_steps=chosen.warmup_steps, sinks=[memory]
    ) as reducer:
        rank, world = reducer.run(lambda comm: (comm.rank, comm.world))
        if chosen.out:
            reducer.add_sink(JSONLSink(chosen.out / f"rank{rank}.jsonl"))
            reducer.add_sink(TraceSink(chosen.out / f"rank{rank}.trace.json", rank))

        for step, (x, y) in enumerate(batches(train, rank, world, range(chosen.steps))):
            loss = cross_entropy(model(x), y)
            grads = dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))
            if step == chosen.bad_step and rank == world - 1:
                grads["0.weight"][0, 0] = torch.inf

            reducer.sync(grads)  # in place: now they are the means over all ranks
            if reducer.skipped:
                if rank == 0:
                    print(f"step {step} left out: {', '.join(reducer.last.culprits)}")
                continue
            with torch.no_grad():
                for name, parameter in parameters.items():
                    velocity[name].mul_(0.9).add_(grads[name])
                    parameter -= 0.1 * velocity[name]
        if rank == 0:
            print(summary(world, accuracy(model, test), memory))

    if dist.is_initialized():
        dist.barrier()  # all traces are complete
    if rank == 0 and chosen.out:
        merge_traces([chosen.out / f"rank{r}.trace.json" for r in range(world)], chosen.out / "trace.json")
        print(f"written       {chosen.out / 'rank*.jsonl'} and {chosen.out / 'trace.json'}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
