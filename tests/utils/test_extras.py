"""Extras: what is missing is what this Python needs, and the hint fits how oktopk was installed."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker

from oktopk.utils import extras

MARKERS = [
    *(
        f"python_version {op} '{version}'"
        for op in ("<", "<=", "==", "!=", ">=", ">")
        for version in ("3.9", "3.99")
    ),
    *(f"python_version {op} '{sys.version_info[0]}.{sys.version_info[1]}'" for op in ("<", "<=", "==", ">=")),
    f"sys_platform == '{sys.platform}'",
    "sys_platform == 'amiga'",
    f"python_version >= '3.9' and sys_platform == '{sys.platform}'",
    "python_version >= '3.9' and sys_platform == 'amiga'",
]


@pytest.mark.parametrize("marker", MARKERS)
def test_markers_mean_what_pip_takes_them_for(marker: str) -> None:
    assert extras.marker_holds(f"{marker} and ") == Marker(marker).evaluate()


def test_a_package_for_another_python_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """tomli is needed before Python 3.11 only."""
    inside = extras.packages()
    assert ("tomli" in inside["train"]) == (sys.version_info < (3, 11))
    assert {"tqdm", "pillow"} <= set(inside["train"])
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert "tomli" in extras.packages()["train"]


class Installed:
    def __init__(self, url: dict[str, object] | None) -> None:
        self.url = url

    def read_text(self, name: str) -> str | None:
        return None if self.url is None else json.dumps(self.url)


@pytest.mark.parametrize(
    ("url", "command"),
    [
        (None, "pip install 'oktopk[mpi,train]'"),
        ({"url": "https://example.org/oktopk.whl", "archive_info": {}}, "pip install 'oktopk[mpi,train]'"),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, "pip install -e '/a b[mpi,train]'"),
        ({"url": "file:///a/b", "dir_info": {}}, "pip install '/a/b[mpi,train]'"),
        ({"url": 5, "dir_info": {}}, "pip install 'oktopk[mpi,train]'"),
    ],
)
def test_the_hint_fits_the_installation(
    url: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda name: [Installed(None), Installed(url)])
    assert extras.install_command("mpi", "train") == command


def test_in_the_checkout_it_is_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
    monkeypatch.setattr(metadata, "distributions", lambda name: [Installed(None), Installed(url)])
    assert extras.install_command("train") == "pip install -e '.[train]'"


def test_a_tree_that_is_not_installed_has_a_hint_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda name: [])
    assert extras.install_command("train") == "pip install 'oktopk[train]'"
