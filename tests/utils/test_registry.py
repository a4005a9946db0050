"""Registries: plug-ins are found when they are asked for, and a broken one breaks nothing else."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import oktopk
from oktopk.algorithms import find_algorithm
from oktopk.utils import registry as module
from oktopk.utils.registry import IMPORT, PluginError, Registry, import_modules

GROUP = "test.things"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is remembered of other tests, nor for them."""
    monkeypatch.delenv(IMPORT, raising=False)
    monkeypatch.setattr(module, "_failed", {})
    monkeypatch.setattr(module, "_tried", set())
    module._entry_points.cache_clear()
    before = set(sys.modules)
    yield
    module._entry_points.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("plug_"):
            del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, for packages with entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, package: str, code: str, group: str = GROUP, **entries: str) -> None:
    """A distribution as pip leaves it: a module, and metadata with entry points."""
    (site / f"plug_{package}.py").write_text(code)
    info = site / f"plug_{package}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plug-{package}\nVersion: 1.5\n")
    lines = [f"{name} = plug_{package}:{value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


def things() -> Registry[int]:
    def accept(name: str, thing: Any) -> int:
        if not isinstance(thing, int):
            raise TypeError(f"expected a number, got {thing!r}")
        return thing

    return Registry("thing", GROUP, accept, {"one": 1, "two": 2})


def test_a_plug_in_is_imported_when_its_name_is_asked_for(site: Path) -> None:
    install(site, "good", "THREE = 3", three="THREE")
    registry = things()
    assert registry["one"] == 1
    assert registry.names() == ["one", "two", "three"]
    assert "plug_good" not in sys.modules  # what is built in, and lists of names, need no plug-in
    assert registry["three"] == registry.find("three") == 3
    assert list(registry) == ["one", "two", "three"]
    assert len(registry) == 3


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Error(Exception): pass\nraise Error('two\\nlines')", "Error: two lines"),
        ("", "AttributeError: module 'plug_bad' has no attribute 'X'"),
        ("X = 'text'", "TypeError: expected a number, got 'text'"),
    ],
)
def test_a_broken_one_is_one_warning_and_the_rest_works(
    site: Path, caplog: pytest.LogCaptureFixture, code: str, why: str
) -> None:
    install(site, "bad", code, bad="X")
    install(site, "good", "THREE = 3", three="THREE")
    registry = things()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert {**registry} == {"one": 1, "two": 2, "three": 3}
            assert "bad" not in registry
            assert registry.get("bad") is None
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == f"the thing 'bad' of plug-bad 1.5 cannot be used: {why}"
    for ask in (registry.find, registry.__getitem__):
        with pytest.raises(PluginError) as caught:
            ask("bad")
        assert str(caught.value) == said
        assert isinstance(caught.value.__cause__, (Exception, SystemExit))


def test_what_is_built_in_cannot_be_taken(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(site, "thief", "X = 99", two="X")
    registry = things()
    assert {**registry} == {"one": 1, "two": 2}
    assert "oktopk itself has the thing 'two', which stays" in caplog.text
    registry["two"] = 22  # an assignment is meant
    assert registry["two"] == 22


def test_two_packages_with_one_name_are_named(site: Path) -> None:
    install(site, "a", "X = 1", same="X")
    install(site, "b", "X = 2", same="X")
    with pytest.raises(PluginError, match=r"plug-a 1\.5 and plug-b 1\.5 cannot be used: .*uninstall all but one"):
        things().find("same")


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="unknown thing 'tow': did you mean 'two'"):
        things().find("tow")
    with pytest.raises(ValueError, match="unknown thing 'xyz': choose from one, two"):
        things().find("xyz")
    with pytest.raises(ValueError, match="unknown thing 7"):
        things().find(7)
    with pytest.raises(KeyError):
        things()["xyz"]


def test_modules_of_the_environment_are_imported_when_needed(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a rank that was started with --import: it only has the environment."""
    (site / "plug_own.py").write_text(
        "import oktopk\nclass Mine(oktopk.Algorithm):\n    name = 'mine'\n    reduce = None\n"
        "oktopk.ALGORITHMS['mine'] = Mine\n"
    )
    monkeypatch.setenv(IMPORT, "plug_own,plug_absent")
    assert find_algorithm("oktopk").name == "oktopk"
    assert "plug_own" not in sys.modules
    try:
        for _ in range(2):
            assert find_algorithm("mine").name == "mine"
        said = [record.getMessage() for record in caplog.records]
        assert said == [
            f"{IMPORT} names the module plug_absent, which cannot be imported: No module named 'plug_absent'"
        ]
        with pytest.raises(ValueError, match=rf"'mien': did you mean 'mine'\? \({IMPORT}: plug_absent"):
            find_algorithm("mien")
    finally:
        oktopk.ALGORITHMS.pop("mine", None)


def test_what_was_asked_for_must_be_importable(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "plug_x.py").write_text("")
    monkeypatch.setenv(IMPORT, "")
    import_modules(["plug_x"])
    assert module.os.environ[IMPORT] == "plug_x"
    with pytest.raises(ImportError, match="plug_y: No module named 'plug_y'") as caught:
        import_modules(["plug_y"])
    assert caught.value.name == "plug_y"
    with pytest.raises(ImportError, match=r"pass the name of the module, some\.plug, not that of its file"):
        import_modules(["./some/plug.py"])


def test_a_plug_in_may_ask_while_it_is_imported(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "curious", "import builtins\nbuiltins.THINGS.get('three')\nTHREE = 3", three="THREE")
    import builtins

    registry = things()
    monkeypatch.setattr(builtins, "THINGS", registry, raising=False)
    assert registry["three"] == 3


def test_threads_that_ask_at_the_same_time_all_get_it(site: Path) -> None:
    """As ranks that are threads do."""
    install(site, "slow", "import time\ntime.sleep(0.2)\nTHREE = 3", three="THREE")
    registry, found = things(), []
    threads = [threading.Thread(target=lambda: found.append(registry["three"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3] * 8


@pytest.mark.parametrize(
    ("registry", "thing", "why"),
    [
        (oktopk.ALGORITHMS, object, "expected a subclass of oktopk.Algorithm"),
        (oktopk.ALGORITHMS, oktopk.Algorithm, "expected a subclass of oktopk.Algorithm that implements reduce"),
        (oktopk.ALGORITHMS, oktopk.ALGORITHMS["topka"], "TopkA.name must be 'mine'"),
        (oktopk.SINKS, "text", "expected a class or a function"),
        (oktopk.VALUES, 3, "expected an oktopk.ValueCodec"),
    ],
)
def test_what_does_not_fit_is_refused(registry: Registry[Any], thing: object, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        registry["mine"] = thing
    assert "mine" not in registry


@pytest.mark.processes
def test_importing_oktopk_imports_no_plug_in_and_asks_for_none(site: Path) -> None:
    install(site, "loud", "print('imported')", "oktopk.algorithms", loud="X")
    code = (
        "import importlib.metadata as m\n"
        "real = m.entry_points\n"
        "def ours(**asked):\n"
        "    assert not str(asked.get('group')).startswith('oktopk'), asked\n"
        "    return real(**asked)\n"
        "m.entry_points = ours\n"
        "import oktopk\noktopk.ALGORITHMS['oktopk'], oktopk.VALUES['fp16']\nprint('quiet')\n"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "quiet\n", "")
