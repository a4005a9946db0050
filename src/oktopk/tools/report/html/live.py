"""Serve the page of a running job, on this machine only."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ..analysis import runs
from ..analysis.document import build_report
from .page import build_page, check_plotly, contents, in_script

LOOPBACK = "127.0.0.1"
PERIOD = 2000
"""Polling interval of the page in milliseconds."""
_PART_OF_TIME = 10
"""Read at most one tenth of the time: training needs the CPU."""
log = logging.getLogger(__name__)


class Source:
    """The current state of the runs; reads them again when their files change."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders, self._names = folders, runs.name_runs(folders)
        self._lock = threading.Lock()
        self._version, self._document = "", dict[str, Any]()
        self._not_before = 0.0

    def now(self) -> tuple[str, dict[str, Any]]:
        with self._lock:
            start, version = time.monotonic(), runs.fingerprint(self._folders)
            if version != self._version and start >= self._not_before:
                pairs = zip(self._folders, self._names, strict=True)
                self._document = build_report([runs.read_run(folder, name) for folder, name in pairs])
                self._version = version
                self._not_before = start + _PART_OF_TIME * (time.monotonic() - start)
            return self._version, self._document


class Server(ThreadingHTTPServer):
    """Serves two paths below a random token, on loopback only.

    Other users of the machine can connect, but do not know the token. Other web pages can send requests, but not
    under this machine's own name.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        self.source = Source(folders)
        self.token = secrets.token_urlsafe(16)
        super().__init__((LOOPBACK, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("the client has disconnected", exc_info=True)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30
    server_version, sys_version = "oktopk", ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in (f"{LOOPBACK}:{self.server.port}", f"localhost:{self.server.port}"):
            return self._answer(
                HTTPStatus.MISDIRECTED_REQUEST, "open this page by the address that oktopk report printed\n"
            )
        path, _, query = self.path.partition("?")
        token, _, name = path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._answer(
                HTTPStatus.FORBIDDEN, "open this page by the whole address that oktopk report printed\n"
            )
        makers: dict[str, Callable[[str], None]] = {"": self._page, "state.json": self._state}
        maker = makers.get(name) if path.count("/") == 2 else None
        if maker is None:
            return self._answer(HTTPStatus.NOT_FOUND, "not found: only the report is here\n")
        try:
            return maker(query)
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("building the report failed")
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"building the report failed: {error}\n")

    def _refuse(self) -> None:
        self.close_connection = True
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "GET only\n", allow="GET")

    def __getattr__(self, name: str) -> Any:
        """Refuse every other method; without do_POST and the like, http.server would answer 501."""
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _page(self, _: str) -> None:
        version, document = self.server.source.now()
        self._answer(HTTPStatus.OK, build_page(document, version, PERIOD), "text/html")

    def _state(self, query: str) -> None:
        """Answer with the state of the page, or with nothing if the page already has it."""
        version, document = self.server.source.now()
        if parse_qs(query).get("since") == [version]:
            return self._answer(HTTPStatus.NO_CONTENT, "")
        state = contents(document, live=True).state(version, PERIOD)
        return self._answer(HTTPStatus.OK, in_script(state), "application/json")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain", **headers: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        fixed = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests have the token in them."""


def serve(folders: Sequence[Path], port: int, announce: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; announce(url) is called once the server is up."""
    check_plotly()
    with Server(folders, port) as server:
        try:
            announce(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            log.debug("Ctrl-C")
