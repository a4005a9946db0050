"""What is to be measured: it fits in memory, and mistakes are named before anything is measured."""

from __future__ import annotations

import builtins
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import oktopk
from oktopk.algorithms import ALGORITHMS
from oktopk.cli import main
from oktopk.tools.bench.names import (
    AUTO_DENSE,
    LINK,
    REFERENCES,
    BenchError,
    add_link_limits,
    list_contenders,
    parse_contender,
    warmup_steps,
)
from oktopk.tools.bench.plan import Plan, free_memory, group_to_fit
from oktopk.utils.extras import install_command

GIB = 2.0**30
CONTENDERS = list_contenders()


@pytest.mark.parametrize("memory", [10 * GIB, 14 * GIB, 24 * GIB, 99 * GIB])
def test_all_take_part_and_the_references_in_every_group(memory: float) -> None:
    groups = group_to_fit(tuple(CONTENDERS), 25_557_032, 4, memory)
    assert {name for group in groups for name in group} == set(CONTENDERS)
    others = [name for group in groups for name in group if name not in REFERENCES]
    assert len(others) == len(set(others))
    assert all(group[: len(REFERENCES)] == REFERENCES for group in groups)


def test_more_memory_makes_fewer_groups() -> None:
    counts = [len(group_to_fit(tuple(CONTENDERS), 25_557_032, 4, memory * GIB)) for memory in (10, 14, 24)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 1
    assert group_to_fit(tuple(CONTENDERS), 10**12, 4, None) == (tuple(CONTENDERS),)


def test_references_alone_are_one_group() -> None:
    assert group_to_fit(REFERENCES, 1000, 2, GIB * 8) == (REFERENCES,)


@pytest.mark.parametrize("memory", [10 * GIB, 14 * GIB])
def test_a_link_limit_stands_right_behind_the_one_whose_bytes_it_sends(memory: float) -> None:
    groups = group_to_fit(add_link_limits(CONTENDERS), 25_557_032, 4, memory)
    assert len(groups) > 1
    pairs = [pair for group in groups for pair in itertools.pairwise(group)]
    limited = [(whose, limit) for whose, limit in pairs if limit.startswith(LINK)]
    assert limited == [(name, f"{LINK}:{name}") for name in ALGORITHMS if name != "dense"]


def test_auto_has_decided_by_the_end_of_its_warm_up() -> None:
    def rank(comm: oktopk.Communicator) -> list[float]:
        with oktopk.AllReducer(
            {"x": torch.ones(3000, requires_grad=True)}.items(), comm=comm, warmup_steps=AUTO_DENSE, auto=True
        ) as reducer:
            compared = []
            for _ in range(warmup_steps("oktopk:auto")):
                reducer.sync({"x": torch.randn(3000)})
                compared.append(reducer.stats()["dense_step_seconds"])
            return compared

    for compared in oktopk.run_threads(3, rank, timeout=60):
        assert set(compared[:-1]) == {0.0}
        assert compared[-1] > 0


def test_a_contender_may_have_settings_of_its_own() -> None:
    own = parse_contender("oktopk:fp16:density=auto:budget=0.2:warmup_values=bf16:total_steps=90")
    assert own is not None
    assert own.values == "fp16"
    assert own.options == {"density": "auto", "budget": 0.2, "warmup_values": "bf16", "total_steps": 90}
    assert warmup_steps("oktopk:density=auto") == warmup_steps("oktopk") + 64
    assert warmup_steps("oktopk:auto:density=auto") == warmup_steps("oktopk:auto") + 64


def test_what_cannot_fit_is_said() -> None:
    with pytest.raises(BenchError, match=r"4 ranks with 1,000,000,000 parameters do not fit .* use fewer --ranks"):
        group_to_fit(("ddp", "oktopk"), 10**9, 4, 8 * GIB)


def test_the_system_tells_its_memory() -> None:
    memory = free_memory()
    assert memory is None or 2**20 < memory < 2**50


def test_ranks_are_told_all() -> None:
    plan = Plan((("ddp", "oktopk"), ("ddp",)), 3, "1gbit", "mlp", 1000, 0.5, "fp16", 2.5, 7, 9.0, True)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--contenders", "ddp,zip"], "unknown contender 'zip': choose from backward, ddp"),
        (["--contenders", "oktopk:fp99"], "unknown variant 'fp99' of oktopk: choose from fp32"),
        (["--contenders", "topka:fp16:bf16"], "'topka:fp16:bf16' has 2 value formats: pass one"),
        (["--contenders", "oktopk:density=2"], "oktopk:density=2: density must be in (0, 1], got 2"),
        (["--contenders", "oktopk:densty=auto"], "unknown setting 'densty': did you mean 'density'?"),
        (["--contenders", "oktopk:values=fp16"], "unknown setting 'values'"),
        (["--contenders", "limit-link:ddp"], "unknown contender 'limit-link:ddp'"),
        (["--contenders", ","], "pass at least one contender"),
        (["--link", ","], "pass at least one link"),
        (["--link", "1gbit,fast"], "--link: rate must be like 100mbit or 1gbit"),
        (["--density", "0"], "density must be in (0, 1], got 0"),
        (["--steps", "0"], "steps must be above 0, got 0"),
        (["--ranks", "0"], "ranks must be above 0, got 0"),
        (["--bucket-mb", "-1"], "bucket-mb must be above 0, got -1"),
        (["--params", "1M"], "resnet50-shapes has 25,557,032 parameters: use --model synthetic"),
        (["--figure", "bench.doc"], "--figure must end with .png, .svg, .pdf, got bench.doc"),
    ],
)
def test_mistakes_are_named(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("oktopk bench: error: ")
    assert complaint in said.err
    assert said.out == ""


@pytest.mark.parametrize("word", ["", "M", "1T", "-5", "1e6"])
def test_numbers_that_are_none(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", f"--params={word}"])
    assert "must be a number like 25M, 300k or 1000" in capsys.readouterr().err


def test_a_link_without_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    why = "this system allows no user namespaces: use sudo"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for module in ("user_namespace", "hosts"):  # otherwise the command would replace this process
        monkeypatch.setattr(f"oktopk.tools.lab.{module}.user_namespace_problem", lambda: why)
    monkeypatch.setattr("oktopk.cli.commands.bench.measure", lambda plan, links: asked.append(links) or [])
    asked: list[object] = []
    assert main(["bench", "--link", "1gbit", "--json"]) == 0
    said = capsys.readouterr().err
    assert f"no rate limit of 1gbit: {why}\n" in said
    assert "loopback: no rate limit" in said
    assert asked == [[]]


def test_a_picture_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["bench", "--figure", str(tmp_path / "bench.png")]) == 2
    assert install_command("report") in capsys.readouterr().err
