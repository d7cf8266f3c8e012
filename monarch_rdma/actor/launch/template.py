"""The template process: imports once what workers need, then forks a worker per order of its client.

It stays single-threaded and owns no engine, so that a fork copies nothing that a thread was in the middle of. It lives
no longer than its client: it watches the client's pidfd as well as the socket, because a forked child of the client
may hold the socket open. Workers live no longer than it: the kernel kills them with it (PR_SET_PDEATHSIG).

This module runs in the template; `launcher` is the client's side. It imports little, as workers wait for it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from . import placement

__all__ = ["MAX_FDS", "Disconnected", "close_all", "main", "receive", "send"]

MAX_FDS = 250  # per message; the kernel's SCM_MAX_FD is 253
_HEADER = struct.Struct("<Q")  # bytes of the body

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SLOWEST_DEATH = 1.0  # seconds for what was killed to be gone; the kernel may hold it
_GRACE_AFTER_CLIENT = 0.7  # seconds between SIGTERM and SIGKILL when the client died without a word
_LOOK_FOR_CLIENT = 0.25  # seconds between looks at the client while imports run


class Disconnected(Exception):
    """The other side is gone."""


def send(sock: socket.socket, message: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
    """Sends one message; the receiver gets duplicates of `fds`. Raises Disconnected, BlockingIOError on a timeout."""
    body = pickle.dumps(message)
    data = _HEADER.pack(len(body)) + body
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sent = sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        while sent < len(data):
            sent += sock.send(memoryview(data)[sent:], socket.MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionResetError):
        raise Disconnected from None


def receive(sock: socket.socket, wait: Callable[[], None] | None = None) -> tuple[tuple[Any, ...], list[int]]:
    """The next message and its descriptors, close-on-exec: fewer than sent where this process has no room for them.

    `wait` is called before each read. Raises Disconnected.
    """
    fds: list[int] = []
    try:
        (size,) = _HEADER.unpack(_exactly(sock, _HEADER.size, wait, fds))
        return pickle.loads(_exactly(sock, size, wait, fds)), fds
    except BaseException:
        close_all(fds)
        raise


def _exactly(sock: socket.socket, size: int, wait: Callable[[], None] | None, fds: list[int]) -> bytes:
    data = bytearray()
    while len(data) < size:
        if wait is not None:
            wait()
        try:
            piece, more, _, _ = socket.recv_fds(sock, min(size - len(data), 1 << 20), MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            raise Disconnected from None
        fds += more
        if not piece:
            raise Disconnected
        data += piece
    return bytes(data)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def main(control_fd: int, client_fd: int) -> None:
    """The template's whole life, and in each forked child the worker's."""
    atexit.register(_leave)  # the first registered is the last called
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # a stopped template must run, to see that its client is gone
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what workers start and leave becomes our child, daemons of own sessions too
    template = _Template(socket.socket(fileno=control_fd), client_fd)
    try:
        run_worker = template.serve()
    except Disconnected:
        template.end(_GRACE_AFTER_CLIENT)
    _run(run_worker)


_exit_code = 0


def _run(worker: Callable[[], Any]) -> None:
    """Sets the exit code by the rules of sys.exit; failures are printed as Python prints them."""
    global _exit_code
    try:
        code = worker()
    except SystemExit as error:
        code = error.code
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    _exit_code = (code or 0) & 0xFF


def _leave() -> None:
    """Ends a worker, after its threads and its own exit handlers. Taking all modules apart would last far longer."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by the program
            stream.flush()
    os._exit(_exit_code)


def _is_readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _children() -> list[int]:
    """Of this process, zombies included."""
    found, own = [], str(os.getpid())
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:  # it may have ended
            if stat.read().rpartition(")")[2].split()[1] == own:
                found.append(int(pid))
    return found


