"""What the user sees of a run: log lines, a progress bar, a table at the end. Only rank 0 shows them."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from oktopk.metrics.events import SPARSE, StepEvent

from .config.origins import ResolvedConfig
from .config.plan import Plan
from .metrics import EpochMetrics, PhaseMetrics, StepMetrics
from .tasks import Task

log = logging.getLogger(__name__)


class ProgressBar:
    """Progress over all steps, on a terminal only."""

    def __init__(self, done: int, to_go: int, shown: bool) -> None:
        # None: only on a terminal
        self._bar = tqdm(
            total=done + to_go, initial=done, unit="step", disable=None if shown else True, dynamic_ncols=True
        )

    def update(self, metrics: StepMetrics, event: StepEvent, epoch: PhaseMetrics) -> None:
        if self._bar.disable:
            return
        loss = epoch.total.mean_loss
        self._bar.set_description(f"epoch {metrics.epoch}", refresh=False)
        known = {} if loss is None else {"loss": f"{loss:.4g}"}
        density = f"{100 * event.local_density:.3g}%"
        self._bar.set_postfix(
            {**known, "density": density, "MB/step": f"{event.wire.sent_bytes / 1e6:.3g}"}, refresh=False
        )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class ProgressBarHandler(logging.Handler):
    """Prints log records above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
            tqdm.write(self.format(record), file=stream)
            stream.flush()
        except Exception:
            self.handleError(record)


def log_start(resolved: ResolvedConfig, launcher: str, task: Task[Any], plan: Plan) -> None:
    config = resolved.config
    ranks = f"{plan.world} rank{'s' if plan.world > 1 else ''} ({launcher})"
    compression = "dense" if plan.algorithm == "dense" else f"{plan.algorithm} at {plan.asked}"
    log.info("training %s on %s, %s, %s", config.dnn, config.dataset, compression, ranks)
    log.info("data: %s%s", task.data, "; pass --data-dir for real data" if task.embedded else "")
    if task.problems:
        log.warning("%d samples cannot be used and are left out", len(task.problems))
    for line in resolved.lines():
        log.info("options from %s", line)
    log.info("plan: %s", plan.sentence())
    log.info("  %d steps per epoch, %s parameters", plan.steps_per_epoch, f"{plan.parameters:,}")
    for line in plan.volume():
        log.info("  %s", line)
    if warning := plan.warning():
        log.warning("%s", warning)


def log_transition(metrics: StepMetrics, plan: Plan, density: float) -> None:
    log.info(
        "step %d (epoch %d): the sparse phase starts, %s at %s%s",
        *(metrics.step, metrics.epoch, plan.algorithm, plan.asked),
        f"; it falls from {density:.3g} over {plan.ramp_steps} steps" if plan.ramps else "",
    )


def log_epoch(metrics: EpochMetrics, next_lr: float, plan: Plan) -> None:
    if not metrics.steps:
        log.debug("epoch %d has no steps to average", metrics.epoch)
        return
    loss = "no finite loss" if metrics.loss is None else f"loss {metrics.loss:.4f}"
    skipped = f", {metrics.skipped} of them skipped" if metrics.skipped else ""
    log.info(
        "epoch %d: %s, %d steps%s, %.1f samples/s, lr %.6g, then %.6g",
        *(metrics.epoch, loss, metrics.steps, skipped, metrics.samples_per_second, metrics.lr, next_lr),
    )
    gpu = f", {metrics.gpu_bytes / 1e9:.2f} GB on the GPU" if metrics.gpu_bytes else ""
    log.info(
        "  a step: %.0f ms, forward+backward %.0f ms, data %.1f ms, exposed communication %.1f ms; "
        "memory %.2f GB%s; slowest: rank %d (%.2f of the mean)",
        *(1e3 * s for s in (metrics.step_seconds, metrics.compute_seconds)),
        *(1e3 * s for s in (metrics.data_seconds, metrics.exposed_seconds)),
        *(metrics.memory_bytes / 1e9, gpu, metrics.slowest_rank, metrics.slowest_ratio),
    )
    for phase, means in metrics.phases.items():
        log.info("  %s", format_phase(phase, means, plan))


