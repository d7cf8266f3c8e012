"""Serves metrics to Prometheus: one page, over HTTP, on an address that the user chose."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ...errors import ConfigError
from .registry import Reading, collect
from .text import CONTENT_TYPE, render

__all__ = ["Server"]

_log = logging.getLogger("monarch_rdma.supervision")
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
_BREATH = 0.1  # seconds
_PATIENCE = 5.0  # seconds for a client to send its request or take its answer


class Server:
    """Answers GET /metrics until `close`. Without connections it sleeps."""

    def __init__(self, listen: str, gather: Callable[[], Iterable[Reading]] = collect) -> None:
        """`listen`: "HOST:PORT" or "[HOST]:PORT"; port 0 takes a free one. Anyone who reaches the address can read the
        metrics; 127.0.0.1 is this host alone. `gather` gives what is served, and is called by one thread at a time.

        Raises ConfigError where the address is none or cannot be listened on.
        """
        match = _ADDRESS.fullmatch(listen)
        if match is None or int(match["port"]) > 65535:
            raise ConfigError(f"metrics_listen is {listen!r}, but must be HOST:PORT, such as 127.0.0.1:9464")
        host = match["v6"] or match["host"]
        try:
            self._http = _Http((host, int(match["port"])), gather)
        except OSError as error:
            raise ConfigError(f"metrics_listen is {listen!r}, which cannot be listened on: {error}") from error
        port = self._http.server_address[1]
        self.url = f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
        self._is_open = True
        _servers.add(self)
        self._thread = threading.Thread(target=self._serve, name="monarch_rdma-metrics", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self._is_open:
            self._http.handle_request()  # waits for the next one without a timeout

    def close(self) -> None:
        """Idempotent. Requests that are being answered are not waited for."""
        if self._is_open:
            self._is_open = False
            self._http.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join()
            self._http.socket.close()


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A fork serves nothing, and must not keep the address."""
    for server in list(_servers):
        if server._is_open:
            server._is_open = False
            server._http.socket.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], gather: Callable[[], Iterable[Reading]]) -> None:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._gather = gather
        self._gathering = threading.Lock()
        super().__init__(found[0][4][:2], _Page)  # type: ignore[arg-type]

    def page(self) -> bytes:
        with self._gathering:
            return render(self._gather()).encode("utf-8", "backslashreplace")

    def server_bind(self) -> None:
        """Without asking the name service for the host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(_BREATH)  # it would fail again at once
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request for metrics from %s failed", client_address, exc_info=True)


class _Page(BaseHTTPRequestHandler):
    server: _Http
    timeout = _PATIENCE
    server_version = "monarch_rdma"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            return self.send_error(HTTPStatus.NOT_FOUND)
        page = self.server.page()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *arguments: Any) -> None:
        _log.debug(f"metrics: {format}", *arguments)
