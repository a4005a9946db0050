"""Folders of runs that were made to do harm, and requests to the live page: text, a note, or a refusal."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from oktopk.cli import main
from oktopk.tools.report import ReportError, build_report, find_runs, read_run
from oktopk.tools.report.analysis.parsing import LONGEST_LINE
from oktopk.tools.report.html.live import LOOPBACK, Server
from oktopk.tools.report.html.page import build_page
from oktopk.tools.sweep import FAILED, Run, _read_outcome, make_row, previous_options
from tests.support.report_runs import HOSTILE, served, write_run

SECRET = "the-secret-of-another-folder"


@pytest.fixture(autouse=True)
def _no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its four megabytes are not what is looked at."""
    monkeypatch.setattr(import_module("oktopk.tools.report.html.page"), "_plotly", lambda: "")


def shown(*folders: Path) -> str:
    """The page, which is what its figures are as strict JSON."""
    document = build_report([read_run(folder, folder.name) for folder in folders])
    json.dumps(document, allow_nan=False)
    return build_page(document)


def notes(folder: Path) -> str:
    return " ".join(read_run(folder, "run").notes)


# Text.


NEEDED = ("step", "train", "reduction", "epoch", "validation", "dense", "sparse")


def poisoned(value: Any) -> Any:
    """Every text and every name of a column that is not needed to find the others, replaced."""
    if isinstance(value, str):
        return value if value in NEEDED else HOSTILE
    if isinstance(value, dict):
        return {**{key: poisoned(entry) for key, entry in value.items()}, HOSTILE: 1.5, HOSTILE + "2": HOSTILE}
    return [poisoned(entry) for entry in value] if isinstance(value, list) else value


def poison(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(poisoned(line)) + "\n" for line in lines))
    for name in ("plan.json", "result.json"):
        (folder / name).write_text(json.dumps(poisoned(json.loads((folder / name).read_text()))))
    (folder / "config.toml").write_text(HOSTILE)


def assert_harmless(text: str) -> None:
    assert "<img" not in text
    assert text.count("<script") == 3
    assert "<b>" not in text
    assert "<" not in text.partition('id="state">')[2].partition("</script>")[0]


def test_every_text_of_every_file_is_text(tmp_path: Path) -> None:
    one, two = tmp_path / HOSTILE.replace("/", "∕"), tmp_path / "b"
    for folder in (one, two):
        poison(write_run(folder, steps=6, warmup=2, skipped={3: HOSTILE}))
    for folders in ((one,), (one, two)):
        text = shown(*folders)
        assert_harmless(text)
        assert "&lt;img src=x" in text


def test_every_text_of_a_sweep_is_text(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=3, warmup=1)
    poison(tmp_path / "a")
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": [{"run": HOSTILE}, 7, {"run": ["a"]}], HOSTILE: 1}))
    assert_harmless(shown(*find_runs([tmp_path])))


# Numbers and lines.


@pytest.mark.parametrize("step", [2**31, 2**52, 2**53 - 1])
def test_steps_of_any_number_take_no_room(tmp_path: Path, step: int) -> None:
    write_run(tmp_path, steps=3, warmup=1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        for event in ("reduction", "step", "train", "epoch", "validation"):
            line = {"event": event, "step": step, "phase": "sparse", "loss": 1e60, "bucket": step, "epoch": step}
            file.write(json.dumps(line | {"size_entries": step, "sent_bytes": step}) + "\n")
    shown(tmp_path)


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_line_without_end_is_not_held_in_memory(tmp_path: Path, end: str) -> None:
    write_run(tmp_path, steps=3, warmup=1)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        place = file.tell()
        file.truncate(place + 40 * LONGEST_LINE)
        file.seek(place + 40 * LONGEST_LINE)
        file.write(end.encode())
    said = notes(tmp_path)
    assert (
        "1 lines of metrics.jsonl are not JSON objects" if end else "last line of metrics.jsonl is incomplete"
    ) in said
    assert len(read_run(tmp_path, "run").steps) == 3


def test_the_longest_line_that_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3, warmup=1)
    short = json.dumps({"event": "train", "step": 7, "loss": 1.0, "pad": ""})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        for step, excess in ((7, 0), (8, 1)):
            line = json.dumps({"event": "train", "step": step, "loss": 1.0, "pad": ""})
            pad = "x" * (LONGEST_LINE - 1 - len(short) + excess)
            file.write(line.replace('"pad": ""', f'"pad": "{pad}"') + "\n")
    assert [step.number for step in read_run(tmp_path, "run").steps] == [0, 1, 2, 7]


