"""oktopk report as a command, and its server: this machine only, two names only, news only when there are any."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oktopk.cli import main
from oktopk.tools.report.html.live import LOOPBACK, Server
from oktopk.utils.extras import install_command
from tests.support.machine import heeded
from tests.support.report_runs import served, write_run, write_steps

pytestmark = pytest.mark.timeout(400)  # a busy machine takes long to import torch


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(write_run(tmp_path, steps=6, warmup=2)) as running:
        yield running


def ask(
    server: Server, path: str, method: str = "GET", host: str | None = None, token: str | None = None
) -> tuple[int, bytes, dict[str, str]]:
    """Ask for a path below the token, that of the server unless told otherwise."""
    connection = http.client.HTTPConnection(LOOPBACK, server.port, timeout=60)
    try:
        whole = f"/{server.token}{path}" if token is None else f"{token}{path}"
        connection.request(method, whole, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def test_the_page_and_its_state_and_nothing_else(server: Server, tmp_path: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, body, headers = ask(server, "/")
    assert status == 200
    assert b"oktopk report" in body
    assert headers["Cache-Control"] == "no-store"
    for path in ("/metrics.jsonl", "/../config.toml", "/%2e%2e/", f"/{tmp_path}/plan.json", "/page.js"):
        assert ask(server, path)[0] == 404, path


def test_who_does_not_know_the_token_is_refused(server: Server, tmp_path: Path) -> None:
    right = server.token
    assert server.url == f"http://127.0.0.1:{server.port}/{right}/"
    assert len(right) >= 22  # 128 bits
    wrong = (
        "",
        "/",
        "/x",
        f"/{right[:-1]}",
        f"/{right}x",
        f"/{right.swapcase()}",
        f"/x/{right}",
        "/%C3%A4",
    )
    for token in wrong:
        for path in ("/", "/state.json", "/state.json?since=x", f"/?token={right}"):
            status, body, _ = ask(server, path, token=token)
            assert (status, b"oktopk report printed" in body) == (403, True), (token, path)
    with served(tmp_path) as other:
        assert other.token != right
        assert ask(other, "/state.json", token=f"/{right}")[0] == 403


def test_get_only(server: Server) -> None:
    assert ask(server, "/", "HEAD")[:2] == (405, b"")
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert ask(server, "/", method)[0] == 405, method


def test_who_asks_under_another_name_is_refused(server: Server) -> None:
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", ""):
        status, body, _ = ask(server, "/state.json", host=host)
        assert status == 421, host
        assert b"charts" not in body
    assert ask(server, "/state.json", host=f"localhost:{server.port}")[0] == 200


def test_there_is_news_when_the_files_have_changed(server: Server, tmp_path: Path) -> None:
    state = json.loads(ask(server, "/state.json")[1])
    since = f"/state.json?since={state['version'].replace(' ', '%20')}"
    assert ask(server, since)[0] == 204
    write_steps(tmp_path, 6, 9, warmup=2, world=3, buckets=2)
    deadline = time.monotonic() + 120
    while (answer := ask(server, since))[0] == 204:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    news = json.loads(answer[1])
    assert news["charts"].keys() == state["charts"].keys()
    assert {f"{name}-caption" for name in news["charts"]} < news["parts"].keys()
    assert "Of 9 steps so far" in news["parts"]["r0-answers"]


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2, warmup=1)
    command = [sys.executable, "-m", "oktopk", "report", "--live", str(tmp_path)]
    with heeded(signal.SIGINT):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with child:
        try:
            assert child.stdout is not None
            assert re.search(r"http://127\.0\.0\.1:\d+/[-\w]{22} ", child.stdout.readline().replace("/ ", " "))
            child.send_signal(signal.SIGINT)
            assert child.wait(240) == 0
            assert child.stderr is not None
            assert child.stderr.read() == ""
        finally:
            child.kill()


def test_a_page_or_json_of_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=6, warmup=2)
    assert main(["report", str(run), "-o", str(tmp_path / "new" / "page.html")]) == 0
    said = capsys.readouterr().out
    assert main(["report", str(run), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["runs"][0]
    text = re.sub("<[^>]*>", "", (tmp_path / "new" / "page.html").read_text())  # answers are folded
    for one in figures["answers"]:
        assert one["answer"] in said
        assert one["answer"].partition("'")[0] in text


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--json", "--live"], 2, "--json and --live cannot be combined"),
        (["--port", "80"], 2, "--port needs --live"),
        ([], 1, "no run in"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, sentence: str
) -> None:
    assert main(["report", str(tmp_path), *options]) == code
    assert sentence in capsys.readouterr().err


def test_without_plotly_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["report", str(write_run(tmp_path, steps=2, warmup=1)), "-o", str(tmp_path / "p.html")]) == 1
    assert install_command("report") in capsys.readouterr().err
    assert not (tmp_path / "p.html").exists()


def test_without_plotly_no_address_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["report", "--live", str(write_run(tmp_path, steps=2, warmup=1))]) == 1
    said = capsys.readouterr()
    assert install_command("report") in said.err
    assert said.out == ""
