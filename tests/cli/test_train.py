"""`oktopk train` as it is typed: words, exit codes, and what stands on the screen."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oktopk import __version__
from oktopk.cli import main, make_parser, replace_underscores
from oktopk.cli.commands import train as command
from oktopk.train.config.options import MAY_DIFFER, OPTIONS
from oktopk.train.config.origins import ResolvedConfig, resolve, shipped_configs, to_toml
from oktopk.train.data.speech.audio import write_samples
from oktopk.train.data.speech.manifest import TRAIN_MANIFEST, VAL_MANIFEST, write_manifest
from oktopk.train.data.speech.synthetic import generate
from oktopk.train.launch import RankInfo
from oktopk.train.models.lstman4 import SpeechLSTM, Widths
from oktopk.train.run import Outcome
from oktopk.train.tasks import WORKLOADS
from oktopk.train.tasks.lstman4 import build_speech_task
from tests.support.paths import ROOT

USERS_WORDS = (
    *(
        "--dnn",
        "lstman4",
        "--dataset",
        "an4",
        "--data_dir",
        "./audio_data",
        "--nworkers",
        "1",
        "--max_epochs",
        "1",
    ),
    *("--batch_size", "8", "--lr", "0.01", "--compression", "True", "--compressor", "oktopk"),
)


@pytest.fixture(autouse=True)
def _as_if_nothing_had_happened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """In a folder of its own, started by nobody; the log is as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", *_variables()):
        monkeypatch.delenv(variable, raising=False)
    logger = logging.getLogger("oktopk")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before


def _variables() -> list[str]:
    return [f"OKTOPK_{name.upper()}" for name in OPTIONS]


def resolved(*words: str) -> ResolvedConfig:
    return command._resolve(make_parser(["train"]).parse_args(replace_underscores(["train", *words])))[0]


# item 19: words


def test_item_19_the_users_words() -> None:
    made = resolved(*USERS_WORDS)
    config = made.config
    assert (config.dnn, config.dataset, config.data_dir) == ("lstman4", "an4", Path("audio_data"))
    assert (config.nworkers, config.max_epochs, config.batch_size, config.lr) == (1, 1, 8, 0.01)
    assert (config.compression, config.compressor, config.algorithm) == (True, "oktopk", "oktopk")
    typed = {word[2:] for word in USERS_WORDS if word.startswith("--")}
    assert {name for name, origin in made.origins.items() if origin == "command line"} == typed


def test_item_19_dashes_and_underscores_and_equals_signs_mean_the_same() -> None:
    plain = resolved(*USERS_WORDS)
    with_dashes = [word.replace("_", "-") if word.startswith("--") else word for word in USERS_WORDS]
    pairs = zip(USERS_WORDS[::2], USERS_WORDS[1::2], strict=True)
    assert resolved(*with_dashes) == plain
    assert resolved(*(f"{name}={value}" for name, value in pairs)) == plain


def test_item_19_every_flag_of_the_original_is_known() -> None:
    words = "--nwpernode=4 --density=0.02 --sigma-scale=2.5 --nsteps-update=2 --pretrain=a_b --warmup-steps=0"
    words += " --val-every=3 --max-steps=9 --seed=4 --out=my_run"
    config = resolved(*words.split()).config
    for word in words.split():
        name, value = word[2:].split("=")
        assert str(getattr(config, name.replace("-", "_"))) == value


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ((), True),
        (("--compression",), True),
        (("--compression", "True"), True),
        (("--compression=true",), True),
        (("--compression", "False"), False),
        (("--compression=no",), False),
        (("--compression", "0", "--lr", "1"), False),
        (("--compression", "--lr", "1"), True),
    ],
)
def test_item_19_switches(words: tuple[str, ...], meant: bool) -> None:
    assert resolved(*words).config.compression is meant
    assert resolved(*words).config.algorithm == ("oktopk" if meant else "dense")


def test_values_keep_their_underscores() -> None:
    assert replace_underscores(["--a_b", "c_d", "--e_f=g_h", "_i", "--"]) == [
        "--a-b",
        "c_d",
        "--e-f=g_h",
        "_i",
        "--",
    ]


def test_the_environment_of_a_job_script_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKTOPK_LR", "0.125")
    assert resolved().config.lr == 0.125
    assert resolved("--lr", "0.5").config.lr == 0.5
    assert resolved("--config", "lstman4").origins["lr"] == "environment OKTOPK_LR"


