"""A worker process, from its fork to its end."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from .. import config
from ..rdma.engine import adopt_secret, default_engine
from ..rdma.secret import Secret
from . import message
from .failure import SupervisionError
from .message import Frame
from .proc import AGENT, Proc, close_current, current_proc

__all__ = ["leave", "main", "planted", "seed"]

_log = logging.getLogger("monarch_rdma.actor")
_OWN_OPTIONS = frozenset({"name", "secret_file", "secret_fd", "port_min", "port_max"})  # of one process alone
_finished = threading.Event()


def seed(bootstrap: Callable[[], Any] | None) -> bytes:
    """What processes started from here have to know: our options, where we import from, what to run first."""
    import cloudpickle

    options = {name: value for name, value in config.get_runtime_config().items() if name not in _OWN_OPTIONS}
    path = [os.path.abspath(entry) for entry in sys.path]
    return pickle.dumps((options, path, None if bootstrap is None else cloudpickle.dumps(bootstrap)))


def planted(name: str, rank: int, arrivals: int, seed: bytes) -> bytes:
    """The payload of one process, made by the agent that starts it: `arrivals` waits there for its address."""
    return pickle.dumps((name, rank, arrivals, current_proc().address, seed))


def main(payload: bytes, fds: list[int]) -> int:
    """The entry of each worker: runs in its main thread until the process shall end."""
    name, rank, arrivals, agent, seeded = pickle.loads(payload)
    options, path, bootstrap = pickle.loads(seeded)
    sys.path[:] = path
    config.configure(**options, name=name)
    adopt_secret(Secret.from_fd(fds[0]))
    proc = current_proc()
    signal.signal(signal.SIGTERM, lambda *_: leave("it was terminated"))
    _join(proc, agent)
    if bootstrap is not None:
        try:
            pickle.loads(bootstrap)()
        except Exception as error:
            text = f"bootstrap failed in process {name}: {type(error).__name__}: {error}"
            proc.post(agent, message.pack(message.SEND, arrivals, flags=message.FAILED), text.encode())
            raise
    proc.post(agent, message.pack(message.SEND, arrivals, rank=rank), proc.address.encode())
    _finished.wait()
    close_current()
    default_engine().close()
    return 0


def _join(proc: Proc, agent: str) -> None:
    from .agent import ProcAgent
    from .mesh import HostMesh
    from .shape import Extent

    proc.hosts = HostMesh("host", [agent], Extent([], []).region)
    proc.start_local(AGENT, ProcAgent, "agent")
    proc.expect(proc.register(_Lifeline()), agent)


class _Lifeline:
    """Without its agent a process has no purpose."""

    def on_frame(self, frame: Frame) -> None:
        """Nothing is sent here."""

    def on_lost(self, address: str, error: SupervisionError) -> None:
        leave(f"its agent is lost: {error}")


def leave(reason: str) -> None:
    """Ends this process soon: its actors first, with their `__cleanup__`."""
    _log.debug("the process ends: %s", reason)
    _finished.set()
