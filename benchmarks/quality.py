"""Time to the same quality: the experiments behind docs/quality.md, as races that can be interrupted.

    python benchmarks/quality.py equal-time    120 s each at 100 Mbit/s: gpt of 3.2M parameters, AdamW
    python benchmarks/quality.py adamw         quality by step: the same model, 800 steps
    python benchmarks/quality.py an4 gpt       quality by step, time to target at three rates, some cells in full
    python benchmarks/quality.py cifar10       quality by step

Each experiment is one or more `oktopk race` commands into one folder below --out. Finished cells are kept and
skipped: the same command continues an interrupted run. Real data is read from $OKTOPK_DATA, else ../shared/data,
and imported once. `--dry-run` prints the commands. Experiments take from half an hour (equal-time) to some hours;
those with links need root or user namespaces, and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OKTOPK = str(Path(sys.executable).with_name("oktopk"))

FIXED = "values=fp16:auto=False"
AN4_SPARSE = f"oktopk:density=0.01:warmup_steps=336:ramp_steps=224:norm_clip=40:{FIXED}"
CIFAR_SPARSE = f"oktopk:density=0.01:warmup_steps=128:{FIXED}"
GPT_SPARSE = f"oktopk:density=0.01:warmup_steps=128:{FIXED}"
ONE, FIVE = (f"oktopk:density={density}:values=fp16:warmup_steps=10" for density in (0.01, 0.05))
ADAMW = f"density=0.01:warmup_steps=10:{FIXED}"
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
        (Command((ONE, FIVE, "powersgd:4"), "0,1,2", "100mbit"),
         Command(("ddp", "ddp-fp16", "powersgd:2", "oktopk"), "0", "100mbit")),
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
        ] for command in experiment.commands),
        [OKTOPK, "race", "--report", folder, *judged],
    ]  # fmt: skip


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
    options = parser.parse_args(argv)
    failed = 0
    for name in options.experiments:
        dataset = EXPERIMENTS[name].data
        folder = options.out / "data"
        data = folder / dataset if options.dry_run else import_data(dataset, folder)
        for command in race_commands(name, options.out, data):
            if options.dry_run:
                print(shlex.join(command))
            else:
                failed = failed or _run(command)
    return failed


if __name__ == "__main__":
    sys.exit(main())
