"""Integrations without their frameworks: one sentence with the command to install them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from oktopk.integrations.base import requires
from oktopk.utils.extras import install_command

FRAMEWORKS = {
    "accelerate": "accelerate",
    "huggingface": "transformers",
    "lightning": "lightning",
    "mlflow": "mlflow",
    "ray": "ray",
    "wandb": "wandb",
}
"""By integration, which is also the name of its extra."""


@pytest.mark.parametrize("integration", FRAMEWORKS)
def test_a_missing_framework_is_one_sentence(integration: str, monkeypatch: pytest.MonkeyPatch) -> None:
    framework = FRAMEWORKS[integration]
    for name in [name for name in sys.modules if name.partition(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"oktopk.integrations.{integration}", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"oktopk.integrations.{integration}")
    expected = f"oktopk.integrations.{integration} needs {framework}: {install_command(integration)}"
    assert (str(caught.value), caught.value.name) == (expected, framework)


def test_another_missing_module_is_named_itself() -> None:
    """A framework that is there, but broken, is not what has to be installed."""
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):  # noqa: SIM117
        with requires("ray", extra="ray"):
            import no_such_module  # noqa: F401


@pytest.mark.processes
def test_the_library_imports_no_framework() -> None:
    code = f"import sys, oktopk, oktopk.integrations; print({{*{[*FRAMEWORKS.values()]}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "set()\n"
