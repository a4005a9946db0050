"""docs/understanding.md: its example is what the code computes, and its arithmetic is right."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def drawn() -> Any:
    """The script that draws the pictures, as a module."""
    spec = importlib.util.spec_from_file_location("understanding", ROOT / "docs/pictures/understanding.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join((ROOT / "docs/understanding.md").read_text().split())


def test_the_example_is_what_the_code_computes(drawn: Any) -> None:
    """`example` itself asserts that stages lead to the outcome, and that no mass is lost."""
    assert drawn.text(drawn.example()) in (ROOT / "docs/understanding.md").read_text()


def test_the_prose_has_the_numbers_of_the_example(drawn: Any, page: str) -> None:
    ranks = drawn.example()
    local = [round(rank.threshold, 6) for rank in ranks]
    assert f"({local[0]} on rank 0, {local[1]} on rank 1, {local[2]} on rank 2)" in page
    assert f"the global threshold is {ranks[0].global_threshold:.1f}" in page
    proposals = [sorted(rank.selected) for rank in ranks]
    first, second = ([selected[cut] for selected in proposals] for cut in (1, 2))
    assert f"{str(first)[1:-1]} and {str(second)[1:-1]} as edges" in page
    assert f"are {ranks[0].edges[1]} and {ranks[0].edges[2]}." in page
    means = [f"{x:.1f}".replace("-", "−") for x in ranks[0].mean if x]
    where = [i for i, x in enumerate(ranks[0].mean) if x]
    assert f"the mean is {means[0]}, {means[1]} and {means[2]}" in page
    assert f"at the indices {where[0]}, {where[1]} and {where[2]}" in page
    largest = max(ranks[1].selected, key=lambda i: abs(ranks[1].selected[i]))
    assert f"−{abs(ranks[1].selected[largest]):.1f} at index {largest}, does not survive" in page
    assert largest not in ranks[2].survivors
    assert f"{ranks[1].residual[5]:.1f} of rank 1 at index 5" in page


def test_the_columns_that_are_explained_exist(page: str) -> None:
    from oktopk.metrics.sinks.flat import REDUCTION_COLUMNS, STEP_COLUMNS

    known = {*STEP_COLUMNS, *REDUCTION_COLUMNS}
    for name in (
        *("payload_bytes", "compression_ratio", "sparsity", "sent_bytes", "received_bytes", "control_bytes"),
        *("modelled_bytes", "wait_seconds", "exposed_seconds", "hidden_share", "busy_seconds", "residual_norm"),
        *("threshold", "global_threshold", "target_density", "local_density", "global_density", "slowest_rank"),
        *("skipped", "exact"),
    ):
        assert name in known
        assert f"`{name}`" in page


def test_ratios_and_shares_are_divided_rightly(page: str) -> None:
    benchmarks = (ROOT / "docs/benchmarks.md").read_text()
    for sent, ratio in (("1.078", 82), ("0.637", 139), ("2.283", 39)):
        assert sent in benchmarks
        assert 88.2 / float(sent) == pytest.approx(ratio, rel=0.01)
        assert f"{sent} MB | {ratio} |" in page
    assert "| oktopk:fp16 | 191 | 8.31 | 30.3 | 87.1 | 0.1299 | 42.8 |" in benchmarks  # at 100 Mbit/s
    assert "| oktopk:fp16 | 187 | 1.39 | 26.1 | 86.1 | 0.1299 | 45.6 |" in benchmarks  # at 1 Gbit/s
    words = " ".join(page.split())
    by_division = 1e3 * 8 * 0.1299e6 / 100e6
    assert f"Division says {by_division:.0f} ms, {100 * by_division / 191:.0f} % of the step" in words
    assert f"which is {100 * 42.8 / 191:.0f} %" in words
    assert f"division says {100 * by_division / 10 / 187:.1f} %, and it was {100 * 45.6 / 187:.0f} %" in words


def test_the_pictures_can_be_drawn(drawn: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = [path.name for path in drawn.draw(tmp_path)]
    assert names == sorted(path.name for path in (ROOT / "docs/pictures").glob("understanding-*.png"))
