"""Names of contenders, targets and specs: what is understood, and what is said about the rest."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.algorithms import ALGORITHMS
from oktopk.engine.autotune import plan_warmup
from oktopk.tools.race.attach import ATTACH
from oktopk.tools.race.contenders import HSDP, LOCAL, OURS, TORCH, parse_contender
from oktopk.tools.race.spec import FULL, QUALITY, TIMING, Cell, Race, RaceError, Spec, Target, parse_target
from oktopk.wire.message import VALUE_CODES


@given(
    st.sampled_from(sorted(ALGORITHMS)),
    st.floats(1e-6, 1.0),
    st.sampled_from(sorted(VALUE_CODES)),
    st.integers(0, 10**6),
    st.booleans(),
    st.integers(0, 10**4),
)
def test_settings_arrive_as_written(
    algorithm: str, density: float, values: str, warmup: int, auto: bool, least: int
) -> None:
    name = f"{algorithm}:density={density!r}:values={values}:warmup_steps={warmup}:auto={auto}:dense_below={least}"
    settings = parse_contender(name).settings
    assert settings is not None
    found = (settings.density, settings.values, settings.warmup_steps, settings.auto, settings.dense_below)
    assert found == (density, values, warmup, auto, least)
    assert isinstance(settings.algorithm, ALGORITHMS[algorithm])


@given(st.integers(1, 64), st.integers(2, 500), st.floats(0.01, 100))
def test_torch_contenders_keep_their_numbers(rank: int, count: int, lr: float) -> None:
    power = parse_contender(f"powersgd:{rank}:start={count}:lr={lr!r}")
    assert (power.rank, power.warmup_steps, power.lr, power.settings) == (rank, count, lr, None)
    assert parse_contender(f"accumulate:{count}:lr={lr!r}").passes == count


def test_defaults_are_those_of_the_front_end_and_of_the_protocol() -> None:
    ours = parse_contender("oktopk").settings
    assert ours is not None
    assert (ours.density, ours.warmup_steps, ours.auto, ours.values) == (0.01, 5, True, "fp16")
    assert parse_contender("powersgd").warmup_steps == 20
    assert parse_contender("oktopk:tau=16").algorithm.tau == 16  # type: ignore[union-attr]
    assert parse_contender("oktopk:dense=*.bias+norm*").settings.dense == ("*.bias", "norm*")  # type: ignore[union-attr]


def test_a_local_optimizer_has_any_algorithm_and_settings_of_its_own() -> None:
    name = (
        "local:algorithm=topka:density=0.05:values=fp16:average_state_every=50:averaged_state=exp_avg+exp_avg_sq"
    )
    contender = parse_contender(name)
    assert contender.settings is not None
    assert (contender.kind, contender.settings.density, contender.settings.values) == (LOCAL, 0.05, "fp16")
    assert isinstance(contender.settings.algorithm, ALGORITHMS["topka"])
    assert contender.options["average_state_every"] == 50
    assert contender.options["averaged_state"] == ["exp_avg", "exp_avg_sq"]
    default = parse_contender("local").settings
    assert default == parse_contender("oktopk").settings
    assert parse_contender("local:tau=16").algorithm.tau == 16  # type: ignore[union-attr]


def test_a_density_by_measurement_and_a_warm_up_by_length() -> None:
    name = "oktopk:density=auto:budget=0.2:min_density=0.005:warmup_values=fp16:warmup_steps=None:total_steps=500"
    contender = parse_contender(f"{name}:auto=False")
    assert contender.settings is not None
    found = contender.settings
    assert (found.density, found.budget, found.min_density, found.warmup_values) == ("auto", 0.2, 0.005, "fp16")
    assert (contender.warmup_steps, found.warmup_steps, found.ramp_steps) == (
        plan_warmup(500)[0],
        *plan_warmup(500),
    )
    assert contender.with_warmup(2).settings.ramp_steps == plan_warmup(500)[1]  # type: ignore[union-attr]
    assert [parse_contender(text).follows_link for text in (name, f"{name}:auto=False", "oktopk:auto=False")] == [
        *(True, True, False)
    ]


def test_every_kind_can_be_attached() -> None:
    names = [f"{kind}:2" if kind == "accumulate" else kind for kind in (*TORCH, *ALGORITHMS, LOCAL, HSDP)]
    assert {parse_contender(name).kind for name in names} == set(ATTACH)
    assert parse_contender("topka").kind == OURS


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("local:momentum=0.9", "unknown setting 'momentum'"),
        ("local:algorithm=topk", "unknown algorithm 'topk': did you mean 'topka'"),
        ("local:average_state_every=0", "average_state_every must be a whole number from 1 on, got 0"),
        ("local:fp16", "did you mean values=fp16?"),
        ("local:shards=0", "shards must be a whole number from 1 on, got 0"),
        ("hsdp:2:3", "'3' is not understood"),
        ("hsdp-native:none", "the number of shards must be a whole number from 1 on, got none"),
        ("topka:algorithm=oktopk", "unknown setting 'algorithm'"),
        ("oktop", "did you mean 'oktopk'?"),
        ("ddp-fp61", "did you mean 'ddp-fp16'?"),
        ("horovod", "choose from ddp"),
        ("oktopk:densty=0.1", "did you mean 'density'?"),
        ("oktopk:density=2", "density must be in (0, 1]"),
        ("oktopk:density=abc", "density must be in (0, 1]"),
        ("oktopk:budget=2", "budget must be in (0, 1], got 2"),
        ("oktopk:warmup_values=fp8", "unknown warmup_values 'fp8'"),
        ("oktopk:values=fp15", "unknown value format 'fp15'"),
        ("oktopk:fp16", "did you mean values=fp16?"),
        ("oktopk:warmup_steps=-1", "warmup_steps must be an integer"),
        ("topka:tau=3", "unknown setting 'tau'"),
        ("oktopk:tau=often", "tau must be a number like 64, got 'often'"),
        ("oktopk:tau=True", "tau must be a number like 64, got True"),
        ("oktopk:momentum=much", "momentum must be in [0, 1), got 'much'"),
        ("oktopk:norm_clip=None:auto=maybe", "auto must be True or False, got 'maybe'"),
        ("oktopk:norm_clip=x", "norm_clip must be above 0, got 'x'"),
        ("oktopk:dense=3", "dense must be a list of patterns"),
        ("powersgd:0", "the rank must be a whole number from 1 on"),
        ("powersgd:1:start=1", "start must be a whole number from 2 on"),
        ("powersgd:1:2", "'2' is not understood"),
        ("accumulate", "the number of batches per step must be"),
        ("accumulate:1", "from 2 on"),
        ("ddp:7", "'7' is not understood"),
        ("ddp:lr=0", "lr must be a number above 0"),
        ("", "unknown contender ''"),
    ],
)
def test_a_bad_contender_gets_a_sentence(name: str, said: str) -> None:
    with pytest.raises(RaceError) as caught:
        parse_contender(name)
    assert said in str(caught.value)


@given(st.text(max_size=40))
def test_any_other_text_is_an_error_and_never_a_crash(text: str) -> None:
    for parse in (parse_contender, parse_target):
        with contextlib.suppress(RaceError):
            parse(text)


@given(st.sampled_from(["val loss", "val WER", "a<b"]), st.floats(-1e9, 1e9), st.booleans())
def test_a_target_is_what_it_says(metric: str, value: float, at_most: bool) -> None:
    way = "<=" if at_most else ">="
    for written in (f"{metric}{way}{value!r}", f"  {metric} {way} {value!r} "):
        assert parse_target(written) == Target(metric, value, at_most)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_a_target_is_reached_from_its_own_side(found: float, value: float) -> None:
    assert Target("m", value).reached({"m": found}) == (found <= value)
    assert Target("m", value, at_most=False).reached({"m": found}) == (found >= value)
    assert not Target("m", value).reached({"m": None, "n": value})


def test_a_spec_survives_its_file() -> None:
    race = Race({"dnn": "gpt-small", "lr": 0.1, "data_dir": None}, 4, 7, None, Target("val loss", 1.5), 9)
    spec = Spec(race, Cell("oktopk:density=0.1", "20mbit", 3, TIMING))
    assert Spec.from_json(spec.to_json()) == spec


@given(st.lists(st.tuples(st.sampled_from(["ddp", "oktopk:dense=a/b", "oktopk:dense=a%b", "x" * 20]),
                          st.sampled_from(["none", "1gbit"]), st.integers(0, 3),
                          st.sampled_from([FULL, QUALITY, TIMING])), unique=True))  # fmt: skip
def test_different_cells_have_different_folders(cells: list[tuple[str, str, int, str]]) -> None:
    # quality cells are always on loopback
    kept = {(name, "none" if kind == QUALITY else link, seed, kind) for name, link, seed, kind in cells}
    names = [Cell(*cell).name for cell in kept]
    assert len(set(names)) == len(names)
    assert all("/" not in name and name not in (".", "..") for name in names)
