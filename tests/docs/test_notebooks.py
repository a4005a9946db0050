"""The notebooks run from their first cell to their last, and are kept without outputs."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[str]:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["nbformat"], document["metadata"]["kernelspec"]["name"]) == (4, "python3")
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells), "clear the outputs"
    return ["".join(cell["source"]) for cell in cells]


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> Any:
    """pyplot, which draws to memory. A notebook may also turn the library's logging down: not for other tests."""
    log = logging.getLogger("oktopk")
    level = log.level
    monkeypatch.setenv("MPLBACKEND", "agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    yield pyplot
    pyplot.close("all")
    log.setLevel(level)


def run_cells(path: Path) -> dict[str, Any]:
    """Run all cells in one namespace, as a kernel does; returns it."""
    found: dict[str, Any] = {"__name__": "__main__"}
    for place, source in enumerate(code_cells(path)):
        exec(compile(ast.parse(source), f"{path.name}, code cell {place}", "exec"), found)
    return found


def test_one_step_sends_less_than_its_bound(plots: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_cells(ROOT / "examples" / "notebooks" / "one_step.ipynb")
    assert found["info"].payload.sent_bytes < 6 * found["k"] * found["words"]
    assert len(plots.get_fignums()) == 5
    assert "all_to_all, split" in capsys.readouterr().out

    # What its pictures are said to show.
    for rank, mask in zip(found["ranks"], found["selected"], strict=True):
        assert int(mask.sum()) == rank["info"].local_count
    assert max(found["per_region"](found["balanced"])) < max(found["per_region"](found["equal"])) / 1.5
    few, many = ((found["by_ranks"] == number) for number in (1, 3))
    assert found["survived"][few].float().mean() < found["survived"][many].float().mean() / 2
    assert found["behind"][-1] < found["behind"][0] / 4


def test_every_algorithm_is_compared_and_learns(plots: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_cells(ROOT / "examples" / "notebooks" / "compare_algorithms.ipynb")
    losses, sent = found["losses"], found["sent"]
    assert list(losses) == list(found["oktopk"].ALGORITHMS)
    for name, curve in losses.items():
        assert sum(curve[-10:]) < 0.6 * sum(curve[:10]), name
        if name != "dense":
            assert sum(sent[name]) < sum(sent["dense"]) / 2, name
            assert found["correct"][name] > found["correct"]["dense"] - 0.02, name
    assert len(plots.get_fignums()) == 3

    volume = found["scaling"]
    assert volume["topka"][-1] > 4 * volume["topka"][1]
    assert all(count < bound for count, bound in zip(volume["oktopk"], found["BOUND"], strict=True))
    assert volume["oktopk"][-1] == min(counts[-1] for counts in volume.values())
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in losses)


def test_every_notebook_is_run_by_a_test_and_listed() -> None:
    here, listed = (path.read_text(encoding="utf-8") for path in (Path(__file__), ROOT / "examples/README.md"))
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        assert f'"{path.name}"' in here
        assert f"(notebooks/{path.name})" in listed