# errors: exit code 2 for what was typed, 1 for data


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["train", *words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    lines = [line for line in captured.err.splitlines() if line.startswith("oktopk train: error: ")]
    assert len(lines) == 1
    return code, captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--lr", "fast"), "--lr must be a number above 0, got 'fast'"),
        (("--density", "2"), "--density must be a number above 0 up to 1, or auto, got '2'"),
        (("--compression", "perhaps"), "--compression must be True or False, got 'perhaps'"),
        (("--dnn", "lstm", "--dataset", "an4"), "lstm trains on ptb, not on 'an4': remove --dataset"),
        (("--config", "absent.toml"), "config absent.toml: No such file or directory"),
        (("--nworkers", "2"), "--nworkers is 2, but there is 1 rank (alone): "),
        (("--nworkers", "2", "--ranks", "3"), "--nworkers is 2, but there are 3 ranks (--ranks 3): "),
        (("--nwpernode", "²"), "--nwpernode must be a whole number from 1 on, got '²'"),
        (("--override",), "--override needs --resume"),
        (("--resume",), "--resume needs a folder: pass --resume RUN, or --out RUN --resume"),
        (("--resume", "runs/absent"), "--resume runs/absent: no run found (no config.toml)"),
    ],
)
def test_item_19_what_cannot_be_meant_is_one_line_and_code_2(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = failure(capsys, *words)
    assert code == 2
    assert text.startswith(f"oktopk train: error: {said}")
    assert text.count("\n") == 1
    assert not Path("runs").exists()


def test_item_18_missing_data_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = failure(capsys, "--data-dir", "absent", "--out", "run")
    assert code == 1
    assert text == ("oktopk train: error: absent: no such folder; without --data-dir, generated speech is used\n")
    assert not Path("run").exists()


def test_a_run_is_never_written_over_another(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/config.toml").write_text("lr = 0.5\n")
    code, text = failure(capsys, "--out", "run", "--data-dir", "absent")
    assert code == 2
    assert "run already holds a run: resume it with --resume run, or pass another --out" in text
    assert Path("run/config.toml").read_text() == "lr = 0.5\n"


@pytest.mark.parametrize("words", [("--no-such-flag",), ("--batch", "8"), ("--lr",), ("extra",)])
def test_item_19_words_that_are_no_options(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_only_rank_0_complains_about_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert main(["train", "--lr", "fast"]) == 2
    assert capsys.readouterr().err == ""


# help


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_mentions_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "train", "--help")
    for name in (*OPTIONS, "config", "resume", "override", "json", "quiet"):
        assert f"--{name.replace('_', '-')} " in text or f"--{name.replace('_', '-')}\n" in text
    for name in (*WORKLOADS, *shipped_configs()):
        assert name in "".join(text.split())  # lines may end within a name
    assert "density falls from 25 %" in " ".join(text.split())
    assert "train" in shown(capsys, "--help")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--version") == f"oktopk {__version__}\n"


def test_item_19_main_trainer_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "main_trainer.py"), "--help"], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: oktopk train ")
    text = (ROOT / "main_trainer.py").read_text()
    assert len(text.splitlines()) <= 3


# what is started


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Trainings that would have been started."""
    calls: list[Any] = []

    def note_ranks(count: int, words: Sequence[str]) -> int:
        calls.append((count, list(words)))
        return 3

    def note_training(resolved: ResolvedConfig, place: RankInfo, resume: bool = False) -> Outcome:
        calls.append((resolved, place, resume))
        return Outcome(130, Path("runs/x"), {"steps": 5})

    monkeypatch.setattr(command, "run_ranks", note_ranks)
    monkeypatch.setattr(command, "train", note_training)
    return calls


def test_item_20_ranks_run_the_same_words(started: list[Any]) -> None:
    assert main(["train", "--ranks=2", "--data_dir", "a_b", "--nworkers", "2"]) == 3
    words = ["train", "--ranks=2", "--data-dir", "a_b", "--nworkers", "2"]
    assert started == [(2, [sys.executable, "-m", "oktopk", *words])]


def test_item_20_a_rank_does_not_start_ranks(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "OKTOPK_STARTED_BY": "--ranks"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--ranks", "2"]) == 130
    (_, place, _), *others = started
    assert (place.launcher, place.rank, place.world, others) == ("--ranks", 1, 2, [])


def test_figures_for_programs(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--json"]) == 130
    schema = {"name": "oktopk.train", "version": 1}
    assert json.loads(capsys.readouterr().out) == {"schema": schema, "folder": "runs/x", "steps": 5}


def test_a_resumed_run_is_what_it_was_and_the_command_line_counts_more(started: list[Any]) -> None:
    Path("run").mkdir()
    text = to_toml(resolve({"dnn": "lstm", "lr": "0.5", "seed": "7"}, {}))
    Path("run/config.toml").write_text(text)
    main(["train", "--resume", "run", "--lr", "0.25", "--override"])
    main(["train", "--out", "run", "--resume"])
    main(["train", "--out", "fresh", "--resume"])
    configs = [(made.config.dnn, made.config.lr, made.config.seed, made.config.out) for made, _, _ in started]
    assert configs[0] == ("lstm", 0.25, 7, Path("run"))
    assert configs[1] == ("lstm", 0.5, 7, Path("run"))
    assert configs[2] == ("lstman4", 0.01, 0, Path("fresh"))
    assert [resume for _, _, resume in started] == [True, True, False]


def test_a_resumed_run_with_other_options_is_refused_and_told_which(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether they come from the command line, the environment or another configuration."""
    Path("run").mkdir()
    Path("run/config.toml").write_text(to_toml(resolve({"dnn": "lstm", "lr": "0.5", "data_dir": "data"}, {})))
    Path("other.toml").write_text('dnn = "lstm"\nlr = 0.5\ndata_dir = "data"\nbatch_size = 3\n')
    monkeypatch.setenv("OKTOPK_SEED", "7")
    same = ["--lr", "0.5", "--data-dir", str(Path("data").absolute())]
    for words in (["--resume", "run"], ["--out", "run", "--resume"]):
        assert main(["train", *words, *same, "--config", "other.toml", "--clip", "3"]) == 2
        said = capsys.readouterr().err
        assert said == (
            "oktopk train: error: --resume run: other options than the run has: "
            "--seed is 0 in the run, 7 now (environment OKTOPK_SEED); "
            "--batch-size is 20 in the run, 3 now (config other.toml); "
            "--clip is 0.25 in the run, 3.0 now (command line). "
            "Remove them, or continue with them: --override\n"
        )
    assert started == []
    assert main(["train", "--resume", "run", *same, "--clip", "3", "--override"]) == 130
    assert "run continues with other options: --seed is 0 in the run, 7 now" in capsys.readouterr().out


