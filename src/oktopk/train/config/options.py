"""What a run can be told: every option once, with its meaning, from the command line to the file of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from oktopk.algorithms import ALGORITHMS
from oktopk.engine.settings import Settings
from oktopk.errors import OkTopkError
from oktopk.wire.message import VALUE_CODES

from ..tasks import WORKLOADS, Workload

ON, OFF = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class ConfigError(OkTopkError, ValueError):
    """An option that cannot be used."""


def whole(least: int, up_to: float = inf) -> Callable[[Any], int]:
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


def switch(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in ON + OFF:
        raise ValueError("True or False")
    return text in ON


def place(value: Any) -> Path:
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a path without a zero byte")
    return Path(value)


place.__name__ = "Path"


def one_of(names: Mapping[str, object] | tuple[str, ...]) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if str(value).lower() not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return str(value).lower()

    parse.__name__ = "str"
    return parse


def option(default: Any, parse: Callable[[Any], Any], topic: str, meaning: str) -> Any:
    return field(default=default, metadata={"parse": parse, "topic": topic, "meaning": meaning})


WHAT, LONG, LEARN, SEND, RANKS, FILES = (
    *("what to train", "how long", "how to learn", "what to send"),
    *("ranks", "files and screen"),
)


@dataclass(frozen=True)
class TrainConfig:
    """One run. None means: as the workload has it, or not at all."""

    dnn: str = option("lstman4", one_of(WORKLOADS), WHAT, f"the network: {', '.join(WORKLOADS)}")
    dataset: str | None = option(None, str, WHAT, "its data; there is one for each network, so it may be left out")
    data_dir: Path | None = option(None, place, WHAT, "the folder of the data; without it, data is generated")
    pretrain: Path | None = option(
        None, place, WHAT, "start from these weights: a run's folder or a file of weights"
    )
    min_seconds: float = option(0.0, number(least=0), WHAT, "leave out shorter training utterances (an4)")
    augment: bool = option(
        True, switch, WHAT, "change training samples at random: tempo and gain, crops and flips"
    )

    max_epochs: int | None = option(None, whole(1), LONG, "epochs to train")
    max_steps: int | None = option(None, whole(1), LONG, "end after this many steps, even within an epoch")
    val_every: int = option(5, whole(1), LONG, "validate after epochs 0, 4, 9, …; the last one always")
    pseudo_accuracy: bool = option(False, switch, LONG, "beside WER, show max(0, 1 - WER)")
    seed: int = option(0, whole(0, 2**32 - 1), LONG, "the same seed gives the same run")

    batch_size: int | None = option(None, whole(1), LEARN, "samples of a rank in one forward pass")
    nsteps_update: int = option(1, whole(1), LEARN, "backward passes whose gradients make one step")
    lr: float = option(0.01, number(above=0), LEARN, "learning rate that the schedule starts from")
    momentum: float | None = option(None, number(least=0, up_to=1), LEARN, "momentum of SGD")
    weight_decay: float | None = option(None, number(least=0), LEARN, "weight decay")
    clip: float | None = option(None, number(above=0), LEARN, "largest norm of the gradient, after averaging")
    norm_clip: float | None = option(None, number(above=0), LEARN, "largest norm of a rank's, before compression")
    max_skipped: int = option(25, whole(1), LEARN, "so many non-finite steps in a row are an error")

    compression: bool = option(True, switch, SEND, "False: dense, whatever --compressor says")
    compressor: str = option("oktopk", one_of(ALGORITHMS), SEND, f"the algorithm: {', '.join(ALGORITHMS)}")
    density: float = option(0.01, number(above=0, up_to=1), SEND, "share of the gradient that a rank sends")
    warmup_steps: int = option(128, whole(0), SEND, "dense steps before the sparse ones")
    momentum_correction: bool = option(
        False,
        switch,
        SEND,
        "momentum is put on before compression, not after averaging",
    )
    ramp_steps: int = option(0, whole(0), SEND, "sparse steps that come down from a density of 25 %%")
    tau: int | None = option(None, whole(1), SEND, "steps between new regions (oktopk)")
    tau_prime: int | None = option(None, whole(1), SEND, "steps between exact thresholds (oktopk)")
    values: str = option("fp32", one_of(tuple(VALUE_CODES)), SEND, f"values on the wire: {', '.join(VALUE_CODES)}")
    join: int = option(
        Settings.join, whole(0), SEND, "buckets share messages until so many entries are selected; 0: each alone"
    )
    auto: bool = option(False, switch, SEND, "let a bucket go dense where the clock says that this is faster")
    ranks_per_host: int = option(
        1, whole(1), SEND, "ranks of a host that average in its memory, so that one of them exchanges for all"
    )
    sigma_scale: float | None = option(None, number(above=0), SEND, "has no effect, and had none in the original")

    nworkers: int | None = option(None, whole(1), RANKS, "how many ranks there must be; anything else is an error")
    nwpernode: int | None = option(
        None, whole(1), RANKS, "ranks of a host, for the choice of a GPU where MPI is mute"
    )
    ranks: int | None = option(None, whole(1), RANKS, "start that many ranks on this machine")
    timeout: float = option(
        300.0, number(above=0, up_to=1e6), RANKS, "seconds to wait for another rank before giving up"
    )

    out: Path | None = option(None, place, FILES, "the run's folder (default: a new one in runs/)")
    save_every: int = option(0, whole(0), FILES, "steps between checkpoints; 0: at the end of every epoch only")
    keep: int = option(3, whole(1), FILES, "so many checkpoints are kept, the newest")

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.dnn]

    @property
    def momentum_after(self) -> float:
        """Of the optimizer; with momentum correction the reducer has it."""
        return 0.0 if self.momentum_correction else self.momentum or 0.0

    @property
    def algorithm(self) -> str:
        return self.compressor if self.compression else "dense"


OPTIONS: dict[str, Field[Any]] = {item.name: item for item in fields(TrainConfig)}
FROM_WORKLOAD = ("dataset", "batch_size", "max_epochs", "momentum", "weight_decay", "clip")
"""What a workload decides when nobody else does."""


def parse(name: str, value: Any, origin: str) -> Any:
    """A value as the option has it; from the command line and the environment it comes as text."""
    wanted = OPTIONS[name].metadata["parse"]
    try:
        if value is None:
            return None
        if isinstance(value, (list, dict)):
            raise ValueError("a single value")
        return wanted(value)
    except (ValueError, TypeError, OverflowError) as error:
        reason = str(error)
        said = reason if reason.startswith(("a ", "one of", "True")) else f"of type {wanted.__name__}"
        raise ConfigError(f"{name} must be {said}, got {_shown(value)} ({origin})") from error


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # of a number with thousands of digits
        return "something too long to show"
