"""Every option of a run, defined once: its type, default and help text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from oktopk.algorithms import ALGORITHMS
from oktopk.engine.settings import AUTO, MOST_DENSITY, WARMUP_VALUES, Pairs, Settings, check_pairs
from oktopk.errors import OkTopkError
from oktopk.wire.message import VALUE_CODES

from ..tasks import WORKLOADS, Workload
from ..tasks.schedules import SCHEDULES, Schedule

ON, OFF = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_DENSE = "dense"


class ConfigError(OkTopkError, ValueError):
    """An option has a value that cannot be used."""


def integer(least: int, up_to: float = inf) -> Callable[[Any], int]:
    wanted = f"a whole number from {least} " + ("on" if up_to == inf else f"up to {up_to}")

    def parse(value: Any) -> int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError(wanted)
        number = int(value)
        if number >= 2**63:
            raise ValueError("a number below 2^63")
        if not least <= number <= up_to:
            raise ValueError(wanted)
        return number

    parse.__name__ = "int"
    return parse


def number(above: float = -inf, up_to: float = inf, least: float = -inf) -> Callable[[Any], float]:
    bounds = [f"above {above:g}"] * (above > -inf) + [f"from {least:g} on"] * (least > -inf)
    wanted = " ".join(["a number", *bounds, *[f"up to {up_to:g}"] * (up_to < inf)])

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not (above < float(value) <= up_to and least <= float(value) < inf):
            raise ValueError(wanted)
        return float(value)

    parse.__name__ = "float"
    return parse


def or_auto(parse_number: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        return AUTO if str(value).strip().lower() == AUTO else parse_number(value)

    parse.__name__ = f"{parse_number.__name__} or auto"
    return parse


def density(value: Any) -> float | str:
    """A number, "auto", or steps with their densities as text."""
    if ":" in str(value):
        try:
            return format_schedule(parse_schedule(str(value)))
        except ValueError as error:
            raise ValueError(f"a number, auto, or steps with densities like 0:dense,128:0.01 ({error})") from error
    found: float | str = or_auto(number(above=0, up_to=1))(value)
    return found


density.__name__ = "float or auto"


def parse_schedule(text: str) -> Pairs:
    """Parse steps with their densities.

    >>> parse_schedule("0:dense,128:0.01")
    ((0, None), (128, 0.01))
    """
    pairs = [word.split(":") for word in text.lower().split(",")]
    return check_pairs([(int(step), None if found.strip() == _DENSE else float(found)) for step, found in pairs])


def format_schedule(pairs: Iterable[tuple[int, float | None]]) -> str:
    """Write steps with their densities as --density takes them."""
    return ",".join(f"{step}:{_DENSE if found is None else repr(float(found))}" for step, found in pairs)


def switch(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in ON + OFF:
        raise ValueError("True or False")
    return text in ON


def path(value: Any) -> Path:
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a path without a zero byte")
    return Path(value)


path.__name__ = "Path"


def one_of(names: Mapping[str, object] | tuple[str, ...]) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if str(value).lower() not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return str(value).lower()

    parse.__name__ = "str"
    return parse


def option(default: Any, parse: Callable[[Any], Any], topic: str, text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "topic": topic, "help": text})


MODEL, LENGTH, OPTIMIZER, COMPRESSION, RANKS, OUTPUT = (
    *("model and data", "length of the run", "optimizer", "compression"),
    *("ranks", "output"),
)


@dataclass(frozen=True)
class TrainConfig:
    """The options of one run. None means the workload's default, or not set."""

    dnn: str = option("lstman4", one_of(WORKLOADS), MODEL, f"network: {', '.join(WORKLOADS)}")
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
        None,
        one_of(SCHEDULES),
        OPTIMIZER,
        f"learning rate schedule: {', '.join(SCHEDULES)} (default: the network's own)",
    )
    momentum: float | None = option(None, number(least=0, up_to=1), OPTIMIZER, "SGD momentum")
    weight_decay: float | None = option(None, number(least=0), OPTIMIZER, "weight decay")
    clip: float | None = option(None, number(above=0), OPTIMIZER, "clip the averaged gradient to this norm")
    norm_clip: float | None = option(
        None, number(above=0), OPTIMIZER, "clip each rank's gradient to this norm before compression"
    )
    max_skipped: int = option(25, integer(1), OPTIMIZER, "fail after this many non-finite steps in a row")

    compression: bool = option(True, switch, COMPRESSION, "False trains dense, whatever --compressor says")
    compressor: str = option("oktopk", one_of(ALGORITHMS), COMPRESSION, f"algorithm: {', '.join(ALGORITHMS)}")
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
        one_of(WARMUP_VALUES),
        COMPRESSION,
        f"sum the dense steps of the warm-up in this format: {', '.join(WARMUP_VALUES)}",
    )
    momentum_correction: bool = option(
        False,
        switch,
        COMPRESSION,
        "apply momentum before compression instead of after averaging",
    )
    ramp_steps: int = option(
        0, integer(0), COMPRESSION, "sparse steps over which the density falls from 25 %% to --density"
    )
    tau: int | None = option(
        None, integer(1), COMPRESSION, "steps between rebalancing of regions (oktopk; default: 64)"
    )
    tau_prime: int | None = option(
        None, integer(1), COMPRESSION, "steps between exact threshold evaluations (oktopk; default: 32)"
    )
    values: str = option(
        "fp32", one_of(tuple(VALUE_CODES)), COMPRESSION, f"values on the wire: {', '.join(VALUE_CODES)}"
    )
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
    *("nworkers", "nwpernode", "ranks", "ranks_per_host", "timeout", "out", "save_every", "keep"),
)
"""Options that a resumed run may change at will: its length, its output, and its ranks. All others decide what is
computed.
"""


def parse(name: str, value: Any, origin: str) -> Any:
    """Parse the value of an option; values from the command line and the environment are text."""
    wanted = OPTIONS[name].metadata["parse"]
    try:
        if value is None:
            return None
        if isinstance(value, (list, dict)):
            raise ValueError("a single value")
        return wanted(value)
    except (ValueError, TypeError, OverflowError) as error:
        reason = str(error)
        expected = reason if reason.startswith(("a ", "one of", "True")) else f"of type {wanted.__name__}"
        raise ConfigError(f"{name} must be {expected}, got {_shorten(value)} ({origin})") from error


def _shorten(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # a number with thousands of digits
        return "something too long to show"
