"""Time to the same quality: the experiments behind docs/quality.md, as races that can be interrupted.

    python benchmarks/quality.py equal-time    120 s each at 100 Mbit/s: gpt of 3.2M parameters, AdamW
    python benchmarks/quality.py adamw         quality by step: the same model, 800 steps
    python benchmarks/quality.py an4 gpt       quality by step, time to target at three rates, some cells in full
    python benchmarks/quality.py cifar10       quality by step

Each experiment is one or more `oktopk race` commands into one folder below --out. Finished cells are kept and
skipped: the same command continues an interrupted run. What has been trained in full is also written to
benchmarks/results/quality, and skipped on any machine that has this checkout; `--tables` prints what is there.
Real data is read from $OKTOPK_DATA, else ../shared/data, and imported once. `--dry-run` prints the commands.
Experiments take from half an hour (equal-time) to some hours; those with links need root or user namespaces, and a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oktopk.tools.race.spec import parse_target

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "quality"
OKTOPK = str(Path(sys.executable).with_name("oktopk"))

FIXED = "values=fp16:auto=False"
AN4_SPARSE = f"oktopk:density=0.01:warmup_steps=336:ramp_steps=224:norm_clip=40:{FIXED}"
CIFAR_SPARSE = f"oktopk:density=0.01:warmup_steps=128:{FIXED}"
GPT_SPARSE = f"oktopk:density=0.01:warmup_steps=128:{FIXED}"
ONE, FIVE = (f"oktopk:density={density}:values=fp16:warmup_steps=10" for density in (0.01, 0.05))
ADAMW = f"density=0.01:{FIXED}:warmup_steps=5:ramp_steps=40"
RATES = "1gbit,100mbit,20mbit"


@dataclass(frozen=True)
class Command:
    """One call of `oktopk race`."""

    contenders: Sequence[str]
    seeds: str = "0"
    link: str = "none"
    composed: bool = False


@dataclass(frozen=True)
class Experiment:
    """Races into one folder, which share everything but contenders, seeds and links.

    Cells train to their last step; the target judges them afterwards.
    """

    config: str
    data: str
    options: Sequence[str]
    commands: Sequence[Command]
    target: str | None = None


AN4_OTHERS = ("ddp-fp16", "powersgd:1", "powersgd:2", "powersgd:4", "accumulate:4")
GPT_OTHERS = ("ddp-fp16", "powersgd:2", "powersgd:4", "accumulate:4")
ARCHIVES = {"an4": ("an4.tar.xz", ("--min-seconds", "1")), "cifar10": ("cifar10_jpeg_60000.tar.xz", ())}
EXPERIMENTS = {
    "equal-time": Experiment(
        "gpt_race", "shakespeare", ("--seconds", "120"),
        (Command(("local", "oktopk", ONE, FIVE, "powersgd:4"), "0,1,2", "100mbit"),
         Command(("ddp", "ddp-fp16", "powersgd:2"), "0", "100mbit")),
    ),
    "adamw": Experiment(
        "gpt_race", "shakespeare", ("--steps", "800", "--val-every-steps", "50"),
        (Command(("ddp", f"local:{ADAMW}", f"oktopk:{ADAMW}"), "0,1,2"),),
        "val loss<=1.90",
    ),
    "an4": Experiment(
        "lstman4_small", "an4", ("--val-every-steps", "224"),
        (Command(("ddp", AN4_SPARSE), "0,1,2", RATES, True),
         Command(AN4_OTHERS, "0", RATES, True),
         Command((AN4_SPARSE, "powersgd:4", "ddp"), "0", "100mbit")),
        "val WER<=0.30",
    ),
    "cifar10": Experiment(
        "resnet20_short", "cifar10", ("--val-every-steps", "390"),
        (Command(("ddp", CIFAR_SPARSE), "0,1,2"),),
        "val acc>=0.84",
    ),
    "gpt": Experiment(
        "gpt", "shakespeare", ("--val-every-steps", "100"),
        (Command(("ddp", GPT_SPARSE), "0", RATES, True),
         Command(GPT_OTHERS, "0", RATES, True),
         Command((GPT_SPARSE,), "0", "100mbit")),
        "val loss<=1.60",
    ),
}  # fmt: skip


def find_data() -> Path:
    """The folder with the archives of real data."""
    given = os.environ.get("OKTOPK_DATA")
    found = Path(given) if given else HERE.parent.parent / "shared" / "data"
    if not found.is_dir():
        raise SystemExit(f"{found} is not there: set OKTOPK_DATA to the folder with the real data")
    return found


def import_data(name: str, folder: Path) -> Path:
    """The imported data set, made once."""
    target = folder / name
    if target.exists():
        return target
    source, draft = find_data(), folder / f"{name}.importing"
    shutil.rmtree(draft, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if name == "shakespeare":
        draft.mkdir()
        shutil.copy(source / "tinyshakespeare.txt", draft)
    else:
        archive, more = ARCHIVES[name]
        if _run([OKTOPK, "data", name, str(source / archive), str(draft), *more]):
            raise SystemExit(f"{source / archive} could not be imported")
    draft.rename(target)
    return target


def race_commands(name: str, out: Path, data: Path) -> list[list[str]]:
    """The `oktopk race` commands of an experiment; the last one judges all cells by the target."""
    experiment, folder = EXPERIMENTS[name], str(out / name)
    judged = [] if experiment.target is None else ["--target", experiment.target]
    return [
        *([
            OKTOPK, "race", "--config", experiment.config, *experiment.options, "--out", folder,
            "--contenders", ",".join(command.contenders), "--seeds", command.seeds, "--link", command.link,
            *(["--composed"] if command.composed else []), "--", "--data-dir", str(data),
        ] for command in _missing(name, experiment)),
        [OKTOPK, "race", "--report", folder, *judged],
    ]  # fmt: skip


def _missing(name: str, experiment: Experiment) -> Iterator[Command]:
    """The commands without what is among the results, seed by seed."""
    known = {(one["contender"], one["link"], one["seed"]) for one in read_results(name)}
    for command in experiment.commands:
        if command.composed:
            yield command
            continue
        for seed in command.seeds.split(","):
            left = [one for one in command.contenders if (one, command.link, int(seed)) not in known]
            if left:
                yield replace(command, contenders=left, seeds=seed)


def read_results(name: str) -> list[dict[str, Any]]:
    """The trials of an experiment that are kept in the checkout."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def keep_results(name: str, race: Path) -> None:
    """Add the trials of a race's race.json that were run in full; one that is there already stays as it is."""
    if not race.exists():
        return
    full = [trial for trial in json.loads(race.read_text())["trials"] if trial["how"] == "full"]
    kept = {(one["contender"], one["link"], one["seed"]): one for one in [*full, *read_results(name)]}
    names = ("contender", "link", "seed", "ended", "steps", "seconds", "sent_bytes", "curve")
    rows = [{key: trial[key] for key in names} for _, trial in sorted(kept.items())]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text("[" + ",\n".join(map(json.dumps, rows)) + "]\n")