def format_phase(phase: str, means: Mapping[str, Any], plan: Plan) -> str:
    """Format the averages over the steps of a phase."""
    if phase == "dense":
        density = "density 1"
    else:
        density = (
            f"density {means['local_density']:.4g} (asked for {_asked(plan)}, target "
            f"{means['target_density']:.4g}, result {means['global_density']:.4g})"
        )
    share = _of_dense(means, plan)
    against = "" if share is None else f", {100 * share:.3g} % of a dense step's"
    return (
        f"{phase}: {means['steps']} steps, sparsity {means['sparsity']:.4f}, compression ratio "
        f"{means['compression_ratio']:.2f}, communication size {means['payload_bytes']:,.0f} bytes, {density}, "
        f"sent {means['sent_bytes'] / 1e6:.3f} MB per rank and step{against}"
    )


def _asked(plan: Plan) -> str:
    low, high = plan.densities
    return f"{low:g} to {high:g}" if low < high else f"{low:g}"


def _of_dense(means: Mapping[str, Any], plan: Plan) -> float | None:
    """Bytes that were sent, as a share of those of a dense step; None if that sends nothing."""
    return means["sent_bytes"] / plan.dense_bytes if plan.dense_bytes else None


def log_validation(epoch: int, figures: Mapping[str, float], shown: Sequence[str]) -> None:
    texts = {name: f"{value:.4f}" if math.isfinite(value) else "not finite" for name, value in figures.items()}
    values = ", ".join(f"{name} {text}" for name, text in texts.items())
    log.info("epoch %d: %s", epoch, values or "no validation data")
    for line in shown:
        log.info("  %s", line)


EXPLANATIONS = """\
exposed: the step waited for it after backward; hidden: it ran during backward and cost no time
compression ratio: n/k, of entries; of a dense step's bytes: what was sent, against a ring of fp32
target density: what the steps aimed at, which is above the one asked for while it still falls (--ramp-steps)
kernels are compiled before the first step, so that no time contains it"""


def format_summary(phases: Mapping[str, Mapping[str, Any]], plan: Plan) -> str:
    """Format the phases of a run side by side, and explain them."""
    rows = (
        ("steps", "steps", "{:.0f}", 1.0),
        ("skipped steps", "skipped", "{:.0f}", 1.0),
        ("mean loss", "loss", "{:.4f}", 1.0),
        ("step, ms", "step_seconds", "{:.1f}", 1e3),
        ("forward, ms", "forward_seconds", "{:.1f}", 1e3),
        ("backward, ms", "backward_seconds", "{:.1f}", 1e3),
        ("exposed communication, ms", "exposed_seconds", "{:.1f}", 1e3),
        ("hidden share of communication", "hidden_share", "{:.2f}", 1.0),
        ("sparsity", "sparsity", "{:.4f}", 1.0),
        ("compression ratio", "compression_ratio", "{:.2f}", 1.0),
        ("communication size, bytes", "payload_bytes", "{:,.0f}", 1.0),
        ("sent by rank 0, bytes", "sent_bytes", "{:,.0f}", 1.0),
        ("of a dense step's bytes, %", "of_dense", "{:.3g}", 100.0),
        ("density asked for", "asked_density", "{:.4g}", 1.0),
        ("target density", "target_density", "{:.4g}", 1.0),
        ("density sent", "local_density", "{:.4g}", 1.0),
        ("density of the result", "global_density", "{:.4g}", 1.0),
    )
    names = [phase for phase in ("dense", "sparse") if phase in phases]
    shown = {
        phase: {
            **phases[phase],
            "of_dense": _of_dense(phases[phase], plan),
            "asked_density": 1.0 if phase != SPARSE else None if isinstance(plan.density, str) else plan.density,
        }
        for phase in names
    }
    lines = [f"{'mean per step':<31}" + "".join(f"{phase:>15}" for phase in names)]
    for label, key, form, factor in rows:
        cells = [shown[phase][key] for phase in names]
        texts = ["–" if cell is None else form.format(factor * cell) for cell in cells]
        lines.append(f"{label:<31}" + "".join(f"{text:>15}" for text in texts))
    return "\n".join([*lines, EXPLANATIONS])
