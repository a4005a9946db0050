"""The command: what it takes, what it refuses, what it says; and the measurements behind it."""

import json
import math
import os
import signal

import pytest

from oktopk.cli import main
from oktopk.comm import run_threads
from oktopk.tools import simulate
from oktopk.tools.simulate import Answer, Costs, Network, Prices, ReplayedStep, bounds, find_crossings
from oktopk.tools.simulate.measure import link_times
from oktopk.tools.simulate.measure.costs import Step, measure
from oktopk.tools.simulate.measure.processes import run_all
from oktopk.utils.signals import Interrupted

pytestmark = pytest.mark.timeout(600)  # against hanging only: a busy machine is not a bug
WORK = Step(1e-9, 2e-9)
NAMES = ("dense", "topka", "oktopk")


@pytest.fixture
def known_costs(monkeypatch):
    """Instead of timing this machine."""
    costs = Costs(1000, 1, dict.fromkeys(NAMES, WORK), dict.fromkeys(NAMES, WORK), Prices(decode_entry=1e-9))
    monkeypatch.setattr(simulate, "measure", lambda *_: costs)


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["simulate", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_json_has_every_algorithm_on_every_number_of_ranks(capsys, known_costs, tmp_path):
    picture = tmp_path / "simulate.png"
    code, out, err = run(
        capsys, "--ranks", "1,2,3", "--params", "20k", "--density", "0.05", "--algorithms", "dense,topka,oktopk",
        "--net", "1gbit:1ms:100us", "--json", "--figure", str(picture),
    )  # fmt: skip
    assert (code, err) == (0, "")
    told = json.loads(out)
    answers = {(one["ranks"], one["algorithm"]): one for one in told["answers"]}
    assert set(answers) == {(ranks, name) for ranks in (1, 2, 3) for name in NAMES}
    assert answers[1, "oktopk"]["sent_bytes"] == 0
    assert answers[1, "topka"]["seconds"] == pytest.approx(20_000 * 3e-9)
    assert answers[3, "dense"]["sent_bytes"] == pytest.approx(2 * 80_000 * 2 / 3)
    assert answers[3, "dense"]["seconds"] == pytest.approx(4 * (1.1e-3 + 80_000 / 3 / 125e6) + 20_000 * 3e-9)
    assert answers[3, "topka"]["words_per_k"] == pytest.approx(4, rel=0.05)  # and headers
    assert told["bounds"][2]["oktopk_words"] == pytest.approx(6 * 1000 * 2 / 3)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_says_what_is_measured_and_what_is_modelled(capsys, known_costs):
    code, out, _ = run(capsys, "--ranks", "2", "--params", "2k", "--density", "0.1", "--algorithms", "oktopk")
    assert code == 0
    for word in ("recorded:", "measured:", "given:", "modelled:", "crossings:", "as a ring", "2,000"):
        assert word in out


@pytest.mark.parametrize("size", ["many", "-5", "inf", "0", "9999999G"])
def test_a_size_is_a_number(capsys, size):
    with pytest.raises(SystemExit) as ended:
        run(capsys, f"--params={size}")
    assert ended.value.code == 2
    assert f"error: --params must be a number like 25M, 300k or 1000, got '{size}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--net", "10gibt:50us"], "10gibt"),
        (["--net", "10gbit"], "like 10gbit:50us"),
        (["--net", "10gbit:50"], "like 10gbit:50us"),
        (["--ranks", "0"], "1..1024"),
        (["--ranks", "two"], "--ranks must be a number"),
        (["--ranks", "5..7"], "no power of two"),
        (["--ranks", "8..2"], "1..1024"),
        (["--density", "2"], "(0, 1]"),
        (["--density", "nan"], "(0, 1]"),
        (["--density", "1e-9"], "less than one entry"),
        (["--algorithms", "best"], "unknown algorithm 'best'"),
        (["--calibrate", "1gibt"], "1gibt"),
        (["--ranks-per-core", "0"], "1..64"),
        (["--figure", "simulate.doc"], "--figure must end with .png, .svg, .pdf, got simulate.doc"),
        (["--algorithms", ","], "pass at least one algorithm"),
        (["--net", "10gbit:50us:4"], "like 10gbit:50us"),
    ],
)
def test_what_cannot_be_simulated_is_said(capsys, words, complaint):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("oktopk simulate: error: ")
    assert complaint in err


