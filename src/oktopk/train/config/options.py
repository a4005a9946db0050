"""Every option of a run, defined once: its type, default and help text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from oktopk.algorithms import ALGORITHMS
from oktopk.engine.settings import (
    AUTO,
    GRADIENTS,
    MOST_DENSITY,
    UPDATES,
    WARMUP_VALUES,
    Pairs,
    Settings,
)
from oktopk.errors import OkTopkError
from oktopk.metrics.sinks import SINKS
from oktopk.utils.names import closest
from oktopk.utils.registry import PluginError
from oktopk.wire.codecs import VALUE_CODES

from ..tasks import WORKLOADS, Workload
from ..tasks.schedules import SCHEDULES, Schedule
from .kinds import ListOf, OneOf, density, integer, number, or_auto, parse_schedule, path, switch

COMMAND_LINE, ENVIRONMENT, DEFAULT = "command line", "environment", "default"
"""Where the value of an option comes from, besides configurations and networks."""


class ConfigError(OkTopkError, ValueError):
    """An option has a value that cannot be used."""


def option(default: Any, parse: Callable[[Any], Any], topic: str, text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "topic": topic, "help": text})


def describe(name: str) -> str:
    """The help of an option, with the names that it takes."""
    meta = OPTIONS[name].metadata
    names = f": {', '.join(meta['parse'].known())}" if isinstance(meta["parse"], OneOf) else ""
    return str(meta["help"]).replace(NAMES, names)


NAMES = "{names}"
"""In the help of an option: the names that it takes, those of plug-ins included."""
MODEL, LENGTH, OPTIMIZER, COMPRESSION, RANKS, OUTPUT = (
    *("model and data", "length of the run", "optimizer", "compression"),
    *("ranks", "output"),
)


@dataclass(frozen=True)
class TrainConfig:
    """The options of one run. None means the workload's default, or not set."""

    dnn: str = option("lstman4", OneOf(WORKLOADS), MODEL, f"network{NAMES}")
    dataset: str | None = option(None, str, MODEL, "dataset; each network has one, so it can be left out")
    data_dir: Path | None = option(None, path, MODEL, "data folder; without it, data is generated")
    pretrain: Path | None = option(
        None, path, MODEL, "start from these weights: a run folder or a file with a state_dict"
    )
    min_seconds: float = option(0.0, number(least=0), MODEL, "drop shorter training utterances (an4)")
    augment: bool = option(
        True, switch, MODEL, "augment training samples: tempo and gain of speech, crops and flips of images"
    )

    max_epochs: int | None = option(None, integer(1), LENGTH, "epochs to train")
    max_steps: int | None = option(None, integer(1), LENGTH, "stop after this many steps, even within an epoch")
    val_every: int = option(
        5, integer(1), LENGTH, "validate every N epochs (for 5: epochs 0, 4, 9, …), and after the last one"
    )
    pseudo_accuracy: bool = option(False, switch, LENGTH, "also report max(0, 1 - WER)")
    seed: int = option(0, integer(0, 2**32 - 1), LENGTH, "random seed; the same seed gives the same run")

    batch_size: int | None = option(None, integer(1), OPTIMIZER, "samples per rank in one forward pass")
    nsteps_update: int = option(1, integer(1), OPTIMIZER, "backward passes accumulated into one step")
    lr: float = option(0.01, number(above=0), OPTIMIZER, "initial learning rate")
    lr_schedule: str | None = option(
        None, OneOf(SCHEDULES), OPTIMIZER, f"learning rate schedule{NAMES} (default: the network's own)"
    )
    momentum: float | None = option(None, number(least=0, up_to=1), OPTIMIZER, "SGD momentum")
    weight_decay: float | None = option(None, number(least=0), OPTIMIZER, "weight decay")
    clip: float | None = option(
        None,
        number(above=0),
        OPTIMIZER,
        "clip the averaged gradient to this norm; with --average updates, each rank's own gradient",
    )
    norm_clip: float | None = option(
        None, number(above=0), OPTIMIZER, "clip each rank's gradient to this norm before compression"
    )
    max_skipped: int = option(25, integer(1), OPTIMIZER, "fail after this many non-finite steps in a row")

    compression: bool = option(True, switch, COMPRESSION, "False trains dense, whatever --compressor says")
    compressor: str = option("oktopk", OneOf(ALGORITHMS), COMPRESSION, f"algorithm{NAMES}")
    density: float | str = option(
        0.01,
        density,
        COMPRESSION,
        "fraction of its gradient entries that a rank sends in a sparse step; auto: the largest one within "
        "--budget, by measurement; 0:dense,128:0.01: from each step on, as in the schedule of a result.json",
    )
    budget: float = option(
        Settings.budget,
        number(above=0, up_to=1),
        COMPRESSION,
        "with --density auto: exposed communication that depends on the density, as a share of a step without it",
    )
    min_density: float = option(
        Settings.min_density,
        number(above=0, up_to=MOST_DENSITY),
        COMPRESSION,
        "the smallest density that --density auto may choose",
    )
    warmup_steps: int | str = option(
        128, or_auto(integer(0)), COMPRESSION, "dense steps before the sparse phase; auto: a share of the run"
    )
    warmup_values: str = option(
        Settings.warmup_values,
        OneOf(dict.fromkeys(WARMUP_VALUES)),
        COMPRESSION,
        f"sum the dense steps of the warm-up in this format{NAMES}",
    )
    average: str = option(
        GRADIENTS,
        OneOf(dict.fromkeys((GRADIENTS, UPDATES))),
        COMPRESSION,
        "what ranks average: gradients, or updates: every rank runs its own optimizer, and what it would add to "
        "the parameters is compressed (for adaptive optimizers such as AdamW)",
    )
    average_state_every: int | None = option(
        None,
        integer(1),
        COMPRESSION,
        "with --average updates: average the second moments (exp_avg_sq) densely every N steps",
    )
    momentum_correction: bool = option(
        False,
        switch,
        COMPRESSION,
        "apply momentum before compression instead of after averaging",
    )
    ramp_steps: int | None = option(
        None,
        integer(0),
        COMPRESSION,
        "sparse steps over which the density falls from 25 %% to --density (default: 0; 8 %% of the run with "
        "--warmup-steps auto)",
    )
    tau: int | None = option(
        None, integer(1), COMPRESSION, "steps between rebalancing of regions (oktopk; default: 64)"
    )
    tau_prime: int | None = option(
        None, integer(1), COMPRESSION, "steps between exact threshold evaluations (oktopk; default: 32)"
    )
    values: str = option(Settings.values, OneOf(VALUE_CODES), COMPRESSION, f"values on the wire{NAMES}")
    fusion_entries: int = option(
        Settings.fusion_entries,
        integer(0),
        COMPRESSION,
        "fuse buckets until together they send at least this many entries; 0: no fusion",
    )
    auto: bool = option(False, switch, COMPRESSION, "time dense and sparse, and use dense where that is faster")
    ranks_per_host: int = option(
        1,
        integer(1),
        COMPRESSION,
        "hierarchical: average N ranks inside each host, then one rank per host exchanges",
    )
    shard: int = option(
        1,
        integer(1),
        COMPRESSION,
        "shard the model over N ranks of a host by FSDP2; each rank exchanges its shards with other hosts (HSDP)",
    )
    sigma_scale: float | None = option(None, number(above=0), COMPRESSION, "ignored, for compatibility")

    nworkers: int | None = option(
        None, integer(1), RANKS, "check that this many ranks run; it starts none, --ranks does"
    )
    nwpernode: int | None = option(
        None, integer(1), RANKS, "ranks per host, to choose the GPU if the launcher sets no local rank"
    )
    ranks: int | None = option(None, integer(1), RANKS, "start this many ranks on this machine")
    timeout: float = option(
        1800.0, number(above=0, up_to=1e6), RANKS, "seconds to wait for a rank that is alive before failing"
    )

    out: Path | None = option(None, path, OUTPUT, "run folder (default: a new one in runs/)")
    save_every: int = option(0, integer(0), OUTPUT, "steps between checkpoints; 0: only at the end of every epoch")
    keep: int = option(3, integer(1), OUTPUT, "number of newest checkpoints to keep")
    sinks: str | None = option(
        None, ListOf(SINKS), OUTPUT, f"further sinks for metrics in the run folder, separated by commas{NAMES}"
    )

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.dnn]

    @property
    def schedule(self) -> Schedule:
        """Computes the learning rate of a step from --lr."""
        return self.workload.schedule if self.lr_schedule is None else SCHEDULES[self.lr_schedule]

    @property
    def momentum_after(self) -> float:
        """The optimizer's momentum; with momentum correction the reducer applies it instead."""
        return 0.0 if self.momentum_correction else self.momentum or 0.0

    @property
    def densities(self) -> float | str | Pairs:
        """--density as the library takes it."""
        return read_density(self.density)

    @property
    def algorithm(self) -> str:
        return self.compressor if self.compression else "dense"


