"""The experiments of docs/quality.md: every command is one that `oktopk race` accepts."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import pytest

from oktopk.cli.commands import race
from oktopk.tools.race.contenders import parse_contender
from tests.support.scripts import load


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("quality", monkeypatch)


def test_every_command_is_understood_by_the_race(quality: ModuleType) -> None:
    parser = argparse.ArgumentParser()
    race.add_arguments(parser)
    for name in quality.EXPERIMENTS:
        commands = quality.race_commands(name, Path("races"), Path("data"))
        assert commands[-1][2:4] == ["--report", f"races/{name}"]
        for command in commands[:-1]:
            options = parser.parse_args(command[2:])
            contenders, _, _ = race._lists(options)
            assert [parse_contender(one).name for one in contenders] == contenders
            assert options.options == ["--data-dir", "data"]


def test_a_dry_run_only_prints(quality: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quality.main(["equal-time", "--dry-run", "--out", str(tmp_path)]) == 0
    assert "--seconds 120" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
