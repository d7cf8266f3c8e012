"""A worker process, from its fork to its end."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ... import config
from ...rdma.engine import adopt_secret, default_engine
from ...rdma.secret import Secret
from ..debugging import breakpoints
from ..failure import SupervisionError
from ..launch.placement import absolute
from ..metrics import export_where_used
from ..runtime import message
from ..runtime.message import Frame
from ..runtime.proc import AGENT, Proc, close_current, current_proc

__all__ = ["leave", "main", "planted", "seed", "serve"]

_log = logging.getLogger("monarch_rdma.actor")
_OWN_OPTIONS = frozenset({"name", "secret_file", "secret_fd", "port_min", "port_max"})  # of one process alone
_HOST_OPTIONS = ("listen_host", "advertise_host", "ip_family")  # of all processes of a host
_ENDING: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}  # what they do elsewhere
_reasons: SimpleQueue[str] = SimpleQueue()  # to end; a signal handler may put one in at any moment
_held_off = threading.local()  # the signal mask of a thread that forks
_bell: list[int] = []  # of a process that serves: the ends of the pipe that wakes it, for good


def seed(bootstrap: Callable[[], Any] | None) -> bytes:
    """What processes started from here have to know: our options, import path and client, and what to run first."""
    import cloudpickle

    options = {name: value for name, value in config.get_runtime_config().items() if name not in _OWN_OPTIONS}
    path = [absolute(entry) for entry in sys.path]
    run_first = None if bootstrap is None else cloudpickle.dumps(bootstrap)
    return pickle.dumps((options, path, current_proc().client, run_first))


def planted(name: str, rank: int, arrivals: int, seed: bytes) -> bytes:
    """The payload of one process, made by the agent that starts it: `arrivals` waits there for its address."""
    options = {option: config.get(option) for option in _HOST_OPTIONS}
    return pickle.dumps((name, rank, arrivals, current_proc().address, options, seed))


def main(payload: bytes, fds: list[int]) -> int:
    """The entry of each worker: runs in its main thread until the process shall end."""
    name, rank, arrivals, agent, host_options, seeded = pickle.loads(payload)
    options, path, client, bootstrap = pickle.loads(seeded)
    sys.path[:] = _usable(path)
    config.configure(**{**options, **host_options, "name": name})
    adopt_secret(Secret.from_fd(fds[0]))
    proc = current_proc()
    for number in _ENDING:
        signal.signal(number, _on_signal)
    faulthandler.enable(all_threads=False)  # the last lines of a crash say where in Python it was
    os.register_at_fork(before=_hold_off, after_in_child=_be_an_ordinary_process, after_in_parent=_hold_off_no_more)
    proc.client = client
    _join(proc, agent)
    if bootstrap is not None:
        try:
            pickle.loads(bootstrap)()
        except Exception as error:
            text = f"bootstrap failed in process {name}: {type(error).__name__}: {error}"
            proc.post(agent, message.pack(message.SEND, arrivals, flags=message.FAILED), text.encode())
            raise
    export_where_used()
    proc.post(agent, message.pack(message.SEND, arrivals, rank=rank), proc.address.encode())
    serve()
    return 0


def _on_signal(number: int, _: object) -> None:
    leave(f"signal {signal.Signals(number).name}")


def _hold_off() -> None:
    """A signal that reaches a fork before it is an ordinary process waits until it is."""
    _held_off.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def _hold_off_no_more() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held_off.mask)


def _be_an_ordinary_process() -> None:
    """In a fork that an endpoint made, of multiprocessing for example: signals end it, and ring no bell of ours."""
    for number, ordinary in _ENDING.items():
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, ordinary)
            signal.set_wakeup_fd(-1)
    _hold_off_no_more()


def serve() -> None:
    """Blocks until `leave`, then ends this process's actors and its engine."""
    _log.debug("the process ends: %s", _wait_for_reason())
    close_current()
    default_engine().close()


def _wait_for_reason() -> str:
    """A signal may reach any thread, but is handled by the main one, which sleeps here: hence the pipe."""
    if not _bell:
        _bell.extend(os.pipe2(os.O_CLOEXEC))
        os.set_blocking(_bell[1], False)
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(_bell[1], warn_on_full_buffer=False)
    while _reasons.empty():
        os.read(_bell[0], 4096)
    reason = _reasons.get()
    while not _reasons.empty():
        _reasons.get()
    return reason


def _usable(path: list[str]) -> list[str]:
    """The spawner's path as far as it exists here, then our own: its host may be another one."""
    path = [entry for entry in path if os.path.exists(entry)]
    return [*path, *(entry for entry in sys.path if entry not in path)]


def _join(proc: Proc, agent: str) -> None:
    from ..joining.introduction import introduce
    from ..mesh import HostMesh
    from ..shape import Extent
    from .agent import ProcAgent
    from .pulse import Pulsing

    proc.agent = agent
    proc.hosts = HostMesh("host", [agent], Extent([], []).region)
    introduce(proc)
    proc.start_local(AGENT, ProcAgent, "agent")
    Pulsing(proc)
    breakpoints.install(proc)
    proc.expect(proc.register(_Lifeline()), agent)


class _Lifeline:
    """Without its agent a process has no purpose."""

    def on_frame(self, frame: Frame) -> None:
        """Nothing is sent here."""

    def on_lost(self, address: str, error: SupervisionError) -> None:
        leave(f"its agent is lost: {error}")


def leave(reason: str) -> None:
    """Ends this process soon: its actors first, with their `__cleanup__`."""
    _reasons.put(reason)
    if _bell:
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            os.write(_bell[1], b"\0")
