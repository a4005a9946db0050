"""The plan of a run: steps, warm-up and expected bytes, known before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from oktopk.algorithms.volume import WORD_BYTES, oktopk_words, ring_words
from oktopk.engine.autotune import RAMP_FROM, Schedule, plan_warmup
from oktopk.engine.settings import LEAST_DENSITY, MOST_DENSITY
from oktopk.metrics.events import ENTRY_BYTES

from .options import TrainConfig, read_density

_ONE_RANK = (
    "one rank: there is nothing to exchange and nothing to compress; sparse steps only delay gradient. Start "
    "several ranks (--ranks N, torchrun, mpirun), or pass --compressor dense"
)


@dataclass(frozen=True)
class Plan:
    """What a run will do. Steps and epochs count from 0. `density` is that of the options, also "auto"."""

    steps_per_epoch: int
    max_epochs: int
    max_steps: int | None
    warmup_steps: int
    algorithm: str
    density: float | str
    parameters: int
    world: int
    ramp_steps: int = 0
    ranks_per_host: int = 1
    budget: float = 0.1
    min_density: float = LEAST_DENSITY
    warmup_values: str = "fp32"
    shard: int = 1

    @classmethod
    def of(cls, config: TrainConfig, steps_per_epoch: int, parameters: int, world: int) -> Plan:
        """The plan of a run with these options; --warmup-steps auto becomes a number, by the length of the run."""
        assert config.max_epochs is not None
        known = (
            *("max_epochs", "max_steps", "algorithm", "density", "ranks_per_host", "budget"),
            *("min_density", "warmup_values", "shard"),
        )
        plan = cls(
            steps_per_epoch=steps_per_epoch,
            parameters=parameters,
            world=world,
            warmup_steps=config.warmup_steps if isinstance(config.warmup_steps, int) else 0,
            **{name: getattr(config, name) for name in known},
            ramp_steps=config.ramp_steps or 0,
        )
        if isinstance(config.warmup_steps, int):
            return plan
        warmup_steps, ramp_steps = plan_warmup(plan.steps)
        return replace(
            plan,
            warmup_steps=warmup_steps,
            ramp_steps=ramp_steps if config.ramp_steps is None else config.ramp_steps,
        )

    @property
    def steps(self) -> int:
        every = self.steps_per_epoch * self.max_epochs
        return every if self.max_steps is None else min(every, self.max_steps)

    @property
    def epochs(self) -> int:
        """Epochs that the run starts; max_steps may cut the last one short."""
        return -(-self.steps // self.steps_per_epoch)

    @property
    def dense_steps(self) -> int:
        """How many of the run's steps are dense: all of them for the algorithm `dense`, else the warm-up."""
        return self.steps - len(self._sparse)

    @property
    def _sparse(self) -> Sequence[int]:
        """The steps that are sparse; with --density auto or --auto, those that may be."""
        if self.algorithm == "dense":
            return ()
        known = read_density(self.density)
        density = self.min_density if isinstance(known, str) else known
        return Schedule(density, self.warmup_steps, self.ramp_steps).sparse_steps(self.steps)

    @property
    def sparse_steps(self) -> int:
        return len(self._sparse)

    @property
    def first_sparse_epoch(self) -> int | None:
        return self._sparse[0] // self.steps_per_epoch if self._sparse else None

    @property
    def densities(self) -> tuple[float, float]:
        """The smallest and the largest density of sparse steps behind the ramp."""
        known = read_density(self.density)
        if isinstance(known, str):
            return self.min_density, MOST_DENSITY
        found = [density for _, density in known if density] if isinstance(known, tuple) else [known]
        return min(found, default=1.0), max(found, default=1.0)

    @property
    def ramps(self) -> bool:
        """Whether the density falls from 25 % at first; a schedule has its own densities."""
        return self.ramp_steps > 0 and self.densities[0] < RAMP_FROM and ":" not in str(self.density)

    @property
    def asked(self) -> str:
        """The density that was asked for, in words."""
        if isinstance(self.density, float | int):
            return f"density {self.density:g}"
        low, high = self.densities
        if isinstance(read_density(self.density), str):
            return f"a density of {low:g} to {high:g} by measurement (budget: {100 * self.budget:g} % of a step)"
        return f"the densities of a schedule, {low:g} to {high:g}"

    @property
    def never_sparse(self) -> bool:
        """Whether the run asks for compression but ends before the sparse phase."""
        return self.algorithm != "dense" and self.sparse_steps == 0

    def sentence(self) -> str:
        """Summarise the plan in one line.

        >>> Plan(14, 10, None, 128, "oktopk", 0.01, 27_569_568, world=8).sentence()
        '140 steps: 128 dense warm-up, 12 sparse; sparse starts in epoch 9'
        """
        if self.algorithm == "dense":
            return f"{self.steps} steps, all dense"
        if self.never_sparse:
            return f"{self.steps} steps: all dense warm-up, 0 sparse"
        begin = f"sparse starts in epoch {self.first_sparse_epoch}"
        return f"{self.steps} steps: {self.dense_steps} dense warm-up, {self.sparse_steps} sparse; {begin}"

    def row(self) -> dict[str, Any]:
        derived = {
            name: getattr(self, name) for name in ("steps", "dense_steps", "sparse_steps", "first_sparse_epoch")
        }
        texts = {"sentence": self.sentence(), "volume": self.volume(), "warning": self.warning()}
        return asdict(self) | derived | texts

    def warning(self) -> str | None:
        if not self.never_sparse:
            return None
        return (
            f"this run never reaches the sparse phase: it has {self.steps} steps, and the first "
            f"{self.warmup_steps} are dense; set --warmup-steps below {self.steps}, or train longer"
        )

    @property
    def _senders(self) -> int:
        return self.world // self.ranks_per_host // self.shard

    @property
    def _entries(self) -> int:
        """Of a gradient as a rank exchanges it: with shard, its own part of it."""
        return -(-self.parameters // self.shard)

    @property
    def dense_bytes(self) -> float:
        """Bytes that a rank sends in a dense step, by a ring; with ranks_per_host, one rank sends for its host."""
        return WORD_BYTES * ring_words(self._entries, self._senders)

    def volume(self) -> list[str]:
        """Describe the bytes of a dense and of a sparse step: the payload, and what a rank is expected to send.

        With ranks_per_host, one rank sends for its host.
        """
        least, most = self.densities
        k, senders, ring = max(1, round(least * self._entries)), self._senders, self.dense_bytes
        who = "rank" if self.ranks_per_host == 1 else "host"
        single = who if self.shard == 1 else "replica"
        sent = f"a {who} sends {ring:,.0f} (ring)" if senders > 1 else f"a single {single} sends nothing"
        lines = [f"a dense step: {WORD_BYTES * self._entries:,} bytes of gradient; {sent}"]
        if self.algorithm != "dense":
            bound = WORD_BYTES * oktopk_words(k, senders)
            bounded = self.algorithm == "oktopk" and senders > 1
            about = f"; a {who} sends less than {bound:,.0f} on average (6k words)" if bounded else ""
            payload = f"{ENTRY_BYTES * k:,} bytes for {k:,} entries"
            if self.warmup_values != "fp32" and senders > 1:
                lines[0] += f", half of that in {self.warmup_values} during the warm-up"
            lines.append(f"a sparse step at density {least:g}: {payload}{about}")
            if least < most:
                lines.append(f"sparse steps have {self.asked}")
            if self.ramps:
                lines.append(f"the density falls from {RAMP_FROM:g} over the first {self.ramp_steps} sparse steps")
            if self.world == 1:
                lines.append(_ONE_RANK)
        if self.shard > 1:
            lines.append(f"{self.world // self.shard} replicas, each sharded over {self.shard} ranks")
        return lines
