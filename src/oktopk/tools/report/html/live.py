"""The page served on this machine alone, while a run is going on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ..analysis import runs
from ..analysis.figures import report
from .page import check_drawing, contents, in_script, page

LOOPBACK = "127.0.0.1"
PERIOD = 2000
"""Milliseconds after which a page asks again."""
_PART_OF_TIME = 10
"""Reading takes at most one of so many seconds: training needs the processor."""
log = logging.getLogger(__name__)


class Source:
    """The runs as they are now; read again when their files have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders, self._names = folders, runs.names(folders)
        self._lock = threading.Lock()
        self._version, self._document = "", dict[str, Any]()
        self._not_before = 0.0

    def now(self) -> tuple[str, dict[str, Any]]:
        with self._lock:
            start, version = time.monotonic(), runs.state(self._folders)
            if version != self._version and start >= self._not_before:
                pairs = zip(self._folders, self._names, strict=True)
                self._document = report([runs.read(folder, name) for folder, name in pairs])
                self._version = version
                self._not_before = start + _PART_OF_TIME * (time.monotonic() - start)
            return self._version, self._document


class Server(ThreadingHTTPServer):
    """GET of two names, asked for under a name of this machine: no page elsewhere can read them."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        self.source = Source(folders)
        super().__init__((LOOPBACK, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("whoever asked has left", exc_info=True)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30
    server_version, sys_version = "oktopk", ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in (f"{LOOPBACK}:{self.server.port}", f"localhost:{self.server.port}"):
            return self._answer(
                HTTPStatus.MISDIRECTED_REQUEST, "ask for this page by the address it was told with\n"
            )
        path, _, query = self.path.partition("?")
        makers: dict[str, Callable[[str], None]] = {"/": self._page, "/state.json": self._state}
        maker = makers.get(path)
        if maker is None:
            return self._answer(HTTPStatus.NOT_FOUND, "there is nothing but the report\n")
        try:
            return maker(query)
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("the report could not be made")
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"the report could not be made: {error}\n")

    def _refuse(self) -> None:
        self.close_connection = True
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "GET only\n", allow="GET")

    def __getattr__(self, name: str) -> Any:
        """http.server asks for do_POST and the like, and says that it is not implemented if there is none."""
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _page(self, _: str) -> None:
        version, document = self.server.source.now()
        self._answer(HTTPStatus.OK, page(document, version, PERIOD), "text/html")

    def _state(self, query: str) -> None:
        """All that a page shows, or nothing if that is what it has already."""
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
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def serve(folders: Sequence[Path], port: int, told: Callable[[str], None]) -> None:
    """Until Ctrl-C. `told` hears the address."""
    check_drawing()
    with Server(folders, port) as server:
        try:
            told(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            log.debug("Ctrl-C")
