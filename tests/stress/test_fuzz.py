"""The fuzzer of the wire decoder, a short run of it; `make fuzz` is the long one. And that it would notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oktopk.comm import messages as seal
from oktopk.kernels.coding import IndexCode
from oktopk.kernels.values import ValueCode
from oktopk.wire.message import WireError
from stress.fuzz import run as fuzz_run
from stress.fuzz.cases import case
from stress.fuzz.corpus import corpus
from stress.fuzz.judge import BACKENDS, DECODED, EXPECTED, OUTCOMES, LawBroken, judging, sealed
from stress.fuzz.memory import Guarded, GuardedNumpy
from stress.fuzz.run import Tally, judge_all
from tests.support.paths import ROOT

CASES, CHECKED_CASES = 8_000, 1_500


def test_every_code_is_among_the_real_messages() -> None:
    """With indices of both types; and what the library has written, it reads."""
    found = {(real.index_code, real.value_code, real.tag.size < 2**31) for real in corpus()}
    assert found == {
        (code, values, small) for code in IndexCode for values in ValueCode for small in (True, False)
    }


def test_a_case_has_a_number() -> None:
    assert [case(number) for number in range(300)] == [case(number) for number in range(300)]
    assert len({case(number).message for number in range(300)}) > 250


def test_no_message_crashes_the_decoder_or_misleads_it() -> None:
    tally = judge_all(0, CASES)
    assert tally.failures == []
    assert tally.cases == CASES
    by_outcome = {
        outcome: sum(n for (_, found), n in tally.counts.items() if found == outcome) for outcome in OUTCOMES
    }
    assert min(by_outcome.values()) >= CASES // 500, by_outcome
    assert by_outcome[DECODED] + by_outcome["indices"] >= CASES // 3, by_outcome


def test_no_kernel_leaves_its_arrays(pytestconfig: pytest.Config) -> None:
    """Numba's own bounds checks are on, in kernels that are compiled for it and kept apart."""
    assert pytestconfig.cache is not None
    kept = str(pytestconfig.cache.mkdir("checked-kernels"))
    tally = judge_all(
        10**9, 10**9 + CHECKED_CASES, {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": kept}
    )
    assert tally.failures == []
    assert tally.cases == CHECKED_CASES


# It would notice.


def judge_some() -> None:
    with judging() as judge:
        for number in range(100):
            judge.outcome(case(number))


def believe_everything(*arguments: Any) -> bool:
    return True


def count_backwards(*arguments: Any) -> bool:
    indices = arguments[6]
    indices[:] = np.arange(indices.size)[::-1] + arguments[4]
    return True


def stumble(*arguments: Any) -> bool:
    raise IndexError("index out of range")


def scribble(*arguments: Any) -> bool:
    """Over the message."""
    arguments[0][:] = 0
    return False


WRONG = {believe_everything: LawBroken, count_backwards: LawBroken, stumble: IndexError, scribble: LawBroken}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_decoder_that_breaks_the_law_is_noticed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_some()
    for codes in BACKENDS:
        monkeypatch.setattr(codes, "read_body", wrong)
    with pytest.raises(WRONG[wrong]):
        judge_some()


def test_back_ends_that_disagree_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS[1], "read_body", lambda *arguments: False)
    with pytest.raises(LawBroken, match="disagree"):
        judge_some()


@pytest.mark.parametrize("at_end", [False, True])
def test_a_byte_beside_an_array_is_noticed(at_end: bool) -> None:
    memory = Guarded(100)
    array = memory.array(5, np.float32, at_end)
    array[:] = 1
    assert memory.intact()
    beside = memory._memory[memory.room - 21] if at_end else memory._memory[20]
    assert beside == 0xA5
    memory._memory[memory.room - 21 if at_end else 20] = 0
    assert not memory.intact()


BEYOND = """
import numpy as np
from stress.fuzz.memory import Guarded
array = Guarded(100).array(5, np.uint8, at_end={at_end})
print(array[{inside}], flush=True)
np.lib.stride_tricks.as_strided(array[{inside}:], (2,), ({step},))[1]
print("still here")
"""


@pytest.mark.parametrize(("at_end", "inside", "step"), [(True, 4, 1), (False, 0, -1)], ids=["behind", "before"])
def test_beyond_the_guarded_end_there_is_no_life(at_end: bool, inside: int, step: int) -> None:
    code = BEYOND.format(at_end=at_end, inside=inside, step=step)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, b"165\n"), done.stderr


