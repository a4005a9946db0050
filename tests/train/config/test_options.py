"""What a run is told: options, where they come from, and flags without effect."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.config.options import OPTIONS, ConfigError, TrainConfig
from oktopk.train.config.origins import ResolvedConfig, _options, read_config, resolve, shipped_configs, to_toml
from oktopk.train.run import _warn_unused_options
from oktopk.train.tasks import WORKLOADS, StepPosition

COMMAND_LINE, DEFAULT = "command line", "default"


def config_file(folder: Path, text: str) -> str:
    path = folder / "my.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# item 11: who decides


LAYERS: dict[str, tuple[str, str, str, Any, Any, Any]] = {
    # on the command line, in the environment, in the config; and what each of them means
    "lr": ("0.5", "0.25", "0.125", 0.5, 0.25, 0.125),
    "batch_size": ("5", "6", "7", 5, 6, 7),
    "max_epochs": ("1", "2", "3", 1, 2, 3),
    "clip": ("1.5", "2.5", "3.5", 1.5, 2.5, 3.5),
    "compression": ("False", "0", "false", False, False, False),
    "compressor": ("topka", "gtopk", '"dense"', "topka", "gtopk", "dense"),
    "data_dir": ("a b", "c", '"d"', Path("a b"), Path("c"), Path("d")),
    "seed": ("4294967295", "9", "8", 4294967295, 9, 8),
}
BY_ITSELF = {
    "lr": (0.01, DEFAULT),
    "batch_size": (2, "network lstman4"),
    "max_epochs": (161, "network lstman4"),
    "clip": (400.0, "network lstman4"),
    "compression": (True, DEFAULT),
    "compressor": ("oktopk", DEFAULT),
    "data_dir": (None, DEFAULT),
    "seed": (0, DEFAULT),
}


@pytest.mark.parametrize("name", LAYERS)
def test_item_11_the_nearest_origin_decides(name: str, tmp_path: Path) -> None:
    typed, exported, written, a, b, c = LAYERS[name]
    variable = f"OKTOPK_{name.upper()}"
    config = config_file(tmp_path, f"{name} = {written}\n")
    for resolved, value, origin in (
        (resolve({name: typed}, {variable: exported}, config), a, COMMAND_LINE),
        (resolve({name: typed}, {}, config), a, COMMAND_LINE),
        (resolve({}, {variable: exported}, config), b, f"environment {variable}"),
        (resolve({}, {}, config), c, f"config {config}"),
        (resolve({}, {}), *BY_ITSELF[name]),
    ):
        assert getattr(resolved.config, name) == value
        assert resolved.origins[name] == origin


def test_item_11_the_network_that_decides_is_the_one_asked_for() -> None:
    resolved = resolve({"dnn": "resnet20"}, {"OKTOPK_DNN": "lstm"}, "lstm_debug")
    assert (resolved.config.dnn, resolved.config.dataset) == ("resnet20", "cifar10")
    assert resolved.origins["dataset"] == "network resnet20"
    assert resolved.config.clip is None
    assert resolved.config.batch_size == 8  # of the config, which comes before the network
    assert resolved.origins["batch_size"] == "config lstm_debug"


def test_item_11_origins_are_printed_from_the_nearest_to_the_default() -> None:
    lines = resolve({"lr": "0.5"}, {"OKTOPK_SEED": "3"}, "lstm_debug").lines()
    assert lines[0] == "command line: lr = 0.5"
    assert "environment OKTOPK_SEED: seed = 3" in lines[1:-1]
    assert "config lstm_debug: dnn = lstman4, max_epochs = 2, batch_size = 8, density = 0.01" in lines[1:-1]
    assert lines[-1].startswith("default: ")
    assert sum(line.count("lr = ") for line in lines) == 1


def test_item_11_defaults() -> None:
    config = resolve({}, {}).config
    assert (config.lr, config.density, config.warmup_steps, config.val_every) == (0.01, 0.01, 128, 5)
    assert (config.dnn, config.dataset, config.algorithm) == ("lstman4", "an4", "oktopk")


# lr, batch, epochs, warm-up, density; the table of the original, and items 9 and 11
CONFIGS = {
    "lstm_debug": ("lstman4", 0.01, 8, 2, 128, 0.01),
    "lstm_extended": ("lstman4", 0.01, 8, 10, 128, 0.01),
    "lstman4": ("lstman4", 0.001, 2, 161, 128, 0.02),
    "lstm": ("lstm", 1.0, 20, 50, 128, 0.02),
    "vgg16": ("vgg16", 0.1, 16, 161, 512, 0.02),
    "resnet20": ("resnet20", 0.1, 16, 141, 512, 0.01),
    "resnet50": ("resnet50", 0.01, 64, 95, 512, 0.01),
    "alexnet": ("alexnet", 0.01, 256, 95, 512, 0.01),
    "bert": ("bert-base", 2e-4, 8, WORKLOADS["bert-base"].max_epochs, 0, 0.01),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_item_11_shipped_configs_have_the_values_of_the_original(name: str) -> None:
    c = resolve({}, {}, name).config
    assert (c.dnn, c.lr, c.batch_size, c.max_epochs, c.warmup_steps, c.density) == CONFIGS[name]
    assert c.tau_prime == (128 if name == "bert" else None)


def test_a_shipped_config_may_be_spelled_with_dashes() -> None:
    assert read_config("lstman4-small") == read_config("lstman4_small")


def test_every_shipped_config_can_be_used() -> None:
    assert shipped_configs().keys() >= CONFIGS.keys()
    for name in shipped_configs():
        assert resolve({}, {}, name).config.lr > 0


CLIPS = {"lstman4": 400.0, "lstman4-small": 400.0, "lstm": 0.25, "vgg16": None, "resnet20": None, "alexnet": None}
LIKE_LSTMAN4 = ("lstman4", "vgg16", "resnet20", "resnet56", "resnet110", "resnet50", "alexnet")


def test_item_13_clips_and_constants_of_the_workloads() -> None:
    assert {name: WORKLOADS[name].clip for name in CLIPS} == CLIPS
    assert {(WORKLOADS[name].momentum, WORKLOADS[name].weight_decay) for name in LIKE_LSTMAN4} == {(0.9, 1e-4)}


def rate(dnn: str, lr: float, epoch: int, step: int | None = None) -> float:
    clock = StepPosition(
        epoch, 10 * epoch if step is None else step, steps_per_epoch=10, total_steps=2000, world=4
    )
    return WORKLOADS[dnn].schedule(lr, clock)


SCHEDULES = (
    # item 16: lstman4 is divided by 1.01 after every epoch
    *(("lstman4", 0.01, 0, 0.01), ("lstman4", 0.01, 1, 0.009901), ("lstman4", 0.01, 5, 0.009515)),
    *(("vgg16", 0.1, 0, 0.025), ("vgg16", 0.1, 5, 0.0625), ("vgg16", 0.1, 10, 0.1), ("vgg16", 0.1, 80, 0.1)),
    *(("vgg16", 0.1, 81, 0.01), ("vgg16", 0.1, 122, 0.001), ("resnet110", 0.1, 155, 0.0001)),
    *(("resnet50", 0.01, 0, 0.01), ("resnet50", 0.01, 29, 0.01), ("resnet50", 0.01, 30, 0.001)),
    *(("alexnet", 0.01, 60, 0.0001), ("alexnet", 0.01, 80, 0.00001)),
    *(("lstm", 1.0, 0, 1.0), ("lstm", 1.0, 24, 1.0), ("lstm", 1.0, 49, 0.01)),
    *(("bert-base", 2e-4, 10, 1.01e-4), ("bert-base", 2e-4, 20, 2e-4), ("bert-base", 2e-4, 110, 1e-4)),
)


@pytest.mark.parametrize(("dnn", "lr", "epoch", "expected"), SCHEDULES)
def test_item_16_schedules(dnn: str, lr: float, epoch: int, expected: float) -> None:
    assert rate(dnn, lr, epoch) == pytest.approx(expected, rel=1e-4)


def test_a_schedule_may_replace_that_of_the_network() -> None:
    own, cosine = resolve({}, {}, "resnet20").config, resolve({}, {}, "resnet20_short").config
    last = StepPosition(epoch=11, step=119, steps_per_epoch=10, total_steps=120, world=4)
    assert own.schedule(0.1, last) == pytest.approx(0.1)
    assert cosine.schedule(0.1, last) < 0.001


# config.toml


paths = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).map(Path)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@given(
    out=paths,
    lr=positive,
    density=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(0, 2**63 - 1),
    auto=st.booleans(),
)
def test_the_file_of_a_run_reads_back_the_same(out: Path, steps: int, **values: Any) -> None:
    given = {"out": str(out), "warmup_steps": str(steps), **{name: str(value) for name, value in values.items()}}
    before = resolve(given, {"OKTOPK_DNN": "lstm"}, None)
    text = to_toml(ResolvedConfig(before.config, {**before.origins, "lr": "config odd\nname # \x7f.toml"}))
    after = resolve(_options(text, "config.toml"), {})
    assert after.config == before.config
    assert all(f"{name} " in text for name in OPTIONS)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("auto", "auto"),
        ("AUTO", "auto"),
        ("0.02", 0.02),
        ("0:dense,128:0.01,136:4e-2", ((0, None), (128, 0.01), (136, 0.04))),
    ],
)
def test_a_density_may_be_a_number_auto_or_a_schedule(written: str, meant: Any) -> None:
    resolved = resolve({"density": written, "warmup_steps": "Auto"}, {})
    assert resolved.config.densities == meant
    assert resolved.config.warmup_steps == "auto"
    assert resolve(_options(to_toml(resolved), "config.toml"), {}).config == resolved.config


def test_the_file_of_a_run_says_where_each_value_came_from(tmp_path: Path) -> None:
    text = to_toml(resolve({"lr": "0.5"}, {}, "lstm_debug"))
    assert "lr = 0.5  # command line\n" in text
    assert "batch_size = 8  # config lstm_debug\n" in text
    assert "clip = 400.0  # network lstman4\n" in text
    assert "# pretrain is not set\n" in text
    path = config_file(tmp_path, text)
    assert resolve({}, {}, path).config == resolve({"lr": "0.5"}, {}, "lstm_debug").config


# item 19: what is refused, and how


WRONG = (
    ("lr", "fast", "a number above 0"),
    ("lr", "0", "a number above 0"),
    ("lr", "nan", "a number above 0"),
    ("lr", "inf", "a number above 0"),
    ("density", "1.5", "a number above 0 up to 1"),
    ("density", "1%", "a number above 0 up to 1, or auto"),
    ("density", "0:0.01,0:0.02", "a number, auto, or steps with densities like 0:dense,128:0.01"),
    ("density", "128:", "a number, auto, or steps with densities like 0:dense,128:0.01"),
    ("warmup_steps", "automatic", "a whole number from 0 on, or auto"),
    ("budget", "0", "a number above 0 up to 1"),
    ("min_density", "0.5", "a number above 0 up to 0.25"),
    ("warmup_values", "e4m3", "one of fp32, fp16, bf16"),
    ("momentum", "-0.1", "a number from 0 on up to 1"),
    ("batch_size", "0", "a whole number from 1 on"),
    ("batch_size", "2.5", "a whole number from 1 on"),
    ("max_epochs", "", "a whole number from 1 on"),
    ("max_epochs", "-1", "a whole number from 1 on"),
    ("seed", "4294967296", "a whole number from 0 up to 4294967295"),
    ("compression", "maybe", "True or False"),
    ("compressor", "zip", "one of dense"),
    ("dnn", "lstman5", "one of "),
    ("values", "fp8", "one of fp32"),
    ("sinks", "csv,zip", "one of csv, trace"),
)


@pytest.mark.parametrize(("name", "value", "wanted"), WRONG)
def test_item_19_a_wrong_value_is_named_as_it_was_given(name: str, value: str, wanted: str) -> None:
    for typed, environment, spelled in (
        ({name: value}, {}, f"--{name.replace('_', '-')}"),
        ({}, {f"OKTOPK_{name.upper()}": value}, f"OKTOPK_{name.upper()}"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(typed, environment)
        assert str(caught.value).startswith(f"{spelled} must be {wanted}")
        assert f"got {value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("batch_size = 2.5", "batch_size must be a whole number from 1 on, got 2.5"),
        ("batch_size = true", "batch_size must be a whole number from 1 on, got true"),
        ("batch_size = inf", "batch_size must be a whole number from 1 on, got inf"),
        ("lr = true", "lr must be a number above 0, got true"),
        ("lr = [0.1]", "lr must be a single value, got [0.1]"),
        ("lr = 2024-01-01", "lr must be a number above 0, got 2024-01-01"),
        ("data_dir = 5", "data_dir must be a path, got 5"),
        ("[lr]\nx = 1", "lr must be a single value, got {'x': 1}"),
    ],
)
def test_item_19_values_of_another_kind_in_a_config(tmp_path: Path, line: str, wanted: str) -> None:
    config = config_file(tmp_path, line)
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, config)
    assert str(caught.value) == f"{wanted} (config {config})"


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    assert resolve({}, {}, config_file(tmp_path, "max-epochs = 3.0")).config.max_epochs == 3


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("warmup_step = 3", "unknown option 'warmup_step': did you mean 'warmup_steps'?"),
        ("batchsize = 3", "unknown option 'batchsize': did you mean 'batch_size'?"),
        ("qqqqqq = 3", "unknown option 'qqqqqq': choose from dnn, dataset"),
        ("lr = ", "not TOML: "),
        ("lr = 1\nlr = 2", "not TOML: "),
    ],
)
def test_item_19_a_config_that_is_wrong_says_where(tmp_path: Path, text: str, wanted: str) -> None:
    config = config_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(config)
    assert str(caught.value).startswith(f"config {config}: {wanted}")


def test_item_19_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config 'lstm_degub': did you mean 'lstm_debug'"):
        read_config("lstm_degub")
    with pytest.raises(ConfigError, match=r"no config 'zzz': pass a TOML file or one of .*lstm_debug"):
        read_config("zzz")
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        read_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_config(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml: .*utf-8"):
        read_config(tmp_path / "binary.toml")


def test_item_19_a_dataset_that_does_not_fit_the_network() -> None:
    assert resolve({"dnn": "lstm", "dataset": "ptb"}, {}).origins["dataset"] == COMMAND_LINE
    with pytest.raises(ConfigError, match=r"lstm trains on ptb, not on 'an4': remove --dataset"):
        resolve({"dnn": "lstm", "dataset": "an4"}, {})


def test_variables_that_are_no_options_are_left_alone() -> None:
    assert resolve({}, {"OKTOPK_CACHE": "x", "LR": "5", "oktopk_lr": "5"}).config == resolve({}, {}).config


def test_every_option_has_a_meaning_and_a_default_of_its_own_kind() -> None:
    for item in fields(TrainConfig):
        assert item.metadata["help"]
        if item.default is not None:
            assert item.metadata["parse"](item.default) == item.default


# flags without effect


WITHOUT_EFFECT = (
    ({"sigma_scale": "2.5"}, ["sigma-scale"]),
    ({"tau": "8", "compressor": "topka"}, ["tau"]),
    ({"tau": "8", "tau_prime": "4"}, []),
    ({"density": "0.02", "values": "fp16", "ramp_steps": "3", "compression": "False"}, ["density", "values"]),
    ({"density": "0.01", "compressor": "dense"}, ["density"]),
    ({"min_seconds": "1", "dnn": "lstm"}, ["min-seconds"]),
    ({"min_seconds": "1"}, []),
    ({"compressor": "dense", "dnn": "lstm"}, []),
    ({}, []),
)


@pytest.mark.parametrize(("given", "flags"), WITHOUT_EFFECT)
@pytest.mark.parametrize("exported", [False, True])
def test_item_19_a_flag_without_effect_is_said_once(
    given: dict[str, str], flags: list[str], exported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {f"OKTOPK_{name.upper()}": value for name, value in given.items()}
    resolved = resolve({}, environment) if exported else resolve(given, {})
    said = without_effect(resolved, caplog)
    for flag in flags:
        assert sum(line.startswith(f"--{flag} has no effect: ") for line in said) == 1
    assert bool(said) == bool(flags)


def test_a_budget_has_an_effect_with_a_measured_density_only(caplog: pytest.LogCaptureFixture) -> None:
    given = {"budget": "0.2", "min_density": "0.005"}
    assert len(without_effect(resolve(given, {}), caplog)) == 2
    assert without_effect(resolve({"density": "auto", **given}, {}), caplog) == []
    schedule = {"density": "0:dense,5:0.1", "auto": "True", "ramp_steps": "3"}
    assert len(without_effect(resolve(schedule, {}), caplog)) == 2


def test_nwpernode_has_an_effect_with_a_gpu_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for there, count in ((False, 1), (True, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert len(without_effect(resolve({"nwpernode": "2"}, {}), caplog)) == count


def test_what_only_the_file_of_an_earlier_run_says_is_not_complained_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_file(tmp_path, to_toml(resolve({"dnn": "lstm", "compressor": "dense"}, {})))
    assert without_effect(resolve({}, {}, config), caplog) == []


def without_effect(resolved: ResolvedConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        _warn_unused_options(resolved)
    return [record.getMessage() for record in caplog.records]
