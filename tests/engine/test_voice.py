"""What people hear: the plan, each decision and a disappointing end, once, on rank 0, whatever logging does."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import oktopk
from oktopk.engine import autotune
from oktopk.engine.voice import speaking
from oktopk.metrics.sinks import JSONLSink
from oktopk.tools.report import build_report, read_run

SIZE = 20_000
PLAN = "a sparse step sends 1 % of 20,000 entries: 1.6 kB of indices and values instead of 80 kB; 2 ranks"


@contextmanager
def unconfigured_logging() -> Iterator[None]:
    """As in a script that never mentions logging; pytest's own handlers are there again afterwards."""
    loggers = [logging.getLogger(), logging.getLogger("oktopk")]
    kept = [(logger.handlers, logger.level) for logger in loggers]
    for logger, level in zip(loggers, (logging.WARNING, logging.NOTSET), strict=True):
        logger.handlers = []
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, (handlers, level) in zip(loggers, kept, strict=True):
            logger.handlers = handlers
            logger.setLevel(level)


@pytest.fixture
def sparse_is_faster(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which way is twice as fast, as all ranks measure it."""
    answer = [True]

    def typical(self: autotune.Autotune) -> tuple[float, float]:
        return (0.468, 0.234) if answer[0] else (0.234, 0.468)

    monkeypatch.setattr(autotune.Autotune, "typical", typical)
    monkeypatch.setattr(autotune, "RETEST_COST", 1.0)
    return answer


def train(steps: int, see: Callable[[oktopk.AllReducer], None] = lambda _: None, **options: Any) -> None:
    """Two ranks; rank 0 shows its reducer after each step."""
    settings: dict[str, Any] = {"density": 0.01, "warmup_steps": 4, "auto": True} | options
    sinks = settings.pop("sinks", ())

    def rank(comm: oktopk.Communicator) -> None:
        parameters = [("w", torch.zeros(SIZE, requires_grad=True))]
        mine = sinks if comm.rank == 0 else ()
        with oktopk.AllReducer(parameters, comm=comm, sinks=mine, **settings) as reducer:
            for _ in range(steps):
                reducer.sync({"w": torch.randn(SIZE)})
                if comm.rank == 0:
                    see(reducer)

    with unconfigured_logging():
        oktopk.run_threads(2, rank)


def test_both_decisions_and_the_way_back_are_said_alike(
    sparse_is_faster: list[bool], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The terminal, the summary and the report tell the same."""
    summaries: dict[int, str] = {}

    def see(reducer: oktopk.AllReducer) -> None:
        step, stats = reducer.step, reducer.stats()
        summaries[step] = told = reducer.summary()
        assert f"the last one was {'sparse at 1 %' if stats['sparse'] else 'dense'}" in told
        sparse_is_faster[0] = step < 200

    train(270, see, sinks=[JSONLSink(tmp_path / "metrics.jsonl")])
    plan, first, back, *rest = capsys.readouterr().err.splitlines()
    steps = "steps 0 to 3 dense (warm-up), steps 4 to 11 sparse on trial, then the faster way"
    assert plan == f"oktopk: {steps}; {PLAN}"
    assert first.startswith(
        "oktopk: sparse from step 12 on: 234 ms instead of 468 ms per step (from its first bucket"
    )
    assert "kB instead of 80 kB per rank; next test at step 260" in first
    assert back.startswith(
        "oktopk: dense from step 264 on: 234 ms instead of 468 ms per step (from its first bucket"
    )
    assert back.endswith("next test at step 516; auto=False forces sparse steps")
    assert not rest  # it went sparse, so that there is nothing to explain at the end
    assert "the warm-up takes 4 steps. A rank sends 80 kB in a dense step." in summaries[2]
    assert "it is compared with the other way" in summaries[6]
    assert (
        "sparse steps took 234 ms (from the first bucket on), dense ones 468 ms: 2 times as fast."
        in summaries[100]
    )
    assert "The next comparison begins at step 260." in summaries[100]
    assert "dense ones 234 ms: 0.5 times as fast. The next comparison begins at step 516." in summaries[270]
    ours = build_report([read_run(tmp_path, "own")])["runs"][0]
    answer = next(one["answer"] for one in ours["answers"] if one["question"] == "What did auto decide?")
    assert answer.startswith("From step 12 on it chose sparse: 234 ms instead of 468 ms per step")
    assert "From step 264 on it went back to dense: 234 ms instead of 468 ms" in answer
    assert [(one["step"], one["dense"]) for one in ours["decisions"]] == [(12, False), (264, True)]


@pytest.mark.parametrize(
    ("steps", "warmup", "why"),
    [
        (3, 5, "all 3 steps were dense: the warm-up takes 5. For so few, pass total_steps=3 alone"),
        (7, 5, "5 steps were dense; the run ended after 2 sparse ones, before both were compared"),
        (20, 5, "12 of 20 steps were dense, because that was faster: 234 ms per step (from its"),
    ],
)
@pytest.mark.parametrize("ramp", [0, 3])
def test_a_run_that_never_went_sparse_says_why(
    steps: int, warmup: int, why: str, ramp: int, sparse_is_faster: list[bool],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sparse_is_faster[0] = False
    train(steps + (ramp if steps == 20 else 0), warmup_steps=warmup, ramp_steps=ramp)
    why = why.replace("of 20", f"of {20 + ramp}")
    lines = capsys.readouterr().err.splitlines()
    assert why in lines[-1]
    assert len(lines) == (3 if steps == 20 else 2)


def test_a_run_that_goes_on_knows_what_was_decided(
    sparse_is_faster: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes no more steps than the warm-up has, but that is long over."""
    state: dict[str, Any] = {}
    parameters = [("w", torch.zeros(SIZE, requires_grad=True))]
    for faster in (False, True):
        sparse_is_faster[0] = faster
        with oktopk.AllReducer(parameters, warmup_steps=5, auto=True) as reducer:
            for _ in range(20):
                reducer.sync({"w": torch.randn(SIZE)})
            state = reducer.state_dict()
        capsys.readouterr()
        with unconfigured_logging(), oktopk.AllReducer(parameters, warmup_steps=5, auto=True) as reducer:
            reducer.load_state_dict(state)
            reducer.sync({"w": torch.randn(SIZE)})
            assert ("sparse at 1 %" if faster else "dense") + ": the faster way" in reducer.summary()
        _, *ending = capsys.readouterr().err.splitlines()
        assert [line.split(":")[1] for line in ending] == (
            [] if faster else [" 1 of 1 steps were dense, because that was faster"]
        )


def test_a_run_as_asked_for_needs_no_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    train(6, auto=False)
    train(2, algorithm="dense")
    assert capsys.readouterr().err.splitlines() == [
        f"oktopk: steps 0 to 3 dense (warm-up), then sparse; {PLAN}",
        "oktopk: all steps dense (algorithm='dense'): 80 kB of gradient; 2 ranks",
    ]


def test_who_configures_logging_gets_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Also later, and not below the level that was asked for."""
    root, stream = logging.getLogger(), io.StringIO()
    with unconfigured_logging():
        speaking.say("before")
        root.addHandler(logging.StreamHandler(stream))  # as logging.basicConfig() does
        speaking.say("below the level")
        root.setLevel(logging.INFO)
        speaking.say("after")
        root.handlers.clear()
        logging.getLogger("oktopk").setLevel(logging.WARNING)
        speaking.say("silenced")
    assert capsys.readouterr().err == "before\n"
    assert stream.getvalue() == "after\n"


def test_kernels_compile_in_the_first_step_and_it_is_said_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []
    monkeypatch.setattr(speaking, "_compiled", set())
    monkeypatch.setattr(speaking, "must_compile", lambda: True)
    compiled = speaking.compile_kernels

    def compile_kernels(*which: Any) -> None:
        order.append(capsys.readouterr().err.splitlines()[-1])
        compiled(*which)

    monkeypatch.setattr(speaking, "compile_kernels", compile_kernels)
    with unconfigured_logging(), oktopk.AllReducer([("w", torch.zeros(9, requires_grad=True))]) as reducer:
        for _ in range(2):
            reducer.sync({"w": torch.ones(9)})
            order.append(f"step {reducer.step}")
    assert order == ["oktopk: compiling kernels (once per installation, about 10 s)", "step 1", "step 2"]


def test_a_loop_of_ones_own_records_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    with pytest.raises(oktopk.OkTopkError, match=r"call it after optimizer.step\(\)"):
        sink.record_loss(1.0)

    def see(reducer: oktopk.AllReducer) -> None:
        sink.record_loss(torch.tensor(float(reducer.step)), lr=0.1)
        if reducer.step == 2:
            sink.record_loss(float("nan"))  # again: the later line counts
            sink.record_validation(epoch=0, accuracy=0.5)

    train(3, see, auto=False, sinks=[sink])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["event"] for row in rows if row["event"] not in ("reduction", "step")] == [
        "run", "train", "train", "train", "validation", "train", "end",
    ]  # fmt: skip
    ours = read_run(tmp_path, "own")
    assert [step.train.get("loss") for step in ours.steps] == [1.0, None, 3.0]
    assert [step.train.get("step_seconds", 0) > 0 for step in ours.steps] == [False, True, True]
    assert [(one.step, one.epoch, one.figures) for one in ours.validations] == [(2, 0, {"accuracy": 0.5})]
    assert (ours.world, ours.algorithm, ours.lookup("parameters")) == (2, "oktopk", SIZE)
    assert build_report([ours])["runs"][0]["about"]["finished"]
