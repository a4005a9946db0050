"""Compare the convergence of finished sweep runs with dense, and plot their curves.

    oktopk sweep --algorithms dense,oktopk --seeds 0,1,2 --out compare --ranks 2 -- --config lstman4_small
    python benchmarks/convergence.py compare --figure curves.png

Runs are grouped by algorithm and density. Differences are relative to the mean of the dense runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from oktopk.tools.tables import format_table

Run = dict[str, Any]


def finished_runs(folders: Iterable[Path]) -> list[Run]:
    found = sorted(path for folder in folders for path in folder.rglob("result.json"))
    runs = [json.loads(path.read_text()) for path in found]
    return [run for run in runs if run["finished"]]


def kind(run: Run) -> str:
    return "dense" if run["algorithm"] == "dense" else f"{run['algorithm']} {100 * run['density']:g} %"


def grouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(kind(run), []).append(run)
    return dict(sorted(groups.items(), key=lambda group: (group[0] != "dense", group[0])))


def figures(runs: Sequence[Run]) -> list[str]:
    """What all validations have: the loss, and rates."""
    names = [name for name in runs[0]["validations"][-1] if name not in ("epoch", "step")]
    return [name for name in names if name != "empty transcripts"]


def spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def rows(groups: dict[str, list[Run]], names: Sequence[str]) -> list[list[str]]:
    last = {
        name: {group: [run["validations"][-1][name] for run in runs] for group, runs in groups.items()}
        for name in names
    }
    lines = []
    for group, runs in groups.items():
        dense = statistics.mean(last["val loss"]["dense"]) if "dense" in groups else None
        loss = statistics.mean(last["val loss"][group])
        phase = runs[0]["phases"].get("sparse") or runs[0]["phases"]["dense"]
        sparse = runs[0]["phases"].get("sparse", {"steps": 0})["steps"]
        lines.append(
            [
                *(group, str(len(runs)), f"{sparse} of {runs[0]['steps']}"),
                *(spread(last[name][group]) for name in names),
                "–" if dense is None else f"{100 * (loss / dense - 1):+.1f} %",
                f"{phase['sent_bytes'] / 1e6:.3f}",
            ]
        )
    return lines


def draw(groups: dict[str, list[Run]], names: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(1, len(names), figsize=(4.2 * len(names), 3.6), constrained_layout=True)
    for axis, name in zip([axes] if len(names) == 1 else axes, names, strict=True):
        for number, (group, runs) in enumerate(groups.items()):
            for seed, run in enumerate(runs):
                points = [(entry["epoch"], entry[name]) for entry in run["validations"]]
                label = group if seed == 0 else None
                axis.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.8, label=label, linewidth=1.2)
        axis.set(title=name, xlabel="epoch")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    drawing.axes[0].legend(title=f"{groups[next(iter(groups))][0]['world']} ranks, one line per seed")
    drawing.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folders", nargs="+", type=Path, help="sweeps, or folders of runs")
    parser.add_argument("--figure", type=Path, help="draw the curves here, as PNG or SVG (needs matplotlib)")
    options = parser.parse_args()
    runs = finished_runs(options.folders)
    if not runs:
        parser.error(f"no finished run below {', '.join(map(str, options.folders))}")
    groups, names = grouped(runs), figures(runs)
    head = ["runs", "seeds", "sparse steps", *names, "val loss to dense", "MB sent per rank and step"]
    print(format_table(head, rows(groups, names)))
    if options.figure:
        draw(groups, names, options.figure)


if __name__ == "__main__":
    main()
