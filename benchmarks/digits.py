"""Does it converge like dense? A small network on scikit-learn's handwritten digits (8 x 8), P ranks as threads.

Every contender trains the same network from the same start on the same batches; only the reduction differs. With
momentum correction the optimizer has no momentum. Accuracy is measured on the test set after the last epoch.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from common import arguments, write_json
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import oktopk
from oktopk.metrics.events import SPARSE
from oktopk.metrics.sinks import MemorySink
from oktopk.tools.tables import format_table

MOMENTUM = 0.9


@dataclass(frozen=True)
class Contender:
    name: str
    compressor: str = "oktopk"
    density: float = 0.01
    correction: bool = False
    values: str = "fp32"


CONTENDERS = (
    Contender("dense", compressor="dense"),
    Contender("oktopk 1 %"),
    Contender("oktopk 1 %, fp16", values="fp16"),
    Contender("oktopk 1 %, e4m3", values="e4m3"),
    Contender("oktopk 1 %, momentum correction", correction=True),
    Contender("oktopk 0.1 %", density=0.001),
    Contender("oktopk 0.1 %, momentum correction", density=0.001, correction=True),
    Contender("topka 1 %", compressor="topka"),
)


@dataclass(frozen=True)
class Result:
    accuracy: float
    sparse_share: float
    """Of the steps."""
    sent_bytes: float
    """Per rank and sparse step; per dense step if there is no other, and then modelled as a ring."""


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=0.25, random_state=seed, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in parts)
    return train_x.float(), train_y.long(), test_x.float(), test_y.long()


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def train(
    contender: Contender, world: int, seed: int, epochs: int, warmup_steps: int, batch: int = 16, lr: float = 0.05
) -> Result:
    """One run; the accuracy of rank 0, after a check that all replicas are the same."""
    train_x, train_y, test_x, test_y = digits(seed)
    networks = [network(seed) for _ in range(world)]  # seeding is not for threads
    per_epoch = len(train_x) // (world * batch)

    def rank(comm: oktopk.Communicator) -> Result:
        model, sink = networks[comm.rank], MemorySink()
        inner = torch.optim.SGD(model.parameters(), lr, momentum=0.0 if contender.correction else MOMENTUM)
        with oktopk.DistributedOptimizer(
            inner, model=model, compressor=contender.compressor, density=contender.density, comm=comm,
            warmup_steps=warmup_steps, momentum=MOMENTUM if contender.correction else 0.0, auto=False,
            buckets="model", values=contender.values, sinks=[sink],
        ) as optimizer:  # fmt: skip
            for epoch in range(epochs):
                order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
                for step in range(per_epoch):
                    mine = order[step * world * batch :][comm.rank * batch :][:batch]
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(train_x[mine]), train_y[mine]).backward()
                    optimizer.step()
        sparse = [event for event in sink.steps if event.phase == SPARSE]
        sent = statistics.mean(event.wire.sent_bytes for event in sparse or sink.steps)
        with torch.no_grad():
            accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
        return Result(accuracy, len(sparse) / len(sink.steps), sent)

    result = oktopk.run_threads(world, rank, timeout=120)[0]
    for other in networks[1:]:
        for a, b in zip(networks[0].parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b), "replicas differ"
    return result


def main() -> None:
    parser = arguments(__doc__ or "", "digits")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--warmup-steps", type=int, default=21)
    parser.add_argument(
        "--only", action="append", choices=[c.name for c in CONTENDERS], help="beside dense; may be repeated"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    contenders = [c for c in CONTENDERS if not options.only or c.name in ("dense", *options.only)]
    rows, records = [], []
    jobs = [(contender, seed) for contender in contenders for seed in range(options.seeds)]
    found: dict[str, list[Result]] = {contender.name: [] for contender in contenders}
    for contender, seed in tqdm(jobs, desc="runs", disable=None):
        result = train(contender, options.ranks, seed, options.epochs, options.warmup_steps)
        found[contender.name].append(result)
        records.append({"name": contender.name, "seed": seed, **vars(result)})
    dense = statistics.mean(result.accuracy for result in found["dense"])
    for name, results in found.items():
        accuracies = [100 * result.accuracy for result in results]
        rows.append([
            name,
            f"{statistics.mean(accuracies):.2f}",
            f"{min(accuracies):.2f} … {max(accuracies):.2f}",
            f"{statistics.mean(accuracies) - 100 * dense:+.2f}",
            f"{100 * results[0].sparse_share:.0f} %",
            round(statistics.mean(result.sent_bytes for result in results)),
        ])  # fmt: skip
    headers = ["", "accuracy %", "of the seeds", "against dense", "sparse steps", "bytes sent per rank and step"]
    print(format_table(headers, rows))
    write_json(options.json, records)


if __name__ == "__main__":
    main()
