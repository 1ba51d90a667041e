"""Serving: the page of a run that goes on, on this machine only, and what is new in it.

The page asks every two seconds. While nothing was recorded the answer is empty; otherwise it is the
data anew, and the page draws it in place, so that zoom, colours and place on the page stay.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from ..reading import ReportError
from ..run import Run
from .html import page_of, parts_of_page, payload

__all__ = ["serving"]

_HOST = "127.0.0.1"


@contextlib.contextmanager
def serving(
    read: Callable[[], Sequence[Run]], key: Callable[[], str], *, port: int = 0
) -> Iterator[str]:
    """Serve a page while the context is open.

    Costs a reading of the logs whenever they have changed and somebody looks.

    Args:
        read: Reads the runs as they are now.
        key: Changes whenever they have changed; cheap.
        port: On which; 0 for one that is free.

    Yields:
        The address.

    Raises:
        OSError: The port is taken.
    """
    source = _Source(read, key)
    handler = functools.partial(_Handler, source)
    server = http.server.ThreadingHTTPServer((_HOST, port), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
    thread.start()
    try:
        yield f"http://{_HOST}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Source:
    """The runs, read again only when they have changed."""

    def __init__(self, read: Callable[[], Sequence[Run]], key: Callable[[], str]) -> None:
        self._read = read
        self._key = key
        self._lock = threading.Lock()
        self._last: tuple[str, Sequence[Run]] | None = None

    def runs(self) -> tuple[str, Sequence[Run]]:
        with self._lock:
            key = self._key()  # before reading: what is written meanwhile is read again
            if self._last is None or self._last[0] != key:
                # A log that is just being rewritten is whole again a moment later.
                with contextlib.suppress(ReportError, OSError):
                    self._last = key, self._read()
            if self._last is None:
                raise ReportError("There is nothing to show yet.")
            return self._last


class _Handler(http.server.BaseHTTPRequestHandler):
    server_version = "midstep"

    def __init__(self, source: _Source, *given: Any) -> None:
        self._source = source
        super().__init__(*given)

    def do_GET(self) -> None:
        """Answer `/` with the page, and `/data?key=...` with what is new since that key."""
        # A page of elsewhere may point a name of its own at this address; it gets nothing.
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (_HOST, "localhost"):
            self._answer(HTTPStatus.FORBIDDEN, b"", "text/plain")
            return
        place = urllib.parse.urlsplit(self.path)
        try:
            key, runs = self._source.runs()
        except ReportError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode(), "text/plain")
            return
        if place.path == "/":
            page = page_of(runs, watching=key)
            self._answer(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")
        elif place.path == "/data":
            if urllib.parse.parse_qs(place.query).get("key") == [key]:
                self._answer(HTTPStatus.NO_CONTENT, b"", "application/json")
                return
            data = payload(runs)
            answer = {"key": key, "data": data, "parts": parts_of_page(data)}
            self._answer(HTTPStatus.OK, json.dumps(answer).encode(), "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"", "text/plain")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as its base has it
        """Say nothing: the terminal belongs to the verdict."""

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        with contextlib.suppress(ConnectionError):  # the reader has left
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)
