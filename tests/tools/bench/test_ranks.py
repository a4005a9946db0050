"""Contenders on processes: what each makes of the gradients, the command as a user calls it, and its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oktopk.cli import main
from oktopk.tools.bench.launch import run_on_loopback
from oktopk.tools.bench.names import (
    LINK,
    MEMORY,
    REFERENCES,
    add_link_limits,
    list_contenders,
    list_variants,
    parse_contender,
)
from oktopk.tools.bench.plan import Plan
from oktopk.tools.lab import JobFailed, JobTimeout
from tests.support.jobs import bench_means
from tests.support.machine import children, heeded
from tests.support.worlds import is_running, wait_until

pytestmark = pytest.mark.timeout(600)
PATIENCE = 500
"""Seconds; a busy machine is not a bug."""
RANKS, DENSITY = 3, 0.05
SPARSE = ("topka", "topkdsa", "gtopk", "gaussiank", "oktopk", "oktopk-static")
CONTENDERS = list_contenders()


@pytest.mark.usefixtures("forked_ranks")
def test_contenders_average_what_all_ranks_have() -> None:
    names = tuple(name for name in CONTENDERS if name not in (MEMORY, LINK))
    plan = Plan((names,), RANKS, model="synthetic", params=1_100_001, density=DENSITY, timeout=PATIENCE)
    job = [sys.executable, bench_means.__file__, plan.to_json()]
    found = json.loads(run_on_loopback(job, RANKS, timeout=PATIENCE))
    assert found["backward"]["own_error"] == 0
    assert found["backward"]["error"] > 0.3
    errors = {name: found[name]["error"] for name in ("ddp", "dense", "ddp-fp16", "ddp-bf16")}
    assert errors["ddp"] < 1e-6
    assert errors["dense"] < 1e-6
    assert 1e-6 < errors["ddp-fp16"] < 1e-3
    assert errors["ddp-fp16"] < errors["ddp-bf16"] < 1e-2
    assert 0.1 < found["powersgd"]["error"] < 2  # rank 1 is not the whole, and the third step is no dense one
    for name in SPARSE:
        assert DENSITY / 2 < found[name]["density"] < 1.5 * RANKS * DENSITY, name
        assert found[name]["error"] < 2, name
        assert found[name]["sent_bytes"] < 4 * plan.params, name
    for name, told in found.items():
        assert told["seconds"] > 0
        assert told["interface_bytes"] is None
        assert (told["sent_bytes"] is None) == (name not in (*SPARSE, "dense"))


@pytest.mark.usefixtures("forked_ranks")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model",
        "mlp",
        "--params",
        "20k",
        "--contenders",
        "ddp,oktopk",
        "--steps",
        "2",
        "--bucket_mb",
        "0.01",
    ]
    picture = tmp_path / "bench.png"
    assert (
        main(["bench", "--ranks", "2", "--json", "--timeout", str(PATIENCE), "--figure", str(picture), *words])
        == 0
    )
    said = capsys.readouterr()
    assert "no rate limit" in said.err
    ddp, oktopk = json.loads(said.out)["records"]
    assert [(r["name"], r["link"], r["ranks"], r["steps"]) for r in (ddp, oktopk)] == [
        ("ddp", None, 2, 2),
        ("oktopk", None, 2, 2),
    ]
    for record in (ddp, oktopk):
        assert 0 < record["best_step_seconds"] <= record["median_step_seconds"]
        assert record["cpu_seconds"] > 0
    assert ddp["sent_bytes"] is ddp["exposed_seconds"] is ddp["stage_seconds"] is None
    assert 0 < oktopk["sent_bytes"] < 4 * oktopk["params"]
    assert 0 < oktopk["exposed_seconds"] <= oktopk["median_step_seconds"]
    assert set(oktopk["stage_seconds"]) == {"select", "encode", "exchange", "decode", "wait", "other"}
    assert picture.stat().st_size > 0
    assert list(tmp_path.iterdir()) == [picture]


@pytest.mark.usefixtures("forked_ranks")
def test_all_take_part_with_a_tiny_model_and_half_of_its_entries(capsys: pytest.CaptureFixture[str]) -> None:
    names = [*CONTENDERS, *(f"oktopk:{variant}" for variant in list_variants())]
    words = ["--model", "synthetic", "--params", "10k", "--density", "0.5", "--steps", "2", "--ranks", "3"]
    limits = ["--json", "--timeout", str(PATIENCE)]
    assert main(["bench", "--contenders", ",".join(names), *words, *limits]) == 0
    found = {record["name"]: record for record in json.loads(capsys.readouterr().out)["records"]}
    assert list(found) == list(REFERENCES) + [name for name in add_link_limits(names) if name not in REFERENCES]
    for name, record in found.items():
        assert record["steps"] == 2
        assert (record["stage_seconds"] is None) == (parse_contender(name) is None)
        if record["stage_seconds"] is not None:
            busy = sum(record["stage_seconds"].values())
            assert 0 < busy < max(record["step_seconds"])
            assert record["backward_seconds"] + record["exposed_seconds"] < max(record["step_seconds"])
        assert (record["limits_seconds"] is None) == (f"{LINK}:{name}" not in found)
    assert found["oktopk:fp16"]["sent_bytes"] < 0.7 * found["oktopk:fp32"]["sent_bytes"]
    assert found["oktopk"]["sent_bytes"] == found["oktopk:fp32"]["sent_bytes"]
    assert found["ddp"]["peak_memory_bytes"] > 1e8


SAYS = "import os, sys, time; print('here', flush=True); rank = os.environ['RANK']; "


def test_a_rank_that_fails_is_named_and_ends_the_others() -> None:
    job = [sys.executable, "-c", SAYS + "sys.exit('disk on fire') if rank == '1' else time.sleep(300)"]
    with pytest.raises(
        JobFailed, match=r"^rank 1 ended with exit code 1; its last output:\nhere\ndisk on fire$"
    ) as e:
        run_on_loopback(job, 3, timeout=PATIENCE)
    assert [result.code for result in e.value.results] == [-9, 1, -9]


def test_ranks_that_are_late_are_ended() -> None:
    job = [sys.executable, "-c", SAYS + "rank == '0' or time.sleep(300)"]
    with pytest.raises(JobTimeout, match=r"not finished within 3 s: raise --timeout(.|\n)*rank 1 ended") as e:
        run_on_loopback(job, 2, timeout=3)
    assert e.value.results[1].code == -9


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_leaves_nothing(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "oktopk", "bench", "--ranks", "3", "--model", "mlp", "--params", "10k"]
    with heeded(number):
        bench = subprocess.Popen([*command, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert wait_until(lambda: len(children(bench.pid)) == 3, PATIENCE)
        ranks = children(bench.pid)
        bench.send_signal(number)
        out, err = bench.communicate(timeout=PATIENCE)
    finally:
        bench.kill()
    assert bench.returncode == code
    assert not any(map(is_running, ranks))
    assert out == b""
    assert b"Traceback" not in err
