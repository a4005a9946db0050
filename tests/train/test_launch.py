"""Who a process is, by its environment; ranks on this machine; and being asked to end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from oktopk import CommError
from oktopk.train import launch
from oktopk.train.config.options import ConfigError
from oktopk.train.launch import (
    RankInfo,
    _first_host,
    _slurm_rendezvous,
    check_world,
    detect_rank,
    restart_problem,
    run_ranks,
)
from oktopk.train.stop import Stop

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}
PLACES = (
    (TORCHRUN, None, RankInfo("torchrun", 3, 4, 1, 2)),
    (MPICH, None, RankInfo("MPI", 3, 4, 1, 2)),
    (OPEN_MPI, None, RankInfo("MPI", 3, 4, 1, 2)),
    (SRUN, None, RankInfo("srun", 3, 4, 1, 2)),
    ({}, None, RankInfo("alone", 0, 1)),
    # the ranks that --ranks starts
    ({**TORCHRUN, "OKTOPK_STARTED_BY": "--ranks"}, None, RankInfo("--ranks", 3, 4, 1, 2)),
    # a launcher that does not know the hosts: all on one, or --nwpernode on each
    ({"PMI_RANK": "3", "PMI_SIZE": "4"}, None, RankInfo("MPI", 3, 4, 3, 4)),
    ({"PMI_RANK": "3", "PMI_SIZE": "4"}, 2, RankInfo("MPI", 3, 4, 1, 2)),
    # one that does know is believed
    (MPICH, 4, RankInfo("MPI", 3, 4, 1, 2)),
    # mpirun or torchrun inside of a job of SLURM
    ({**SRUN, **MPICH, "PMI_RANK": "0"}, None, RankInfo("MPI", 0, 4, 1, 2)),
    ({**SRUN, **MPICH, **TORCHRUN, "RANK": "2"}, None, RankInfo("torchrun", 2, 4, 1, 2)),
    # the script of a job is no rank: only srun starts steps
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None, RankInfo("alone", 0, 1)),
    ({"WORLD_SIZE": "4"}, None, RankInfo("alone", 0, 1)),
)


@pytest.mark.parametrize(("environment", "nwpernode", "place"), PLACES)
def test_item_19_launchers(environment: dict[str, str], nwpernode: int | None, place: RankInfo) -> None:
    assert detect_rank({"HOME": "x", **environment}, nwpernode) == place


def test_item_19_nworkers_must_be_the_real_number_of_ranks() -> None:
    check_world(RankInfo("MPI", 0, 2), 2)
    check_world(RankInfo("MPI", 0, 2), None)
    with pytest.raises(ConfigError, match=r"--nworkers is 2, but there is 1 rank \(alone\): .*--ranks 2"):
        check_world(RankInfo("alone", 0, 1), 2)
    with pytest.raises(ConfigError, match=r"--nworkers is 1, but there are 3 ranks \(torchrun\)"):
        check_world(RankInfo("torchrun", 0, 3), 1)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node[007-012,020],other3", "node007"),
        ("node[3,5-6]", "node3"),
        ("a1,a2", "a1"),
        ("gpu-a-01", "gpu-a-01"),
        ("127.0.0.1", "127.0.0.1"),
        ("n01.cluster.org,n02.cluster.org", "n01.cluster.org"),
    ],
)
def test_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert _first_host(hosts) == first


def test_a_job_that_may_be_restarted_gets_a_store_that_outlives_it() -> None:
    kept, restarts = {"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"TORCHELASTIC_MAX_RESTARTS": "3"}
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(restart_problem({**kept, **restarts}))
    assert restart_problem({**kept, "TORCHELASTIC_MAX_RESTARTS": "0"}) is None
    assert restart_problem({**restarts, "TORCHELASTIC_USE_AGENT_STORE": "False"}) is None
    assert restart_problem({}) is None
    assert restart_problem(kept) is None  # what --ranks starts


def test_all_ranks_of_an_srun_step_find_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another step of the job has another one, and without the secret it cannot be computed."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST", "OKTOPK_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NODELIST", "n[08-09]")
    monkeypatch.setenv("SLURM_JOB_ID", "123456789")
    found = [_slurm_rendezvous(RankInfo("srun", rank, 2)) for rank in range(2)]
    assert [variables.pop("RANK") for variables in found] == ["0", "1"]
    ports = [variables.pop("MASTER_PORT") for variables in found]
    assert found[0] == found[1] == {"WORLD_SIZE": "2", "MASTER_ADDR": "n08"}
    for name, value in (("SLURM_STEP_ID", "1"), ("SLURM_STEP_ID", "2"), ("OKTOPK_SECRET", "s" * 32)):
        monkeypatch.setenv(name, value)
        ports.append(_slurm_rendezvous(RankInfo("srun", 0, 2))["MASTER_PORT"])
    assert ports[0] == ports[1]
    assert len(set(ports)) == 4
    assert all(20_000 <= int(port) < 32_000 for port in ports)


def test_a_secret_that_others_can_read_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OKTOPK_SECRET", raising=False)
    (tmp_path / "secret").write_text("s" * 32)
    (tmp_path / "secret").chmod(0o644)
    monkeypatch.setenv("OKTOPK_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(ConfigError, match="chmod 600"):
        _slurm_rendezvous(RankInfo("srun", 0, 2))


# ranks on this machine; as programs that are quick to start


def program(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import json, os, signal, sys, time\nrank = os.environ['RANK']\n{text}"]


NOTE = "open(f'{sys.argv[1]}/{rank}.json.new', 'w').write(json.dumps([os.getpid(), dict(os.environ)]))\n"
NOTE += "os.rename(f'{sys.argv[1]}/{rank}.json.new', f'{sys.argv[1]}/{rank}.json')\n"


def noted(folder: Path, count: int) -> list[tuple[int, dict[str, str]]]:
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    return [(pid, environment) for pid, environment in found]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_item_20_ranks_get_what_torchrun_would_give_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING", "else")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_ranks(3, [*program(NOTE), str(tmp_path)]) == 0
    ranks = noted(tmp_path, 3)
    assert len({pid for pid, _ in ranks}) == 3
    for rank, (pid, environment) in enumerate(ranks):
        assert detect_rank(environment) == RankInfo("--ranks", rank, 3, rank, 3)
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["MASTER_PORT"] == ranks[0][1]["MASTER_PORT"]
        assert int(environment["OMP_NUM_THREADS"]) == max(1, (os.cpu_count() or 1) // 3)
        assert environment["SOMETHING"] == "else"
        assert is_gone(pid)


def test_threads_that_were_asked_for_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run_ranks(1, [*program(NOTE), str(tmp_path)]) == 0
    assert noted(tmp_path, 1)[0][1]["OMP_NUM_THREADS"] == "7"


WHEN_ALL_ARE_THERE = """
while not all(os.path.exists(f'{sys.argv[1]}/{other}.json') for other in range(2)):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("1 / 0", 1)]
)
def test_item_21_a_rank_that_fails_ends_the_others(
    end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.1)
    text = f"{NOTE}{WHEN_ALL_ARE_THERE}if rank == '1':\n    {end}\ntime.sleep(600)"
    assert run_ranks(2, [*program(text), str(tmp_path)]) == code
    assert all(is_gone(pid) for pid, _ in noted(tmp_path, 2))
    assert ("ZeroDivisionError" in capfd.readouterr().err) == (end == "1 / 0")


