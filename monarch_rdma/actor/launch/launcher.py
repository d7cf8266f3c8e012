"""Starting worker processes: forked by a warmed template, watched until they end.

One thread per template waits for all its descriptors: the socket to the template, the pipes of stdout and stderr, and
the pidfds. All callbacks are made on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import logging
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ...errors import ConfigError, PeerLost, ResourceExhausted, TransferTimeout
from . import placement, template
from .started import STREAMS, OutputPipe, Started, guarded, how_it_ended, parent_of, status_of_zombie

__all__ = ["ProcessSpec", "Started", "Template"]

_log = logging.getLogger(__name__)

_ROOT = str(Path(__file__).resolve().parents[2])  # where `import monarch_rdma` finds the package
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from monarch_rdma.actor.launch.template import main; main({}, {})"
_READS_OF_A_FULL_PIPE = 16  # 64 KiB each
_SLOWEST_DEATH = 30.0  # seconds that the kernel may need to take large memory apart
_IN_FLIGHT = 32  # workers asked for and not answered yet: bounds descriptors under way

OnLines = Callable[["Started", str, list[str]], None]


@dataclass(frozen=True)
class ProcessSpec:
    """One worker to start.

    Attributes:
        name: shown by ps and in messages.
        payload: given to the entry function.
        env: variables that differ from the template's; None removes one. Variables that the interpreter or a preloaded
            module reads when it starts (PYTHONHASHSEED, LD_PRELOAD) belong into the template's `env`.
        cwd: working directory; None keeps the template's.
        bind: `cpunodebind`, `membind`, `physcpubind`, `cpus`: lists such as "0-3,8" (see `placement.bound`).
        threads: thread count of OpenMP, MKL, OpenBLAS and torch; None leaves it to them.
        visible_devices: GPUs to see, counted among those that are visible here; None means all.
    """

    name: str
    payload: bytes = b""
    env: Mapping[str, str | None] = field(default_factory=dict)
    cwd: str | None = None
    bind: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    visible_devices: Sequence[int] | None = None

    def order(self, base: Mapping[str, str]) -> dict[str, Any]:
        """What the template needs to know, checked; `base` is the template's environment. Raises ConfigError."""
        if not isinstance(self.name, str) or not self.name or "\0" in self.name:
            raise ConfigError(f"name is {self.name!r}, but must be a string that is not empty, without NUL")
        if not isinstance(self.payload, bytes):
            raise ConfigError(f"payload is of type {type(self.payload).__name__}, but must be bytes")
        if self.cwd is not None and not os.path.isdir(self.cwd):
            raise ConfigError(f"cwd is {self.cwd!r}, which is no directory of this host")
        cpus, memory = placement.bound(self.bind)
        env = placement.environment(self.env, base)
        changes = placement.threads_changes(self.threads) | placement.visible_devices(self.visible_devices, env)
        return {
            "name": self.name,
            "payload": self.payload,
            "env": dict(self.env) | changes,
            "cwd": None if self.cwd is None else os.path.abspath(self.cwd),
            "cpus": cpus,
            "memory": memory,
            "threads": self.threads,
        }