def test_length_output_and_ranks_of_a_resumed_run_may_differ(started: list[Any]) -> None:
    Path("run").mkdir()
    Path("run/config.toml").write_text(to_toml(resolve({"out": "elsewhere", "ranks": "4", "clip": "3"}, {})))
    values = {"max_epochs": 7, "max_steps": 9, "val_every": 2, "pseudo_accuracy": True, "max_skipped": 3}
    values |= {"sigma_scale": 2.5, "nworkers": 1, "nwpernode": 1, "ranks": 1, "ranks_per_host": 1, "timeout": 9.0}
    values |= {"save_every": 7, "keep": 9, "sinks": "csv"}
    assert {*values, "out"} == set(MAY_DIFFER)
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    assert main(["train", "--resume", "run", *words]) == 3  # from the ranks that it starts


# one run, very small


def write_audio_data(folder: Path) -> None:
    corpus = generate(train=8, val=2)
    for name, clips in ((TRAIN_MANIFEST, corpus.train), (VAL_MANIFEST, corpus.val)):
        pairs = [(folder / f"{clip.name}.wav", folder / f"{clip.name}.txt") for clip in clips]
        for clip, (wav, txt) in zip(clips, pairs, strict=True):
            write_samples(wav, clip.samples)
            txt.write_text(clip.text)
        write_manifest(folder / name, pairs)


def test_item_19_the_users_command_runs_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a very small lstman4. Items 9, 11, 12 and 14: the plan, origins, a finite loss, error rates."""
    pytest.importorskip("soundfile", reason="reads and writes sound files")

    def tiny() -> SpeechLSTM:
        return SpeechLSTM(Widths(1, 8, 1))

    small = replace(WORKLOADS["lstman4"], build=lambda source, share: build_speech_task(tiny, source, share))
    monkeypatch.setitem(WORKLOADS, "lstman4", small)
    write_audio_data(Path("audio_data"))
    assert main(["train", *USERS_WORDS, "--sigma_scale", "2.5", "--out", "run"]) == 0
    captured = capsys.readouterr()
    assert "1 steps: all dense warm-up, 0 sparse" in captured.out
    assert "command line: dnn = lstman4, " in captured.out
    assert captured.err.count("--sigma-scale has no effect") == 1
    assert "never reaches the sparse phase" in captured.err
    for words in ("val WER", "val CER", "val loss", 'heard "'):
        assert words in captured.out
    assert "val acc" not in captured.out
    result = json.loads(Path("run/result.json").read_text())
    assert (result["finished"], result["steps"], result["world"]) == (True, 1, 1)
    assert "lr = 0.01  # command line\n" in Path("run/config.toml").read_text()
    assert all(torch.tensor(list(entry.values())).isfinite().all() for entry in _numbers(result["validations"]))


def _numbers(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    assert rows
    return [{name: x for name, x in row.items() if isinstance(x, (int, float))} for row in rows]
