"""A process that was started: how it ended, its last lines, and signals that can hit no other process."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable

from .logs import LineSplitter

__all__ = [
    "STREAMS",
    "OutputPipe",
    "Started",
    "dumps_core",
    "guarded",
    "how_it_ended",
    "is_stopped",
    "parent_of",
    "status_of_zombie",
]

_log = logging.getLogger(__name__)

STREAMS = ("stdout", "stderr")
_KEPT_LINES = 200  # per process and stream


class Started:
    """A process that was started: a worker, or the template itself. Its methods may be called from any thread."""

    def __init__(self, name: str, pid: int, pidfd: int) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = pidfd  # readable once the process has ended; -1 after that was seen
        self._lock = threading.Lock()
        self._returncode: int | None = None
        self.has_core = False  # once it has ended: whether the kernel wrote its memory to a file
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Started], None]] = []
        self._lines: dict[str, deque[str]] = {stream: deque(maxlen=_KEPT_LINES) for stream in STREAMS}

    def __repr__(self) -> str:
        state = "running" if self._returncode is None else how_it_ended(self._returncode)
        return f"<{self.name} pid {self.pid}: {state}>"

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        return self._returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """The return code once it has ended; None if it still runs after `timeout` seconds."""
        self._ended.wait(timeout)
        return self._returncode

    def on_exit(self, callback: Callable[[Started], None]) -> None:
        """Calls `callback` once when it has ended and its last lines are in; at once if that is so already."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def kill(self, sig: int = signal.SIGKILL) -> bool:
        """Sends a signal; False if the process has ended."""
        with self._lock:
            if self.pidfd == -1:
                return False
            try:
                signal.pidfd_send_signal(self.pidfd, sig)
            except ProcessLookupError:
                return False
        return True

    def tail(self, n: int = 20) -> dict[str, list[str]]:
        """The last lines of "stdout" and "stderr", `n` of each at most (200 are kept)."""
        with self._lock:
            return {stream: list(lines)[-n:] if n > 0 else [] for stream, lines in self._lines.items()}

    # --- for the thread that watches it ------------------------------------------------------------------------------

    def add_lines(self, stream: str, lines: list[str]) -> None:
        """Keeps what it printed."""
        with self._lock:
            self._lines[stream].extend(lines)

    def end(self, returncode: int, *, has_core: bool = False) -> None:
        """It has ended and its last lines are in: wakes those who wait, and makes the callbacks."""
        with self._lock:
            self.has_core = has_core
            self._returncode = returncode
            os.close(self.pidfd)
            self.pidfd = -1
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            guarded(callback, self)


class OutputPipe:
    """The reading end of a process's stdout or stderr."""

    def __init__(self, owner: Started, stream: str, fd: int) -> None:
        self.owner, self.stream, self.fd = owner, stream, fd
        self.splitter = LineSplitter()
        os.set_blocking(fd, False)

    def read(self) -> bytes | None:
        """None where nothing is there now; b"" at the end."""
        try:
            return os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return None


def guarded(callback: Callable[..., object], *arguments: object) -> None:
    """A callback's failure must not end the thread that watches."""
    try:
        callback(*arguments)
    except Exception:
        _log.exception("a callback of the launcher failed")


def status_of_zombie(pid: int) -> int | None:
    """The wait status of an ended process that nobody has waited for; None if somebody has."""
    fields = _proc_stat(pid)
    return int(fields[49]) if fields and fields[0] == "Z" else None  # exit_code, field 52


def is_stopped(pid: int) -> bool:
    """By SIGSTOP and the like, or by a debugger."""
    return _proc_stat(pid)[:1] in (["T"], ["t"])


def dumps_core(pid: int) -> bool:
    """Whether the kernel is writing its memory to a file, after a crash."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return "CoreDumping:\t1\n" in status.read()
    except OSError:
        return False


def parent_of(pid: int) -> int | None:
    fields = _proc_stat(pid)
    return int(fields[1]) if fields else None


def _proc_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on (see proc(5)); none where it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


def how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"