def print_table(name: str) -> None:
    """Print, for every contender and link, what its seeds have reached."""
    trials, target = read_results(name), EXPERIMENTS[name].target
    metric = "val loss" if target is None else parse_target(target).metric
    best = min if target is None or parse_target(target).at_most else max
    print(f"{name}: {metric} at the end, mean ± standard deviation over seeds; steps and seconds to {target}")
    print("| contender | link | seeds | ms per step | steps | end | best | steps to target | seconds to target |")
    print("|---|---|---|---|---|---|---|---|---|")
    for contender, link in dict.fromkeys((one["contender"], one["link"]) for one in trials):
        group = [one for one in trials if (one["contender"], one["link"]) == (contender, link)]
        values = [[point["metrics"][metric] for point in one["curve"]] for one in group]
        hits = [_reached(one, target) for one in group]
        reached = [hit for hit in hits if hit is not None]
        at = [f"{len(reached)} of {len(hits)}"] * 2 if len(reached) < len(hits) else [
            _spread([hit[key] for hit in reached], ".0f") for key in ("step", "seconds")
        ]  # fmt: skip
        print(
            f"| {contender} | {link} | {len(group)} "
            f"| {1e3 * sum(one['seconds'] for one in group) / sum(one['steps'] for one in group):.0f} "
            f"| {statistics.fmean(one['steps'] for one in group):.0f} | {_spread([v[-1] for v in values], '.3f')} "
            f"| {_spread([best(v) for v in values], '.3f')} | {' | '.join(at if target else ['', ''])} |"
        )


def _reached(trial: dict[str, Any], target: str | None) -> dict[str, Any] | None:
    if target is None:
        return None
    wanted = parse_target(target)
    return next((point for point in trial["curve"] if wanted.reached(point["metrics"])), None)


def _spread(values: Sequence[float], form: str) -> str:
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def _run(command: Sequence[str]) -> int:
    print(shlex.join(command), file=sys.stderr, flush=True)
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "experiments", nargs="+", choices=EXPERIMENTS, metavar="EXPERIMENT", help=", ".join(EXPERIMENTS)
    )
    parser.add_argument("--out", type=Path, default=HERE / "out" / "quality", help="folder of races and data")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")
    parser.add_argument("--tables", action="store_true", help="print the kept results, and run nothing")
    options = parser.parse_args(argv)
    failed = 0
    for name in options.experiments:
        if options.tables:
            print_table(name)
            continue
        dataset = EXPERIMENTS[name].data
        folder = options.out / "data"
        data = folder / dataset if options.dry_run else import_data(dataset, folder)
        for command in race_commands(name, options.out, data):
            if options.dry_run:
                print(shlex.join(command))
            else:
                failed = failed or _run(command)
                keep_results(name, options.out / name / "race.json")
    return failed


if __name__ == "__main__":
    sys.exit(main())
