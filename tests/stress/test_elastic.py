"""A small one of `make elastic`: the number of ranks goes 2, 1, 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from stress.elastic import run as elastic
from stress.elastic.laws import laws


@pytest.mark.timeout(500)
def test_a_job_that_loses_a_host_and_gains_one_goes_on(tmp_path: Path) -> None:
    run = elastic.disturbed(tmp_path / "job", "small")
    assert [law for law in laws(run) if not law.holds] == []