def test_more_memory_than_the_message_needs_is_noticed() -> None:
    memory = GuardedNumpy(10**4)
    memory.limit = 8 * 100
    assert memory.empty(100, np.int64).size == 100
    with pytest.raises(MemoryError, match="808 bytes asked for, at most 800"):
        memory.empty(101, np.int64)


SICK = """
import json, os, signal, struct, sys, time
first, last, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for number in range(first, last):
    with open(place, "r+b") as file:
        file.write(struct.pack("<Q", number))
    if number == 7:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 11:
        time.sleep(600)
failures = [[13, "x", "IndexError"]] if first <= 13 < last else []
counts = [["x", "decoded", last - first - len(failures)]]
print(json.dumps({"counts": counts, "failures": failures, "peak_bytes": 0, "operations": 0}))
"""


def test_crashes_and_hangs_are_counted_and_the_other_cases_judged() -> None:
    tally = judge_all(5, 20, command=(sys.executable, "-c", SICK), patience=6.0)
    assert sorted(tally.failures) == [
        (7, "", "ended by SIGSEGV"),
        (11, "", "hung for 6 s"),
        (13, "x", "IndexError"),
    ]
    assert tally.counts == {("x", "decoded"): 12}
    assert tally.cases == 15


@pytest.mark.parametrize("lost", [0, 1])
def test_a_case_that_nobody_has_judged_is_noticed(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(first: int, last: int, *arguments: Any, **options: Any) -> Tally:
        return Tally(Counter({("cut", DECODED): last - first - (lost if first == 0 else 0)}))

    monkeypatch.setattr(fuzz_run, "judge_all", judged)
    monkeypatch.setattr(sys, "argv", ["run.py", "--cases", "100", "--processes", "3"])
    assert fuzz_run.main() == lost


def test_an_interrupted_run_goes_on_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slices are kept as they come; the summary at the end is of all of them."""
    out, judged = tmp_path / "fuzz.jsonl", []

    def judge(first: int, last: int, *arguments: Any, **options: Any) -> Tally:
        if len(judged) == 4:
            raise KeyboardInterrupt
        judged.append(first)
        return Tally(Counter({("cut", DECODED): last - first}), operations=last - first)

    monkeypatch.setattr(fuzz_run, "judge_all", judge)
    monkeypatch.setattr(sys, "argv", ["run.py", "--cases", "100", "--processes", "1", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        fuzz_run.main()
    lines = out.read_text()
    assert lines.count("\n") == 4
    out.write_text(lines + '{"slice": ["messages", 40')
    judged[:] = judged[:3]
    with pytest.raises(KeyboardInterrupt):
        fuzz_run.main()
    assert judged == [0, 10, 20, 40]
    monkeypatch.setattr(
        fuzz_run, "judge_all", lambda first, last, *a, **o: Tally(Counter({("cut", DECODED): last - first}))
    )
    assert fuzz_run.main() == 0
    said = capsys.readouterr().out
    assert "50 cases in" in said
    assert "after 50 earlier, 0 failed" in said


# Sealed messages.


def test_many_cases_are_sealed_messages_that_can_be_opened() -> None:
    opened = 0
    for number in range(300):
        message = torch.frombuffer(bytearray(sealed(case(number)) or b"-"), dtype=torch.uint8)
        with suppress(WireError):
            seal.unseal(message, *EXPECTED, torch.uint8)
            opened += 1
    assert opened >= 30


WRONG_PAYLOADS = {
    "another one": lambda message, *expected: torch.zeros(3, dtype=torch.uint8),
    "too much": lambda message, *expected: message,
    "another type": lambda message, *expected: message[32:].to(torch.int16),
}


@pytest.mark.parametrize("kind", WRONG_PAYLOADS)
def test_a_payload_that_nobody_has_sealed_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "unseal", WRONG_PAYLOADS[kind])
    with pytest.raises(LawBroken, match="sealed"):
        judge_some()


def test_an_error_that_names_nobody_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> bool:
        raise WireError("something is wrong")

    for codes in BACKENDS:
        monkeypatch.setattr(codes, "read_body", refuse)
    with pytest.raises(LawBroken, match="from whom"):
        judge_some()
