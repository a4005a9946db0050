"""What one engine tells people, and what it remembers to tell it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ...algorithms import Dense
from ...metrics.events import DENSE, SPARSE, MetricsSink, StepEvent
from ...metrics.sinks import Sink, as_sink
from ...wire.codecs import describe_values
from ..autotune import Autotune, Schedule
from ..settings import Settings
from .sentences import Decision, ending_sentence, plan_sentence, show_bytes, show_ms
from .speaking import say

_log = logging.getLogger(__name__)


class Voice:
    """Speaks on rank 0, each line once; remembers on every rank.

    Args:
        settings: how gradients are averaged.
        autotune: what decides about dense and sparse.
        rank: the number of this rank.
        world: the number of ranks.
    """

    def __init__(self, settings: Settings, autotune: Autotune, rank: int, world: int) -> None:
        self._settings, self._autotune, self._rank, self._world = settings, autotune, rank, world
        self._schedule = Schedule.of(settings)
        self._parameters = 0
        self._planned = False
        self.failed = False
        """Whether the run ends with an error, which says enough."""
        self._last: StepEvent | None = None
        self._steps = {DENSE: 0, SPARSE: 0}
        """Of this process."""
        self._sent = {DENSE: 0, SPARSE: 0}
        """Bytes that this rank sent in its last step of each kind."""
        self._was_dense: bool | None = None
        self.decision: Decision | None = None
        """The last one."""
        self._went_sparse = False

    def plan(self, parameters: int) -> None:
        """Say what is going to happen, when the number of parameters is known."""
        self._parameters = parameters
        if not self._planned:
            self._planned = True
            self._say(plan_sentence(self._settings, parameters, self._world))

    def record(self, event: StepEvent) -> None:
        """A step has ended."""
        if not self._planned:  # of a hook that was registered by torch's own function
            self.plan(event.volume.size)
        self._parameters, self._last = event.volume.size, event
        self._steps[event.phase] += 1
        tests, step = self._autotune.tests, event.step
        stays = not tests or (self._autotune.has_decided(step) and not self._autotune.is_trial(step))
        self._went_sparse |= event.phase == SPARSE and stays
        if not event.skipped:
            self._sent[event.phase] = event.wire.sent_bytes

    def decide(self, step: int) -> Decision:
        """The ranks have decided at the end of this step."""
        autotune = self._autotune
        dense, (dense_seconds, sparse_seconds) = autotune.prefers_dense, autotune.agreed
        changed, self._was_dense = dense is not self._was_dense, dense
        self._went_sparse |= not dense
        self.decision = Decision(
            step + 1, dense, changed, dense_seconds, sparse_seconds, self._sent[DENSE], self._sent[SPARSE],
            autotune.next_test(step + 1),
        )  # fmt: skip
        if changed:
            self._say(self.decision.sentence())
        elif self._rank == 0:
            _log.info("%s", self.decision.sentence())
        return self.decision

    def end(self) -> None:
        """The run has ended: say why, if it never went sparse."""
        last, dense = self._last, self._steps[DENSE]
        if last is None or self._went_sparse or self.failed or isinstance(self._settings.algorithm, Dense):
            return
        reached, warmup = last.step + 1, self._schedule.warmup_steps
        measured = self._measured() if self._autotune.has_decided(reached) else None
        self._say(ending_sentence(dense, self._steps[SPARSE], warmup - reached, warmup, measured))

    def _measured(self) -> str:
        """What the last comparison found, also one before the run was resumed."""
        dense, sparse = self._autotune.agreed
        return f"{show_ms(dense)} per step (from its first bucket on) instead of {show_ms(sparse)} sparse"

    def _say(self, sentence: str) -> None:
        if self._rank == 0:
            say(sentence)

    def facts(self) -> dict[str, Any]:
        """What readers of a metrics file need to know of the run."""
        settings, density = self._settings, self._settings.density
        return {
            "world": self._world,
            "rank": self._rank,
            "algorithm": settings.algorithm.name,
            "density": density if isinstance(density, (float, int, str)) else "schedule",
            "parameters": self._parameters,
            "values": describe_values(settings.values),
            "dense_steps": self._schedule.warmup_steps,
            "auto": settings.auto,
            "sentence": plan_sentence(settings, self._parameters, self._world).removeprefix("oktopk: "),
        }

    def figures(self) -> dict[str, float]:
        """The last step and the last decision in figures."""
        last, autotune, figures = self._last, self._autotune, {}
        if last is not None:
            figures = {
                "sparse": float(last.phase == SPARSE),
                "target_density": last.target_density,
                "local_density": last.local_density,
                "global_density": last.global_density,
                "compression_ratio": last.volume.ratio,
                "payload_bytes": float(last.volume.payload_bytes),
                "sent_bytes": float(last.wire.sent_bytes),
                "received_bytes": float(last.wire.received_bytes),
                "residual_norm": last.residual_norm,
                "reduce_seconds": last.seconds.total,
                "exposed_seconds": last.exposed,
                "hidden_share": last.hidden_share,
            }
        if self._settings.auto:
            figures["prefers_dense"] = float(autotune.prefers_dense)
            figures["dense_step_seconds"], figures["sparse_step_seconds"] = autotune.agreed
        if autotune.budget is not None:
            figures |= autotune.budget.figures()
        return figures

    def summary(self, step: int) -> str:
        """The present state in words; `step` is the next one."""
        last = self._last
        if last is None:
            return f"No step so far. Plan: {self.facts()['sentence']}." if self._parameters else "No step so far."
        mode = "dense" if last.phase == DENSE else f"sparse at {100 * last.target_density:.3g} %"
        parts = [f"{step} steps; the last one was {mode}: {self._reason(last, step)}.", self._bytes()]
        if self._autotune.has_decided(step):
            dense, sparse = self._autotune.agreed
            times = f"{show_ms(sparse)} (from the first bucket on), dense ones {show_ms(dense)}"
            ratio = f": {dense / sparse:.3g} times as fast" if dense and sparse else ""
            parts.append(f"When they were last compared, sparse steps took {times}{ratio}.")
        if self._autotune.tests and not self._autotune.is_trial(step):
            parts.append(f"The next comparison begins at step {self._autotune.next_test(step)}.")
        return " ".join(part for part in parts if part)

    def _bytes(self) -> str:
        sparse, dense = self._sent[SPARSE], self._sent[DENSE]
        if sparse and dense:
            both = f"{show_bytes(sparse)} in a sparse step and {show_bytes(dense)} in a dense one"
            return f"A rank sends {both}: {dense / sparse:.3g} times less."
        known = next(((phase, sent) for phase, sent in self._sent.items() if sent), None)
        return f"A rank sends {show_bytes(known[1])} in a {known[0]} step." if known else ""

    def _reason(self, last: StepEvent, step: int) -> str:
        settings, autotune = self._settings, self._autotune
        if isinstance(settings.algorithm, Dense):
            return "algorithm='dense'"
        if autotune.warms_up(last.step):
            return f"the warm-up takes {self._schedule.warmup_steps} steps"
        if isinstance(settings.density, tuple):
            return "as the given schedule says"
        if not autotune.tests:
            return "as asked for (auto=False)"
        if autotune.is_trial(last.step):
            return "it is compared with the other way"
        return "the faster way, as far as is known" if autotune.has_decided(step) else "both ways will be compared"


class StepSinks:
    """Where every step goes, with what readers of a file need to know of the run from the voice."""

    def __init__(self, voice: Voice, sinks: Iterable[MetricsSink]) -> None:
        self._voice = voice
        self._sinks = [*map(as_sink, sinks)]
        self._introduced: list[Sink] = []
        """Those that know what run this is."""

    def add(self, sink: MetricsSink) -> None:
        self._sinks.append(as_sink(sink))

    def record(self, event: StepEvent, decided: bool) -> None:
        """A step has ended, after which ranks may have `decided` between dense and sparse."""
        self._voice.record(event)
        decision = self._voice.decide(event.step) if decided else None
        for sink in self._sinks:
            if sink not in self._introduced:
                self._introduced.append(sink)
                sink.note("run", event.step, self._voice.facts())
            sink.emit(event)
            if decision is not None:
                sink.note("decision", event.step, decision.facts())

    def close(self, step: int) -> None:
        """Close them; they are told after how many steps the run has ended, unless that was an error."""
        for sink in self._sinks:
            if not self._voice.failed:
                sink.note("end", step, {})
            sink.close()
