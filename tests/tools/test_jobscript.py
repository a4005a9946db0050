"""Item 20: job scripts for both schedulers and all algorithms, run by bash with launchers that echo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.algorithms import ALGORITHMS
from oktopk.cli import main, make_parser
from oktopk.tools.jobscript import Job, JobError, quote, render

LAUNCHERS = {"slurm": "srun", "pbs": "mpiexec"}


def script(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["jobscript", *map(str, words)]) == 0
    return capsys.readouterr().out


def submitted(text: str, folder: Path, **environment: str) -> list[str]:
    """The words that the launcher gets."""
    path = folder / "job.sh"
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True)
    for name in LAUNCHERS.values():
        (folder / name).write_text('#!/bin/bash\nprintf "%s\\0" "${0##*/}" "OMP=$OMP_NUM_THREADS" "$@"\n')
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "venv": "", **environment}  # that of the tests has an mpiexec
    done = subprocess.run(["bash", path], env=env, cwd=folder, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split("\0")[:-1]


def train_options(words: list[str]) -> dict[str, str]:
    """What `oktopk train` understands of them."""
    own = words[words.index("oktopk") + 1 :]
    return vars(make_parser(own).parse_args(own))


@pytest.mark.parametrize("scheduler", LAUNCHERS)
def test_the_script_runs_what_was_asked_for(
    scheduler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--nodes", 3, "--ranks-per-node", 2, "--cpus-per-rank", 4, "--data_dir", "my audio's data")
    text = script(capsys, "--scheduler", scheduler, *asked, "--lr", 0.05, "--warmup-steps", 64, "--auto")
    words = submitted(text, tmp_path)
    assert words[:2] == [LAUNCHERS[scheduler], "OMP=4"]
    assert words[3] == "6"
    options = train_options(words)
    data = str(Path("my audio's data").absolute())  # the job may start elsewhere
    expected = {"dnn": "lstman4", "data_dir": data, "lr": "0.05", "compressor": "oktopk"}
    expected |= {"density": "0.01", "seed": "0", "batch_size": "2", "max_epochs": "161", "nworkers": "6"}
    expected |= {"warmup_steps": "64", "auto": "True", "resume": "auto"}
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize("scheduler", LAUNCHERS)
def test_the_environment_overrides(scheduler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(capsys, "--scheduler", scheduler)
    assert 'lr="${lr:-0.01}"\n' in text
    assert 'density="${density:-0.01}"\n' in text
    assert "data_dir" not in train_options(submitted(text, tmp_path))
    wanted = {"lr": "0.5", "density": "0.1", "data_dir": "a $HOME b", "compressor": "topka", "nworkers": "3"}
    options = train_options(submitted(text, tmp_path, **wanted, out="my run"))
    assert {name: options[name] for name in wanted} == wanted
    assert options["out"] == "my run"


def test_the_size_of_the_job_as_it_was_submitted_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(capsys, "--scheduler", "slurm", "--nodes", 2)
    words = submitted(text, tmp_path, SLURM_NTASKS="16", SLURM_JOB_ID="77")
    assert train_options(words)["nworkers"] == "16"
    assert train_options(words)["out"].endswith("-77")


def test_ranks_of_srun_get_a_secret_that_is_new_in_every_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shows = 'echo "${OKTOPK_SECRET:-none}"; exit; srun --ntasks'
    (tmp_path / "job.sh").write_text(script(capsys, "--scheduler", "slurm").replace("srun --ntasks", shows))

    def secret(**environment: str) -> str:
        env = {"PATH": os.environ["PATH"], **environment}
        done = subprocess.run(["bash", tmp_path / "job.sh"], env=env, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    first, second = secret(), secret()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert first != second
    assert secret(OKTOPK_SECRET="mine") == "mine"
    assert secret(OKTOPK_SECRET_FILE="/home/me/secret") == "none"


ANY = st.characters(exclude_characters="\0", exclude_categories=("Cs",))


@given(st.text(st.sampled_from("'\"$`\\{}()! ~*a\n") | ANY, min_size=1))
@settings(max_examples=60)
def test_any_value_survives_its_quotes(value: str) -> None:
    command = f'unset x; x="${{x:-{quote(value)}}}"; printf %s "$x"'
    done = subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    assert done.stdout.decode() == value


@pytest.mark.parametrize("value", ["a}b", '"; touch x; "', "$(touch x)", "`touch x`", "\\", "it's", "}; touch x"])
def test_nothing_in_a_value_is_carried_out(value: str, tmp_path: Path) -> None:
    job = Job("pbs", {"dnn": "d", "compressor": "c", "seed": "0", "data_dir": value})
    words = submitted(render(job), tmp_path)
    assert words[words.index("--data-dir") + 1] == value
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("scheduler", LAUNCHERS)
def test_all_algorithms(scheduler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "jobs"
    printed = script(capsys, "--scheduler", scheduler, "--compressor", "all", "--out", folder)
    files = [folder / f"{name}.{scheduler}.sh" for name in ALGORITHMS]
    assert [Path(line) for line in printed.splitlines()] == files
    assert sorted(folder.iterdir()) == sorted(files)
    assert len(files) == 7
    for name, path in zip(ALGORITHMS, files, strict=True):
        assert os.access(path, os.X_OK)
        options = train_options(submitted(path.read_text(), tmp_path))
        assert options["compressor"] == name
        assert ("density" in options) == (name != "dense")  # there it would only earn a warning


def test_the_values_of_a_config_stand_in_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(capsys, "--scheduler", "slurm", "--config", "lstm_extended", "--max-epochs", 3)
    options = train_options(submitted(text, tmp_path))
    assert (options["batch_size"], options["max_epochs"], options["config"]) == ("8", "3", None)


def test_headers(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--nodes", 2, "--ranks-per-node", 4, "--time", "12:30:00", "--account", "abc")
    slurm = script(capsys, "--scheduler", "slurm", *asked, "--partition", "gpu")
    for line in ("nodes=2", "ntasks-per-node=4", "time=12:30:00", "account=abc", "partition=gpu"):
        assert f"#SBATCH --{line}\n" in slurm
    pbs = script(capsys, "--scheduler", "pbs", *asked, "--queue", "long")
    for line in ("-l select=2:ncpus=4:mpiprocs=4:ompthreads=1", "-l walltime=12:30:00", "-A abc", "-q long"):
        assert f"#PBS {line}\n" in pbs
    for text in (slurm, pbs):  # a scheduler reads no further than the first command
        first = re.search(r"^[^#\n]", text, re.MULTILINE)
        assert first is not None
        assert "#SBATCH" not in text[first.start() :]
        assert "#PBS" not in text[first.start() :]
        assert text[first.start() :].startswith("set -euo pipefail\n")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--time", "1h"], "time must be HH:MM:SS, got '1h'"),
        (["--account", "a\n#SBATCH --uid=0"], "account must be a single word"),
        (["--nodes", "0"], "nodes must be at least 1, got 0"),
        (["--compressor", "all"], "pass --out FOLDER"),
        (["--compressor", "zip"], "compressor must be one of"),
        (["--lr", "-1"], "lr must be a number above 0"),
    ],
)
def test_mistakes_are_named(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobscript", "--scheduler", "slurm", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("oktopk jobscript: error: ")
    assert complaint in err


def test_a_script_that_somebody_has_changed_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.sh"
    for _ in range(2):  # the same again changes nothing, and is no mistake
        script(capsys, "--scheduler", "slurm", "--out", path)
    path.write_text(mine := path.read_text() + "# mine\n")
    assert main(["jobscript", "--scheduler", "slurm", "--out", str(path)]) == 2
    assert "exists and differs" in capsys.readouterr().err
    assert path.read_text() == mine


def test_an_unknown_scheduler() -> None:
    with pytest.raises(JobError, match="one of slurm, pbs, got 'lsf'"):
        Job("lsf", {})


@pytest.mark.parametrize("scheduler", LAUNCHERS)
def test_the_job_finds_the_modules_and_the_environment(
    scheduler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Modules first, because they may change the path, then the environment that the command runs in."""
    venv = tmp_path / "it's a venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text('echo "activated ${VENV_MARK-}"\n')
    words = ("--scheduler", scheduler, "--module", "gcc/12.2", "--module", "openmpi", "--venv", venv)
    text = script(capsys, *words).replace("set -u\n", "set -u; VENV_MARK=1\n")
    (tmp_path / "module").write_text('#!/bin/bash\necho "module $*"\n')
    (tmp_path / "module").chmod(0o755)
    first, rest = submitted(text, tmp_path, venv=str(venv))[0].split(LAUNCHERS[scheduler])
    assert (first.splitlines(), rest) == (["module load gcc/12.2 openmpi", "activated 1"], "")
    assert submitted(text, tmp_path)[0].splitlines()[1:] == [LAUNCHERS[scheduler]]  # with an empty $venv


def test_the_environment_of_the_command_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", "/opt/mine")
    assert 'venv="${venv-/opt/mine}"\n' in script(capsys, "--scheduler", "slurm")
    assert "venv" not in script(capsys, "--scheduler", "slurm", "--venv", "none")
    monkeypatch.setattr("sys.prefix", sys.base_prefix)
    assert "venv" not in script(capsys, "--scheduler", "slurm")
    assert "module" not in script(capsys, "--scheduler", "slurm")


def test_the_job_imports_what_the_command_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OKTOPK_IMPORT", "")
    text = script(capsys, "--scheduler", "slurm", "--import", "json", "--import=colorsys,csv")
    assert 'export OKTOPK_IMPORT="${OKTOPK_IMPORT:-json,colorsys,csv}"\n' in text
    assert "--import" not in submitted(text, tmp_path)


def test_paths_of_data_do_not_depend_on_where_the_job_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = script(capsys, "--scheduler", "pbs", "--data-dir", "audio", "--pretrain", "../weights.pt")
    options = train_options(submitted(text, tmp_path))
    assert options["data_dir"] == str(tmp_path / "audio")
    assert options["pretrain"] == str(tmp_path / ".." / "weights.pt")
