"""Names of weights in a process of their own, for jobs that have no torch.distributed Store in common but a secret.

# in one process: `monarch-rdma directory host:22300`, or     # in all others
server = NameServer()                                         publish(model, "policy", directory="host:22300")
directory = server.directory                                  Reader("policy", model, directory="host:22300")

What a rank offers is sent to the server in a message, and looked up there by readers; the engine's own thread answers.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import zlib
from typing import Any

from ..errors import ConfigError, RdmaError, TransferTimeout
from ..rdma import Engine, default_engine, names
from ..rdma.messages import Inbox, Stop, send
from .deadline import Deadline

__all__ = ["NameDirectory", "NameServer"]

_PREFIX = "monarch_rdma/names/"
_PUT_TIMEOUT = 60.0  # seconds
_ADDRESS = re.compile(r"(tcp://)?[^\s/@?#]+:\d+|mrdma://\S+")
_log = logging.getLogger("monarch_rdma.sharding")


class NameServer:
    """Keeps names until it is closed. Any thread may make one; it has an engine of its own."""

    def __init__(self, **options: Any) -> None:
        """`options`: of the engine, such as secret, listen_host, port_min; by default the default engine's secret."""
        if "secret" not in options:
            options["secret"] = default_engine().secret
        self._engine = Engine(**{"name": "names", **options})
        self._stop = Stop()
        self._inbox = Inbox(self._engine)
        self._thread = threading.Thread(target=self._serve, name="names", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return self._engine.address

    @property
    def directory(self) -> NameDirectory:
        """To give to publishers and readers, in this and in other processes."""
        return NameDirectory(self.address)

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                batch = self._inbox.take(None, self._stop)
            except ConfigError:  # the engine was closed: the program ends
                return
            for kind, sender, data in batch:
                if kind == 0:
                    self._take(sender, bytes(data))

    def _take(self, sender: str, data: bytes) -> None:
        header, _, blob = data.partition(b"\n")
        try:
            name, rank, ranks = json.loads(header)
            names.publish(self._engine, _key(name, rank), blob)
            names.publish(self._engine, _key(name, "ranks"), str(int(ranks)).encode())
        except (ValueError, TypeError, RdmaError) as error:  # of a member that is of another version or has no room
            _log.warning("a message from %s is no offer of a name: %s", sender, error)

    def close(self) -> None:
        """Forgets all names."""
        self._stop.set()
        self._thread.join()
        self._engine.close()

    def __enter__(self) -> NameServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NameDirectory:
    """The names at a NameServer. A value: it travels in any message."""

    def __init__(self, address: str, *, engine: Engine | None = None) -> None:
        """`address`: of the server, such as host:port. `engine`: that talks to it; None for the default one."""
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise ConfigError(f"address is {address!r}, but must be that of a directory, such as host:22300")
        self.address = address.removeprefix("tcp://")
        self._engine = engine

    def put(self, name: str, rank: int, ranks: int, offer: bytes) -> None:
        """As Directory.put: returns when readers find it. PeerLost, TransferTimeout; ResourceExhausted for an offer
        that is too large for a message.
        """
        deadline = Deadline(_PUT_TIMEOUT)
        engine = self._engine or default_engine()
        blob = zlib.compress(offer, 1)
        send(engine, self.address, json.dumps([name, rank, ranks]).encode() + b"\n", deadline.left(), body=blob)
        while self._found(_key(name, rank), deadline) != blob:
            if deadline.is_over():
                raise TransferTimeout(f"the directory at {self.address} has not taken {name!r}", operation="publish")
            deadline.pause()

    def get(self, name: str, timeout: float | None) -> list[bytes]:
        """As Directory.get. PeerLost where the server is not there."""
        deadline = Deadline(timeout)
        ranks = int(self._wait(_key(name, "ranks"), name, deadline))
        return [zlib.decompress(self._wait(_key(name, rank), name, deadline)) for rank in range(ranks)]

    def _wait(self, key: str, name: str, deadline: Deadline) -> bytes:
        while (found := self._found(key, deadline)) is None:
            if deadline.is_over():
                raise TransferTimeout(f"nobody has offered {name!r} in time", operation="fetch")
            deadline.pause()
        return found

    def _found(self, key: str, deadline: Deadline) -> bytes | None:
        left = deadline.left()
        try:
            limit = None if left is None else max(left, 1.0)  # of one question, however little time is left
            return names.look_up(self._engine or default_engine(), self.address, key, limit)
        except ConfigError:  # there is no such name
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return NameDirectory, (self.address,)


def _key(name: str, what: int | str) -> str:
    return f"{_PREFIX}{name}/{what}"
