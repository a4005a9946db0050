"""The tables of docs/when.md: gains are ratios of whole steps, and the page has the commands that gave them."""

from __future__ import annotations

import shlex
from pathlib import Path

from benchmarks import when


def answers(dense: float, sparse: float) -> dict[str, object]:
    rows = [
        {"ranks": ranks, "algorithm": name, "seconds": seconds}
        for ranks in when.RANKS
        for name, seconds in (("dense", dense), ("oktopk", sparse))
    ]
    return {f"{link}, {params}": {"whole_steps": rows} for link in when.LINKS for params in when.MODELS}


def test_a_gain_is_dense_over_sparse_and_bold_if_it_is_one(tmp_path: Path) -> None:
    page = tmp_path / "when.md"
    page.write_text(f"before\n{when.BEGIN}\nold\n{when.END}\nafter\n")
    when.write_page(page, answers(3.0, 0.25))
    assert page.read_text().count("| **12 times** (3,000 ms → 250 ms) ") == 27
    when.write_page(page, answers(0.2, 0.25))
    text = page.read_text()
    assert text.count("| 0.80 times (200 ms → 250 ms) ") == 27
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text


def test_the_page_has_the_commands_of_its_tables() -> None:
    page = when.PAGE.read_text(encoding="utf-8")
    for link in when.LINKS:
        for params in when.MODELS:
            assert shlex.join(when.command(link, params)) in page