def answer(name: str, ranks: int, seconds: float) -> Answer:
    return Answer(ranks, name, ReplayedStep(seconds, 0, 0, 0, 0, 0), seconds, None, 1, 1)


def test_crossings_are_where_the_lines_meet():
    flat = [answer("flat", ranks, 4.0) for ranks in (1, 2, 8, 32)]
    rising = [answer("rising", ranks, float(ranks)) for ranks in (1, 2, 8, 32)]
    (found,) = find_crossings([*rising, *flat])
    assert (found.faster, found.slower, found.after, found.until) == ("flat", "rising", 2, 8)
    assert found.ranks == pytest.approx(4)
    assert find_crossings([answer("a", 1, 1.0), answer("b", 1, 2.0)]) == []


def test_bounds_of_one_rank_are_nothing():
    assert bounds(1, 1000, 10) == simulate.Bounds(0, 0, 0)
    assert bounds(4, 1000, 10).dense == 1500


def takes_time(link: Network) -> bool:
    """Latency is what a message takes beyond its overhead: nothing, where ranks quarrel about the processor."""
    one_message = link.latency + link.overhead
    return min(link.latency, link.overhead) >= 0 and one_message > 0 and 0 < link.bandwidth < math.inf


def test_all_ranks_find_the_same_link(monkeypatch):
    monkeypatch.setattr(link_times, "_LARGEST", 1 << 20)
    found = run_threads(3, link_times.measure)
    assert found[0] == found[1] == found[2]
    assert takes_time(found[0])


def test_the_loopback_can_be_measured():
    found = simulate.calibrate_loopback()
    assert isinstance(found, Network)
    assert takes_time(found)


@pytest.mark.usefixtures("forked_ranks")
def test_work_is_timed_by_processes_of_its_own():
    found = measure(["dense", "oktopk"], 400_000, 0.05)
    assert found.size == 400_000
    assert found.steady["oktopk"].before > 0
    assert found.steady["dense"].after > 0
    assert found.steady["oktopk"].fixed > found.steady["dense"].fixed > 0
    assert found.prices("oktopk", 100_000).before == pytest.approx(found.steady["oktopk"].before * 100_000)
    assert found.coding.encode_part > 0


@pytest.mark.usefixtures("forked_ranks")
def test_a_measurement_that_fails_is_an_error():
    with pytest.raises(simulate.SimulationError, match=r"exit code 1:(.|\n)*unheard-of"):
        measure(["unheard-of"], 1000, 0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_with_its_own_code(capsys, monkeypatch, number, code):
    monkeypatch.setattr(simulate, "measure", lambda *_: os.kill(os.getpid(), number))
    found, out, err = run(capsys, "--ranks", "2", "--params", "2k", "--net", "1gbit:1ms:1us")
    assert (found, out, err) == (code, "", "interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_is_being_measured(monkeypatch, tmp_path, capfd, number):
    """The second process tells the parent to end, and would itself go on for long. No traceback is shown."""
    asks = f"if os.environ['RANK'] == '1': os.kill(os.getppid(), {number:d})"
    (tmp_path / "patient.py").write_text(f"import os, time\n{asks}\ntime.sleep(500)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Interrupted) as interrupted:
        run_all("patient", [], [{"RANK": str(rank)} for rank in range(3)], 400)
    assert interrupted.value.number == number
    assert capfd.readouterr().err == ""


def test_what_takes_too_long_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "patient.py").write_text("import time\ntime.sleep(500)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(simulate.SimulationError, match=r"patient did not finish in 0\.1 s"):
        run_all("patient", [], [{}, {}], 0.1)