class _Template:
    def __init__(self, control: socket.socket, client_fd: int) -> None:
        self._control = control
        self._client_fd = client_fd
        self._children: set[int] = set()
        self._entry: Callable[[bytes, list[int]], Any]
        self._signals = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.set_wakeup_fd(self._signals[1], warn_on_full_buffer=False)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the wake-up descriptor tells

    def serve(self) -> Callable[[], Any]:
        """Forks as ordered. Returns in a forked child, with what it has to run; raises Disconnected in the template."""
        self._prepare()
        while True:
            ready = self._wait(self._control, select.POLLIN)
            if ready == self._signals[0]:
                self._on_signals()
                continue
            message, fds = receive(self._control, lambda: self._wait_for(select.POLLIN))
            if message[0] == "close":
                self.end(message[1])
            run_worker = self._spawn(message[1], message[2], fds)
            if run_worker is not None:
                return run_worker

    def end(self, grace: float) -> NoReturn:
        """Ends the workers, with SIGTERM and after `grace` seconds with SIGKILL, then all that is left of the group."""
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + grace
        while self._children and (left := deadline - time.monotonic()) > 0:
            _is_readable(self._signals[0], left)
            self._take_signals()
            self._reap(os.WNOHANG)
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        self._reap(0)
        self._kill_orphans()
        os.killpg(0, signal.SIGKILL)  # this process too: nothing that a worker started and left stays
        os._exit(0)

    def _kill_orphans(self) -> None:
        """Those of other process groups; what they have started becomes ours with their end."""
        deadline = time.monotonic() + _SLOWEST_DEATH
        while (orphans := _children()) and time.monotonic() < deadline:
            for pid in orphans:
                with contextlib.suppress(PermissionError):  # it has become another user's
                    os.kill(pid, signal.SIGKILL)
            self._reap(os.WNOHANG)
            _is_readable(self._signals[0], 0.01)
            self._take_signals()

    def _prepare(self) -> None:
        """Imports. A failure is told to the client, and is this process's end."""
        hello, _ = receive(self._control)
        _, name, path_is_all, path, sys.argv[:], preload, entry = hello
        placement.set_title(name)
        sys.path[:] = path if path_is_all else path + sys.path
        for stream in (sys.stdout, sys.stderr):
            # Lines leave at once, so that a crash loses none.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
        gc.disable()
        signal.signal(signal.SIGALRM, self._look_for_client)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_FOR_CLIENT, _LOOK_FOR_CLIENT)
        try:
            what = ""
            for name in preload:
                what = f"preload {name!r}"
                importlib.import_module(name)
            what = f"entry {entry!r}"
            module, _, function = entry.partition(":")
            self._entry = getattr(importlib.import_module(module), function)
        except BaseException as error:  # SystemExit of an imported module included
            text = f"{what} cannot be imported by the template process: {type(error).__name__}: {error}"
            self._tell(("failed", text[:4000]))
            self.end(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        gc.freeze()  # what was imported is shared with the children: collections there must not touch it
        self._tell(("ready",))

    def _look_for_client(self, *_: object) -> None:
        if _is_readable(self._client_fd, 0):
            self.end(0)

    def _spawn(self, number: int, order: dict[str, Any], fds: list[int]) -> Callable[[], Any] | None:
        """In the template None, in the child what it has to run."""
        if len(fds) < order["fds"]:
            close_all(fds)
            self._tell(("refused", number, "the template has no descriptors left; `ulimit -n` raises the limit"))
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        try:
            with warnings.catch_warnings():  # OpenBLAS has threads, and ends them itself before a fork
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            pid = -1
            self._tell(("refused", number, f"fork: {error.strerror}"))
        if pid == 0:
            return self._become_worker(parent, order, fds)
        close_all(fds)
        if pid > 0:
            self._children.add(pid)
            pidfd = os.pidfd_open(pid)
            try:
                self._tell(("started", number, pid), [pidfd])
            finally:
                os.close(pidfd)
        return None

    def _become_worker(self, parent: int, order: dict[str, Any], fds: list[int]) -> Callable[[], Any]:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the template died before the kernel knew
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._control.close()
        out, err, *fds = fds
        os.dup2(out, 1)
        os.dup2(err, 2)
        close_all((out, err, self._client_fd, *self._signals))
        gc.enable()
        try:
            placement.enter(order)
        except OSError as error:
            print(f"{order['name']} cannot be placed: {error}", file=sys.stderr)
            os._exit(1)
        entry, payload = self._entry, order["payload"]
        return lambda: entry(payload, fds)

    def _on_signals(self) -> None:
        if signal.SIGTERM in self._take_signals():
            self.end(_GRACE_AFTER_CLIENT)
        self._reap(os.WNOHANG)

    def _take_signals(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._signals[0], 4096)
        return b""

    def _reap(self, flags: int) -> None:
        """Reports the workers that ended; without WNOHANG, waits for all of them."""
        while self._children or flags:
            try:
                pid, status = os.waitpid(-1, flags)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                self._children.discard(pid)
                with contextlib.suppress(Disconnected):  # noticed by the next read
                    self._tell(("exited", pid, status))

    def _tell(self, message: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        self._wait_for(select.POLLOUT)
        send(self._control, message, fds)

    def _wait_for(self, event: int) -> None:
        while self._wait(self._control, event, signals=False) != self._control.fileno():
            continue

    def _wait(self, sock: socket.socket, event: int, signals: bool = True) -> int:
        """Waits for `event` on the socket or a signal, and says which descriptor; Disconnected once the client died."""
        poll = select.poll()
        poll.register(sock, event)
        poll.register(self._client_fd, select.POLLIN)
        if signals:
            poll.register(self._signals[0], select.POLLIN)
        ready = [fd for fd, _ in poll.poll()]
        if self._client_fd in ready:
            raise Disconnected
        return self._signals[0] if self._signals[0] in ready else sock.fileno()
