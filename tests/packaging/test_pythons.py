"""`make wheel-smoke` finds every Python that works, and none that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.wheel.every_python import found


def script(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)


def test_a_shim_that_leads_nowhere_gives_way_to_what_pyenv_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shims, versions = tmp_path / "shims", tmp_path / "versions"
    for version in ("3.10", "3.12"):
        script(shims / f"python{version}", "exit 127")
    script(shims / "python3.11", "echo 3.11")
    script(versions / "3.12" / "bin" / "python", "echo 3.12")
    script(shims / "pyenv", f'[ "$1 $2" = "prefix 3.12" ] && echo {versions}/3.12')
    monkeypatch.setenv("PATH", str(shims))
    assert found() == {"3.11": f"{shims}/python3.11", "3.12": f"{versions}/3.12/bin/python"}
