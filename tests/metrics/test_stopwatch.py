"""Stages: their spans, and that torch.profiler sees them in the worker's thread."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig

from oktopk.metrics.traffic import Stopwatch


def test_spans_are_noted_in_the_order_they_end():
    watch = Stopwatch()
    with watch.stage("outer"), watch.stage("inner"):
        pass
    assert [span.name for span in watch.spans] == ["inner", "outer"]
    inner, outer = watch.spans
    assert outer.start <= inner.start <= inner.stop <= outer.stop
    assert watch.seconds("inner") == inner.stop - inner.start
    assert watch.seconds("unknown") == 0


def test_a_stage_that_raises_is_noted_too():
    watch = Stopwatch()
    with pytest.raises(KeyError), watch.stage("select"):
        raise KeyError
    assert [span.name for span in watch.spans] == ["select"]


def test_the_profiler_sees_stages_of_another_thread():
    watch = Stopwatch()

    def work() -> None:
        with watch.stage("select"):
            torch.ones(3)

    config = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=config) as profile:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "oktopk.select" in {event.key for event in profile.key_averages()}