def read_density(value: float | str) -> float | str | Pairs:
    """The value of --density as the library takes it."""
    return parse_schedule(value) if isinstance(value, str) and value != AUTO else value


OPTIONS: dict[str, Field[Any]] = {item.name: item for item in fields(TrainConfig)}
FROM_WORKLOAD = ("dataset", "batch_size", "max_epochs", "momentum", "weight_decay", "clip")
"""Options whose default the workload sets."""
MAY_DIFFER = (
    *("max_epochs", "max_steps", "val_every", "pseudo_accuracy", "max_skipped", "sigma_scale"),
    *("nworkers", "nwpernode", "ranks", "ranks_per_host", "timeout", "out", "save_every", "keep", "sinks"),
)
"""Options that a resumed run may change at will: its length, its output, and its ranks. All others decide what is
computed.
"""


def parse(name: str, value: Any, origin: str) -> Any:
    """Parse the value of an option; values from the command line and the environment are text.

    Args:
        name: the option.
        value: as it was given.
        origin: where it comes from, in words, or the flag of another command that has it.
    """
    wanted = OPTIONS[name].metadata["parse"]
    try:
        if value is None:
            return None
        if isinstance(value, (list, dict)):
            raise ValueError("a single value")
        return wanted(value)
    except PluginError as error:
        raise ConfigError(f"{spell(name, origin)}: {error}") from error
    except (ValueError, TypeError, OverflowError) as error:
        where = f" ({origin})" if spell(name, origin) == name else ""
        close = closest(str(value), wanted.known()) if isinstance(wanted, OneOf) else None
        meant = f": did you mean {close!r}?" if close else ""
        raise ConfigError(f"{spell(name, origin)} must be {error}, got {_shorten(value)}{where}{meant}") from error


def spell(name: str, origin: str = COMMAND_LINE) -> str:
    """An option as it is written where its value comes from.

    >>> spell("max_steps"), spell("max_steps", "environment OKTOPK_MAX_STEPS"), spell("max_steps", "config x.toml")
    ('--max-steps', 'OKTOPK_MAX_STEPS', 'max_steps')
    """
    if origin == COMMAND_LINE:
        return f"--{name.replace('_', '-')}"
    if origin.startswith(ENVIRONMENT):
        return origin.removeprefix(ENVIRONMENT).strip()
    return origin if origin.startswith("--") else name


def _shorten(value: Any) -> str:
    """A value as it was written, as far as that is known."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return repr(value) if isinstance(value, (str, list, dict)) else str(value)
    except (ValueError, RecursionError):  # a number with thousands of digits
        return "something too long to show"