class _Request:
    """A worker asked for: first its number, then the answer."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.pipes: list[int] = []  # reading ends, until a Started has them
        self.answer: Started | str | None = None
        self.abandoned = False


class Template:
    """A process that has imported what workers need, and forks them.

    Returns at once; imports go on in the template. It and its workers end with `close`, and also when this process ends
    without it, whatever they are doing. A Ctrl-C in the terminal does not reach them: they have a session of their own.

    Args:
        entry: "module:function", called as `entry(payload: bytes, fds: list[int])` in the main thread of each worker.
            What it returns becomes the exit code (None = 0).
        preload: modules to import once, in the template. They must start no threads.
        python: interpreter; default this one.
        env: variables that differ from this process's; None removes one.
        on_lines: called with (process, "stdout" or "stderr", lines) for what workers and the template (whose name is
            "template") print. Called on the template's thread: whoever takes long holds up all of them.
        name: of the template, in messages.

    Raises:
        ConfigError: an argument is wrong, or there is no such interpreter.
        ResourceExhausted: no descriptors or processes are left.
    """

    def __init__(
        self,
        *,
        entry: str = "monarch_rdma.actor.hosting.worker:main",
        preload: Sequence[str] = (),
        python: str | None = None,
        env: Mapping[str, str | None] | None = None,
        on_lines: OnLines | None = None,
        name: str = "template",
    ) -> None:
        module, _, function = entry.partition(":")
        if not module or not function:
            raise ConfigError(f"entry is {entry!r}, but must be 'module:function'")
        if isinstance(preload, str):
            raise ConfigError(f"preload is {preload!r}, but must be a sequence of module names")
        self._environment = placement.environment(env or {})
        self._on_lines = on_lines
        self._owner = os.getpid()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._requests: dict[int, _Request] = {}  # not answered yet
        self._numbers = itertools.count()
        self._ready = False
        self._closing = False
        self._failure = ""  # what an import failed with
        self._gone = ""  # why no worker can be forked any more
        # Of the watching thread:
        self._control_open = True
        self._workers: dict[int, Started] = {}  # by pid, until the template has said how it ended
        self._pipes: dict[Started, list[OutputPipe]] = {}

        self._popen, pidfd, self._control, pipes = _execute(python, self._environment)
        self._selector = selectors.PollSelector()
        self.process = Started(name, self._popen.pid, pidfd)
        self._register(self.process, pipes)
        self._selector.register(self._control, selectors.EVENT_READ, self._on_message)
        with contextlib.suppress(template.Disconnected):  # the thread will see how it ended
            hello = ("hello", f"monarch_rdma {name}", *_path_for(python), sys.argv, list(preload), entry)
            template.send(self._control, hello)
        self._thread = threading.Thread(target=self._run, name=f"{name}-watcher", daemon=True)
        self._thread.start()

    def __enter__(self) -> Template:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- for any thread ----------------------------------------------------------------------------------------------

    def wait_ready(self, timeout: float = 300) -> None:
        """Waits until the imports are done. Raises ConfigError where one fails, PeerLost, TransferTimeout."""
        self._check_usable()
        with self._changed:
            done = self._changed.wait_for(lambda: self._ready or self._gone, timeout)
            self._raise_if_gone()
        if not done:
            raise TransferTimeout(f"{self.process.name} (pid {self.process.pid}) is not ready after {timeout:g} s")

    def spawn(self, specs: Sequence[ProcessSpec], fds: Sequence[int] = (), timeout: float = 300) -> list[Started]:
        """Forks a worker per spec: all, or none and an error. Returns when they run, not when their entry is done.

        Args:
            specs: what to start.
            fds: descriptors that each worker gets duplicates of. They stay the caller's here.
            timeout: seconds for all of it, the template's imports included.

        Raises:
            ConfigError: a spec is wrong, a module cannot be imported, or this template is closed.
            PeerLost: the template process has ended.
            TransferTimeout: it did not answer in time.
            ResourceExhausted: no descriptors or processes are left.
        """
        self._check_usable()
        orders = [spec.order(self._environment) for spec in specs]
        _check_fds(fds)
        deadline = time.monotonic() + timeout
        requests: list[_Request] = []
        try:
            for order in orders:
                if len(requests) >= _IN_FLIGHT:
                    self._answered(requests[-_IN_FLIGHT], deadline)
                requests.append(_Request(order))  # before it is sent: also a Ctrl-C must find it
                self._ask(requests[-1], fds, deadline)
            return [self._answered(request, deadline) for request in requests]
        except BaseException:
            self._abandon(requests)
            raise

    def close(self, timeout: float = 2.0) -> None:
        """Ends the workers (SIGTERM, and SIGKILL after `timeout` seconds), then the template. Nothing of them is left.

        All that they printed has been handed on when this returns. Does nothing the second time, nor in a fork.
        """
        if os.getpid() == self._owner:
            self.begin_close(timeout)
            if threading.current_thread() is not self._thread:
                self._join(timeout + 1)

    def begin_close(self, timeout: float = 2.0) -> None:
        """The first half of close: does not wait."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            is_first, self._closing = not self._closing, True
            is_listening = self._ready and not self._gone
            self._gone = self._gone or f"{self.process.name} is closed"
            self._changed.notify_all()
        if is_first:
            try:
                if is_listening:
                    self._send(("close", timeout), (), time.monotonic() + 0.5)
                else:  # it may be importing or stopped; the kernel ends its workers with it
                    self.process.kill()
            except (template.Disconnected, TransferTimeout):
                self.process.kill()

    def _join(self, timeout: float) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.process.kill()
            self._thread.join(_SLOWEST_DEATH)
            if self._thread.is_alive():
                _log.warning("%s: killed processes do not end; they are held in the kernel", self.process.name)

    # --- asking ------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if os.getpid() != self._owner:
            raise ConfigError(f"{self.process.name} belongs to process {self._owner}; a fork of it has to make its own")
        if threading.current_thread() is self._thread:
            raise ConfigError(f"{self.process.name} cannot be waited for in one of its callbacks")
        with self._changed:
            self._raise_if_gone()

    def _raise_if_gone(self) -> None:
        if self._failure or self._closing:
            raise ConfigError(self._failure or self._gone)
        if self._gone:
            raise PeerLost(self._gone, peer=self.process.name)

    def _ask(self, request: _Request, fds: Sequence[int], deadline: float) -> None:
        request.pipes, writers = _pipes()
        request.order["fds"] = len(writers) + len(fds)
        with self._changed:
            number = next(self._numbers)
            self._requests[number] = request
        try:
            self._send(("spawn", number, request.order), [*writers, *fds], deadline)
        except template.Disconnected:
            with self._changed:
                self._changed.wait_for(lambda: self._gone, 5)
                self._raise_if_gone()
            raise PeerLost(f"{self.process.name} (pid {self.process.pid}) has ended", peer=self.process.name) from None
        finally:
            template.close_all(writers)

    def _send(self, message: tuple[Any, ...], fds: Sequence[int], deadline: float) -> None:
        if not self._sending.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise self._timeout()
        try:
            if self._control.fileno() == -1:
                raise template.Disconnected
            seconds, fraction = divmod(max(deadline - time.monotonic(), 0.001), 1)
            limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
            self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            template.send(self._control, message, fds)
        except BlockingIOError:
            # Part of the message may be under way: no other can follow.
            with self._changed:
                self._gone = self._gone or f"{self.process.name} (pid {self.process.pid}) stopped answering"
                self._changed.notify_all()
            raise self._timeout() from None
        except OSError as error:
            why = f"descriptors cannot be sent: {error.strerror}"
            raise ResourceExhausted(why, sys_errno=error.errno or 0) from error
        finally:
            self._sending.release()

    def _answered(self, request: _Request, deadline: float) -> Started:
        with self._changed:
            self._changed.wait_for(lambda: request.answer or self._gone, max(deadline - time.monotonic(), 0))
            if isinstance(request.answer, Started):
                return request.answer
            if request.answer is not None:
                raise ResourceExhausted(f"{request.order['name']} cannot be started: {request.answer}")
            self._raise_if_gone()
        raise self._timeout()

    def _timeout(self) -> TransferTimeout:
        name, pid = self.process.name, self.process.pid
        return TransferTimeout(f"{name} (pid {pid}) did not start the processes in time", peer=name, operation="spawn")

    def _abandon(self, requests: list[_Request]) -> None:
        with self._changed:
            for request in requests:
                request.abandoned = True
            started = [request.answer for request in requests if isinstance(request.answer, Started)]
        for process in started:
            process.kill()

    # --- on the watching thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # nobody shall wait for what is not watched
            _log.exception("%s: watching it failed; its processes are ended", self.process.name)
            with self._changed:
                self._gone = self._gone or f"{self.process.name} is not watched any more"
                self._changed.notify_all()
            for process in [self.process, *self._workers.values()]:
                process.kill()
                if process.returncode is None:
                    process.end(-signal.SIGKILL)

    def _watch(self) -> None:
        while self._control_open or self._workers or self.process.returncode is None:
            for key, _ in self._selector.select():
                # What an earlier event of this round has ended is registered no more.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
        for pipe in [pipe for pipes in self._pipes.values() for pipe in pipes]:
            self._close_pipe(pipe)  # held open by what a worker started and left, in a group of its own
        with self._sending:
            self._control.close()
        self._selector.close()

    def _register(self, process: Started, pipes: list[int]) -> None:
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: self._on_death(process))
        self._pipes[process] = [OutputPipe(process, stream, fd) for stream, fd in zip(STREAMS, pipes, strict=True)]
        for pipe in self._pipes[process]:
            self._selector.register(pipe.fd, selectors.EVENT_READ, functools.partial(self._on_output, pipe))

    def _on_message(self) -> None:
        try:
            message, fds = template.receive(self._control)
        except template.Disconnected:
            self._on_disconnected()
            return
        what, *rest = message
        if what == "started":
            number, pid = rest
            self._on_started(number, pid, fds)
        elif what == "exited":
            pid, status = rest
            if pid in self._workers:
                self._ended_with(self._workers.pop(pid), status)
        elif what == "refused":
            number, why = rest
            self._answer(number, why)
        elif what == "ready":
            with self._changed:
                self._ready = True
                self._changed.notify_all()
        else:
            self._failure = rest[0]  # seen by those who wait when the template has ended, which comes next

    def _on_started(self, number: int, pid: int, fds: list[int]) -> None:
        with self._changed:
            request = self._requests[number]
        if not fds:  # the kernel drops descriptors for which this process has no room
            template.close_all(request.pipes)
            request.pipes = []
            if parent_of(pid) == self.process.pid:
                os.kill(pid, signal.SIGKILL)
            self._answer(number, "no descriptors are left here; `ulimit -n` raises the limit")
            return
        process = Started(request.order["name"], pid, _above_stdio(fds[0]))
        self._workers[pid] = process
        self._register(process, request.pipes)
        request.pipes = []
        self._answer(number, process)

    def _answer(self, number: int, answer: Started | str) -> None:
        with self._changed:
            request = self._requests.pop(number)
            request.answer = answer
            self._changed.notify_all()
        template.close_all(request.pipes)
        if request.abandoned and isinstance(answer, Started):
            answer.kill()

    def _on_disconnected(self) -> None:
        self._control_open = False
        self._selector.unregister(self._control)
        with self._changed:
            requests, self._requests = self._requests, {}
        for request in requests.values():
            template.close_all(request.pipes)
        for process in list(self._workers.values()):
            if process.returncode is not None or process.pidfd not in self._selector.get_map():
                self._on_death_unexplained(process)

    def _on_death(self, process: Started) -> None:
        self._selector.unregister(process.pidfd)
        if process is self.process:
            self._on_template_death()
            return
        status = status_of_zombie(process.pid)
        if status is not None:  # a stopped template would not tell
            self._ended_with(process, status)
        if not self._control_open:
            self._on_death_unexplained(process)

    def _on_death_unexplained(self, process: Started) -> None:
        """It ended with the template, or after it: by the kernel's SIGKILL."""
        self._workers.pop(process.pid, None)
        self._ended(process, -signal.SIGKILL)

    def _on_template_death(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what workers started; the id is ours until the wait below
        code = self._popen.wait()
        self._drain(self.process)
        last = " | ".join(self.process.tail(3)["stderr"])
        with self._changed:
            end = f"{self.process.name} (pid {self.process.pid}) has ended with {how_it_ended(code)}"
            self._gone = self._gone or end + (f": {last}" if last else "")
            self._changed.notify_all()
        self._ended(self.process, code)

    def _ended_with(self, process: Started, status: int) -> None:
        self._ended(process, os.waitstatus_to_exitcode(status), has_core=os.WCOREDUMP(status))

    def _ended(self, process: Started, returncode: int, *, has_core: bool = False) -> None:
        if process.returncode is not None:
            return
        if process.pidfd in self._selector.get_map():
            self._selector.unregister(process.pidfd)
        self._drain(process)
        process.end(returncode, has_core=has_core)

    def _on_output(self, pipe: OutputPipe) -> bool:
        """Hands on what a pipe has; whether there was something."""
        data = pipe.read()
        if data:
            self._hand_on(pipe, pipe.splitter.feed(data))
        elif data is not None:
            self._close_pipe(pipe)
        return bool(data)

    def _drain(self, process: Started) -> None:
        """The last words of a process that has ended."""
        for pipe in list(self._pipes.get(process, ())):
            for _ in range(_READS_OF_A_FULL_PIPE):  # a grandchild may go on printing
                if not self._on_output(pipe):
                    break
            self._hand_on(pipe, pipe.splitter.finish())

    def _close_pipe(self, pipe: OutputPipe) -> None:
        self._hand_on(pipe, pipe.splitter.finish())
        self._selector.unregister(pipe.fd)
        os.close(pipe.fd)
        self._pipes[pipe.owner].remove(pipe)
        if not self._pipes[pipe.owner]:
            del self._pipes[pipe.owner]

    def _hand_on(self, pipe: OutputPipe, lines: list[str]) -> None:
        if lines:
            pipe.owner.add_lines(pipe.stream, lines)
            if self._on_lines is not None:
                guarded(self._on_lines, pipe.owner, pipe.stream, lines)


def _execute(python: str | None, env: dict[str, str]) -> tuple[subprocess.Popen[bytes], int, socket.socket, list[int]]:
    """Starts a template: the process, its pidfd, the socket to it, the reading ends of its output."""
    executable = python or sys.executable
    if not executable:
        raise ConfigError("python is not given, and this program does not know its interpreter (sys.executable)")
    flags = subprocess._args_from_interpreter_flags() if executable == sys.executable else []  # type: ignore[attr-defined]
    readers, writers = _pipes()
    with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as always:
        on_failure.callback(template.close_all, readers)
        always.callback(template.close_all, writers)
        try:
            mine, its = (socket.socket(fileno=_above_stdio(end.detach())) for end in socket.socketpair())
            on_failure.callback(mine.close)
            always.callback(its.close)
            client = _above_stdio(os.pidfd_open(os.getpid()))
            always.callback(os.close, client)
            popen = subprocess.Popen(
                [executable, *flags, "-c", _BOOT.format(its.fileno(), client), _ROOT],
                stdin=subprocess.DEVNULL,
                stdout=writers[0],
                stderr=writers[1],
                env=env,
                pass_fds=[its.fileno(), client],
                start_new_session=True,  # Ctrl-C is for this process, which then decides
            )
            on_failure.callback(popen.wait)
            on_failure.callback(popen.kill)
            pidfd = _above_stdio(os.pidfd_open(popen.pid))
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise ConfigError(f"python is {executable!r}, which cannot be executed: {error.strerror}") from None
        except OSError as error:
            why = f"no process can be started: {error.strerror}"
            raise ResourceExhausted(why, sys_errno=error.errno or 0) from error
        on_failure.pop_all()
    return popen, pidfd, mine, readers


def _path_for(python: str | None) -> tuple[bool, list[str]]:
    """Where a template finds modules: whether this is all, or goes before what another interpreter has of its own."""
    path = [placement.absolute(place) if os.path.isdir(place or ".") else place for place in sys.path]
    if python in (None, sys.executable):
        return True, path
    ours = tuple(os.path.join(prefix, "") for prefix in {sys.prefix, sys.base_prefix})
    return False, [place for place in path if not place.startswith(ours)]


def _pipes() -> tuple[list[int], list[int]]:
    """Reading and writing ends for stdout and stderr. Raises ResourceExhausted."""
    readers: list[int] = []
    writers: list[int] = []
    try:
        for _ in STREAMS:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            readers.append(reader)
            writers.append(writer)
    except OSError as error:
        template.close_all([*readers, *writers])
        raise ResourceExhausted(
            f"no descriptors are left for a worker's output ({error.strerror}); `ulimit -n` raises the limit",
            sys_errno=error.errno or 0,
        ) from error
    return [_above_stdio(fd) for fd in readers], [_above_stdio(fd) for fd in writers]


def _above_stdio(fd: int) -> int:
    """The same, not 0, 1 or 2: a program without stdio has those free, and what is there would become a child's."""
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def _check_fds(fds: Sequence[int]) -> None:
    if len(fds) > template.MAX_FDS - 2:
        raise ConfigError(f"fds has {len(fds)} descriptors, but at most {template.MAX_FDS - 2} can be handed down")
    for fd in fds:
        try:
            os.fstat(fd)
        except (OSError, TypeError):
            raise ConfigError(f"fds contains {fd!r}, which is no open descriptor") from None