def test_numbers_and_depths_that_json_cannot_have(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3, warmup=1)
    bad = ["9" * 5000, "-Infinity", "NaN", "1e999", "[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        for value in bad:
            for name in ("step", "loss", "traffic", "sent_bytes", "sizes", "phases", "event"):
                file.write(f'{{"event": "step", "step": 2, "{name}": {value}}}\n')
    for name in ("plan.json", "result.json"):
        (tmp_path / name).write_text(
            "{" + ", ".join(f'"{place}": {value}' for place, value in enumerate(bad[1:])) + "}"
        )
    shown(tmp_path)


# Links.


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "plan.json", "result.json"])
def test_a_link_to_a_file_elsewhere_is_not_followed(tmp_path: Path, name: str) -> None:
    run, elsewhere = write_run(tmp_path / "run", steps=3, warmup=1), tmp_path / "elsewhere"
    elsewhere.write_text(
        json.dumps({"event": "validation", "step": 1, SECRET: 1.0, "sentence": SECRET, "dnn": SECRET})
    )
    (run / name).unlink()
    (run / name).symlink_to(elsewhere)
    assert SECRET not in shown(run)
    assert SECRET not in json.dumps(build_report([read_run(run, "run")]))
    (run / name).unlink()
    (run / "kept").write_bytes(elsewhere.read_bytes())
    (run / name).symlink_to("kept")  # within the folder a link is as good as a file
    assert SECRET in shown(run)


def test_a_link_to_a_folder_elsewhere_is_not_of_the_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    own = write_run(sweep / "own", steps=3, warmup=1)
    other = write_run(tmp_path / "other", steps=3, warmup=1)
    (sweep / "link").symlink_to(other)
    (sweep / "up").symlink_to("..")
    (sweep / "circle").symlink_to("circle")
    assert find_runs([sweep]) == [own]
    assert find_runs([sweep / "link"]) == [other]  # whoever names it means it


def test_a_folder_of_nothing_but_links_has_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "run" / "config.toml").symlink_to("../secret")
    with pytest.raises(ReportError, match="no run in"):
        find_runs([tmp_path / "run"])


NO_RESULTS = [
    *("7", "[]", "[" * 10**5, "\0", '{"phases": [1]}', '{"phases": {"sparse": 1}}'),
    *('{"validations": [1]}', '{"validations": [{"val loss": "x"}]}'),
]


@pytest.mark.parametrize("content", NO_RESULTS, ids=lambda content: content[:30])
def test_results_that_are_none_fail_their_run_of_a_sweep(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "result.json").write_text(content)
    found = _read_outcome(Run("dense", None, 0), tmp_path)
    assert found.status == FAILED
    assert "cannot be read" in make_row(found)["problem"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    (tmp_path / "sweep.json").write_text(f'{{"options": {content}}}')
    assert previous_options(tmp_path) in (None, [])


def test_the_command_says_it_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([str(tmp_path / "a\nb")], [str(tmp_path), "--json"], ["a\0b"]):
        assert main(["report", *words]) == 1
        said = capsys.readouterr().err
        assert said.startswith("oktopk report: error: ")
        assert "Traceback" not in said


# The live page.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(write_run(tmp_path, steps=3, warmup=1)) as running:
        yield running


def raw(server: Server, request: bytes) -> bytes:
    """The answer to bytes that need be no request."""
    with socket.create_connection((LOOPBACK, server.port), timeout=60) as connection:
        answer = b""
        with suppress(OSError):  # it may have answered and hung up before it has read everything
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while part := connection.recv(2**16):
                answer += part
    return answer


def asked(server: Server, path: bytes, method: bytes = b"GET") -> int:
    """The status of a path below the token."""
    path = b"/" + server.token.encode() + path
    host = f"{LOOPBACK}:{server.port}".encode()
    answer = raw(server, method + b" " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    return int(answer.split(b" ", 2)[1])


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=60).close()


METHODS = [
    *("HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"),
    *("get", "FOO", "do_GET"),
]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_but_get_is_refused(server: Server, method: str) -> None:
    connection = http.client.HTTPConnection(LOOPBACK, server.port, timeout=60)
    connection.request(method, f"/{server.token}/")
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Allow")) == (405, "GET")
    connection.close()
    assert asked(server, b"/") == 200


ELSEWHERE = [
    *(
        b"/metrics.jsonl",
        b"/../metrics.jsonl",
        b"/..%2f..%2fetc/passwd",
        b"/%2e%2e/",
        b"//etc/passwd",
        b"/etc/passwd",
    ),
    *(
        b"/state.json/..",
        b"/./",
        b"/%00",
        b"/state.json%00",
        b"http://[",
        b"file:///etc/passwd",
        b"*",
        b"/#",
        b"/;/",
    ),
    *(b"\\..\\", b"/" + b"a" * 60_000, "/ü".encode()),
]


@pytest.mark.parametrize("path", ELSEWHERE, ids=lambda path: path[:20].decode())
def test_there_is_no_other_path(server: Server, path: bytes) -> None:
    assert asked(server, path) == (404 if path.startswith(b"/") else 403)  # else it changes the token
    assert asked(server, b"/state.json?since=" + b"&=%%" * 1000) == 200


NO_REQUESTS = [
    b"",
    b"\0" * 100,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 500 + b"\r\n",
    b"GET /" + b"a" * 10**5 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: " + b"a" * 10**5 + b"\r\n\r\n",
    b"\xff\xfe GET / \r\n\r\n",
    b"GET <script> HTTP/1.1\r\nHost: <script>\r\n\r\n",
]


@pytest.mark.parametrize("request_bytes", NO_REQUESTS, ids=lambda request: f"{len(request)} bytes")
def test_what_is_no_request_is_survived(server: Server, request_bytes: bytes) -> None:
    answer = raw(server, request_bytes)
    assert b"<script>" not in answer
    assert b"charts" not in answer
    assert asked(server, b"/") == 200
