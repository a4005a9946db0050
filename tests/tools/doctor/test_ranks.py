"""oktopk doctor on ranks: as threads of this process, and as processes that the user would start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from oktopk import Communicator, run_threads
from oktopk.cli import main
from oktopk.tools.doctor import (
    CHECKS,
    PROBLEM,
    Request,
    World,
    examination,
    examine,
    exit_code,
    run_checks,
    step_times,
)
from oktopk.tools.doctor.facts import probe_output
from oktopk.tools.doctor.links import MOST, choose_peers, measure_links
from oktopk.tools.doctor.mpi import find_mpi
from oktopk.train.data.speech.audio import write_samples
from oktopk.train.data.speech.manifest import TRAIN_MANIFEST, VAL_MANIFEST
from oktopk.train.data.speech.synthetic import generate
from tests.support.machine import children, free_port, heeded
from tests.support.worlds import is_running, wait_until

SECONDS = 240
pytestmark = pytest.mark.timeout(2 * SECONDS)
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
    "mpirun": [str(Path(sys.executable).with_name("mpirun")), "-np"],
}


@pytest.fixture(autouse=True)
def _small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "SMALL", 256)
    monkeypatch.setattr(step_times, "PROBE", 2048)
    monkeypatch.setattr(step_times, "REPEATS", 2)


def asked(comm: Communicator, out: Path, **rest: Any) -> Request:
    return Request("threads", comm.world, out=out, **rest)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_ranks_come_to_the_same_findings(size: int, tmp_path: Path) -> None:
    worlds = run_threads(size, lambda comm: examine(comm, asked(comm, tmp_path / "runs", params=5003)))
    told = [run_checks(world, CHECKS) for world in worlds]
    assert all(findings == told[0] for findings in told)
    assert exit_code(told[0]) == 0, told[0]
    assert [link["peer"] for link in worlds[0].measured.get("links", [])] == list(range(1, size))
    assert not list(tmp_path.iterdir())


def test_a_rank_with_another_torch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = examination.local_facts

    def changed(data: Any) -> dict[str, Any]:
        facts = real(data)
        odd = threading.current_thread().name == "oktopk-rank-3"
        return facts | ({"versions": facts["versions"] | {"torch": "2.9.1"}} if odd else {})

    monkeypatch.setattr(examination, "local_facts", changed)
    for world in run_threads(4, lambda comm: examine(comm, asked(comm, tmp_path))):
        (finding,) = (one for one in run_checks(world, CHECKS) if one.level == PROBLEM)
        assert finding.check == "same versions"
        assert "on ranks 0, 1, 2; 2.9.1 on rank 3" in finding.found


def test_a_rank_whose_data_cannot_be_read_is_named(tmp_path: Path) -> None:
    def rank(comm: Communicator) -> World:
        def data() -> dict[str, Any]:
            if comm.rank == 1:
                raise OSError("the disk is gone")
            return {"data": "words", "problems": [], "left_out": 0, "parameters": 3001}

        return examine(comm, asked(comm, tmp_path), data)

    for world in run_threads(3, rank):
        assert [f.found for f in run_checks(world, CHECKS) if f.level == PROBLEM] == ["rank 1: the disk is gone"]
        assert world.request.params == 3001


def test_a_rank_that_does_not_come_ends_the_wait(tmp_path: Path) -> None:
    def rank(comm: Communicator) -> World | None:
        return None if comm.rank == 2 else examine(comm, asked(comm, tmp_path))

    first, second, _ = run_threads(3, rank, timeout=1.0)
    for world in (first, second):
        assert world is not None
        assert "within 1 s" in str(world.broken)
        assert exit_code(run_checks(world, CHECKS)) == 1


def test_a_network_that_fails_while_links_are_measured_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(comm: Communicator) -> Any:
        raise ConnectionError("cable pulled")

    monkeypatch.setattr(examination, "measure_links", cut)
    for world in run_threads(2, lambda comm: examine(comm, asked(comm, tmp_path, params=5000))):
        failed = {f.check: f.found for f in run_checks(world, CHECKS) if f.level == PROBLEM}
        assert failed["links"] == "cable pulled"
        assert set(failed) == {"links", "compression"}


@pytest.mark.parametrize("world", [2, 3, 16, 17, 18, 100, 1000])
def test_chosen_peers_are_different_ranks_up_to_the_last(world: int) -> None:
    peers = choose_peers(world)
    assert len(set(peers)) == len(peers) == min(MOST, world - 1)
    assert min(peers) >= 1
    assert max(peers) == world - 1


def test_ranks_that_are_not_chosen_only_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oktopk.tools.doctor.links.MOST", 2)
    monkeypatch.setattr("oktopk.tools.doctor.links.LARGEST", 1 << 18)
    found = run_threads(6, measure_links)
    assert all(told == found[0] for told in found)
    assert [link["peer"] for link in found[0]] == [2, 5]
    assert all(link["latency_seconds"] > 0 and link["bytes_per_second"] > 0 for link in found[0])


def test_what_takes_too_long_is_measured_on_a_part_and_scaled() -> None:
    whole, part = (
        run_threads(3, lambda comm, b=budget: step_times.time_steps(comm, 8192, 0.01, b)) for budget in (1e6, 0.0)
    )
    assert whole[0]["entries"] == 8192
    assert part[0]["entries"] == 2048
    assert all(told == part[0] for told in part)
    for result in (whole[0], part[0]):
        assert [(way["algorithm"], way["values"]) for way in result["ways"]] == list(step_times.CANDIDATES)
        assert result["ways"][0]["sent_bytes"] == pytest.approx(2 * 4 * 8192 * 2 / 3, rel=1e-3)
    fp32, fp16 = (next(w for w in whole[0]["ways"] if (w["algorithm"], w["values"]) == ("oktopk", v))
                  for v in ("fp32", "fp16"))  # fmt: skip
    assert fp16["sent_bytes"] < fp32["sent_bytes"] < whole[0]["ways"][0]["sent_bytes"]


def test_the_best_step_of_the_slowest_rank_counts() -> None:
    found = step_times.summarize([[1.0, 5.0, 9.0], [2.0, 4.0, 1.0]])
    assert found == {"seconds": 2.0, "spread": 2.5}


def test_only_what_grows_with_the_size_is_scaled() -> None:
    """A step of 3 ms and 2 µs for each entry, whatever part of it is measured."""

    def step(entries: int) -> dict[str, float]:
        return {"seconds": 3e-3 + 2e-6 * entries, "sent_bytes": 8.0 * entries}

    for entries in (step_times.PROBE, 5000, 10_000):
        found = step_times.scale_times(step(step_times.SMALL), step(entries), entries, 10_000)
        assert found == pytest.approx(step(10_000))
    sums = step(step_times.SMALL)["seconds"], step(step_times.PROBE)["seconds"]
    steps = step_times.WARM + step_times.REPEATS
    assert step_times.choose_entries(10_000, *sums, steps * step(4000)["seconds"]) == pytest.approx(4000, abs=2)
    assert step_times.choose_entries(10_000, *sums, 1e6) == 10_000
    assert step_times.choose_entries(10_000, *sums, 0.0) == step_times.PROBE


def test_an_unwritable_place_is_reported_and_a_footprint_goes_away(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with probe_output(tmp_path / "file" / "run") as told:
        assert "is not writable" in told["error"]
    with probe_output(tmp_path / "new" / "run") as told:
        assert (tmp_path / told["file"]).exists()
        assert told["folder"] == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# the command


def report(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """By check."""
    assert main(["doctor", "--json", *words]) == code
    return {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_alone_it_is_healthy_and_a_wrong_nworkers_is_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    healthy = report(capsys, "--out", str(tmp_path), "--params", "25M")
    assert {finding["level"] for finding in healthy.values()} <= {"ok", "warning"}
    assert "nothing to send" in healthy["compression"]["found"]
    wrong = report(capsys, "--nworkers", "3", code=1)
    assert wrong["world"]["found"] == "--nworkers is 3, but there is 1 rank"


def test_manifests_are_looked_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    clip = generate(train=1, val=1).train[0]
    write_samples(tmp_path / "a.wav", clip.samples)
    (tmp_path / "a.txt").write_text(clip.text)
    for name in (TRAIN_MANIFEST, VAL_MANIFEST):
        (tmp_path / name).write_text(8 * "a.wav,a.txt\n" + "gone.wav,a.txt\n")
    words = ("--dnn", "lstman4-small", "--data_dir", str(tmp_path))
    found = report(capsys, *words)["data"]
    assert found["level"] == "warning"
    assert "gone.wav" in found["found"]
    (tmp_path / VAL_MANIFEST).write_bytes(b"\xff\xfe")
    unreadable = report(capsys, *words, code=1)["data"]
    assert unreadable["level"] == "problem"
    assert VAL_MANIFEST in unreadable["found"]


def test_a_world_whose_ranks_do_not_come_ends_with_a_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, **meeting}.items():
        monkeypatch.setenv(name, str(value))
    found = report(capsys, "--timeout", "1", code=1)
    assert "2 ranks (torchrun), but they did not connect" in found["world"]["found"]
    assert found["kernels"]["level"] == "ok"


@pytest.mark.parametrize(
    "words", [["--params", "many"], ["--params", "0"], ["--density", "2"], ["--timeout", "-1"]]
)
def test_wrong_options_end_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["doctor", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert words[0].strip("-") in capsys.readouterr().err


def test_an_mpi_that_hangs_is_named_with_the_time_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired("python", options["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(RuntimeError, match="mpi4py did not load within 60 s"):
        find_mpi()


def run(command: list[str], code: int, **environment: str) -> str:
    done = subprocess.run(
        [*command, "-m", "oktopk", "doctor"], capture_output=True, text=True, timeout=SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_ends_it_with_a_code_that_tells_which(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any) -> World:
        os.kill(os.getpid(), number)
        raise AssertionError("nobody heeds the signal")

    monkeypatch.setattr("oktopk.cli.commands.doctor.examine", interrupted)
    with heeded(signal.SIGINT):
        assert main(["doctor", "--out", str(tmp_path)]) == code


def test_a_signal_for_all_ranks_is_told_by_the_code_of_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oktopk", "doctor", "--ranks", "3", "--out", str(tmp_path)]
    with heeded(signal.SIGTERM):
        doctor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert wait_until(lambda: len(children(doctor.pid)) >= 3, SECONDS)
        ranks = children(doctor.pid)
        doctor.send_signal(signal.SIGTERM)
        doctor.communicate(timeout=SECONDS)
    finally:
        doctor.kill()
    assert doctor.returncode == 143
    assert not any(map(is_running, ranks))
    assert not list(tmp_path.iterdir())


def test_two_ranks_of_mpirun_are_healthy() -> None:
    out = run([*LAUNCHERS["mpirun"], "2", sys.executable], 0)
    assert "ok  world          2 ranks (MPI)" in out
    assert out.count("no problem") == 1


def test_three_ranks_of_torchrun_with_another_torch_on_one_of_them(tmp_path: Path) -> None:
    fake = "import os\nif os.environ.get('RANK') == '1':\n    import torch\n    torch.__version__ = '2.9.1'\n"
    (tmp_path / "sitecustomize.py").write_text(fake)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    out = run([*LAUNCHERS["torchrun"], "3"], 1, PYTHONPATH=path)
    assert "problem  same versions" in out
    assert "on ranks 0, 2; 2.9.1 on rank 1" in out


def test_the_mpirun_of_another_mpi_is_noticed() -> None:
    """As under Open MPI's: its variables, and a world of one for MPICH."""
    out = run([sys.executable, "-W", "ignore"], 1, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
    assert "2 processes were started, but there is 1 rank" in out
