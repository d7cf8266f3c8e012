"""The bare yardstick of a message: a thread of another Python process sends back what comes through a Unix socket."""

from __future__ import annotations

import argparse
import socket
import threading
from collections.abc import Callable

from lines import LineProcess, answer_lines

SIZE = 64  # bytes


class SocketPair:
    """Calling it is one round trip, from the calling thread."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            fd = str(theirs.fileno())
            self._echo = LineProcess("socket_pair.py", "--fd", fd, pass_fds=(theirs.fileno(),))
        self._message = bytes(SIZE)

    @property
    def pid(self) -> int:
        """The other process."""
        return self._echo.pid

    def __call__(self) -> None:
        self._socket.sendall(self._message)
        left = SIZE
        while left:
            left -= len(self._socket.recv(left))

    def close(self) -> None:
        self._socket.close()
        self._echo.close()


def echo(fd: int) -> Callable[..., None]:
    def serve(connection: socket.socket) -> None:
        while data := connection.recv(SIZE):
            connection.sendall(data)

    threading.Thread(target=serve, args=(socket.socket(fileno=fd),), daemon=True).start()
    return lambda **_: None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    fd = parser.parse_args().fd
    answer_lines(lambda: echo(fd))