def test_item_21_ranks_may_end_by_themselves_after_a_failure(tmp_path: Path) -> None:
    """The exit code is that of the first failure, not of those that follow from it."""
    text = f"{NOTE}{WHEN_ALL_ARE_THERE}if rank == '1':\n    sys.exit(5)\n"
    text += "failed = json.load(open(f'{sys.argv[1]}/1.json'))[0]\n"
    text += "while os.path.exists(f'/proc/{failed}'): time.sleep(0.01)\n"  # until the failure was noticed
    text += "open(f'{sys.argv[1]}/saved', 'w').close()\nsys.exit(6)"
    assert run_ranks(2, [*program(text), str(tmp_path)]) == 5
    assert (tmp_path / "saved").exists()


def test_a_program_that_cannot_be_started_leaves_nothing_behind(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(FileNotFoundError):
        run_ranks(2, [str(tmp_path / "absent")])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_to_every_rank(number: signal.Signals, tmp_path: Path) -> None:
    text = f"""
def note(number, frame):
    open(f'{{sys.argv[1]}}/{{rank}}.signal', 'a').write(f'{{number}} ')
    sys.exit(128 + number)
signal.signal({int(number)}, note)
{NOTE}
time.sleep(600)
"""
    before = {which: signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT)}

    def when_ready() -> None:
        while not all((tmp_path / f"{rank}.json").exists() for rank in range(2)):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=when_ready, daemon=True)
    thread.start()
    assert run_ranks(2, [*program(text), str(tmp_path)]) == 128 + number
    thread.join()
    assert [(tmp_path / f"{rank}.signal").read_text() for rank in range(2)] == [f"{int(number)} "] * 2
    assert all(is_gone(pid) for pid, _ in noted(tmp_path, 2))
    assert {which: signal.getsignal(which) for which in before} == before


# being asked to end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Stop() as stop:
        assert stop.signal is None
        signal.raise_signal(number)
        assert stop.signal is number
    assert signal.getsignal(number) is before


def test_the_second_ctrl_c_interrupts_at_once() -> None:
    with Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.signal is signal.SIGINT


def test_a_second_sigterm_changes_nothing() -> None:
    with Stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal is signal.SIGTERM


@pytest.mark.timeout(120)
def test_ranks_of_srun_that_do_not_meet_are_asked_for_their_secrets() -> None:
    """Rank 1 has another secret than rank 0, so nobody listens at the port where it looks."""
    environment = {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "127.0.0.1", "OKTOPK_SECRET": "b" * 32}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK", "WORLD"))}
    with (
        mock.patch.dict(os.environ, kept | environment, clear=True),
        pytest.raises(CommError, match=r"rank 1 did not meet the others at 127.0.0.1:\d+: .*same OKTOPK_SECRET\?"),
        launch.connect(RankInfo("srun", 1, 2), timeout=1.0),
    ):
        pass
