"""What a process of a job says of itself to who knows only where it listens.

Frames carry complete addresses, which hold a process's incarnation. Whoever was given `host:port` asks for the complete
one first, through an engine of its own for this one question: a connection made by the plain address would stay beside
the real one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

from ... import config
from ...errors import ConfigError, PeerLost, ProtocolError, TransferTimeout
from ...rdma.engine import Engine
from ...rdma.names import look_up, publish
from ...rdma.secret import Secret
from ..runtime.proc import Proc
from . import rendezvous
from .controller import offer_controllers
from .worker_address import FileAddress, engine_address, parse

__all__ = ["Introduction", "ask", "introduce"]

_NAME = "monarch_rdma.actor"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between attempts
_BEGINNING = 2.0  # seconds for which a process that listens may not have introduced itself yet
_MOST_AT_ONCE = 32


@dataclass(frozen=True)
class Introduction:
    """`address`: complete. `host`: the address of its host's agent. `client`: of the process that has the job's
    controllers; None for a worker loop, which serves whoever comes.
    """

    address: str
    host: str
    client: str | None

    @property
    def is_host_agent(self) -> bool:
        return self.host == self.address


def introduce(proc: Proc) -> None:
    """Lets this process answer those who ask."""
    assert proc.hosts is not None, "introduced once it is known"
    (host,) = proc.hosts._chosen()
    offer_controllers(proc)
    blob = json.dumps(asdict(Introduction(proc.address, host, proc.client)))
    publish(proc.engine, _NAME, blob.encode())


def ask(addresses: Sequence[str], secret: Secret, timeout: float) -> list[Introduction]:
    """Asks all of them at once; those that cannot be reached again and again, until `timeout` seconds have passed.

    Raises PeerLost, TransferTimeout, AuthenticationError, ProtocolError, or ConfigError (a malformed address, a process
    that takes no part in the actor layer).
    """
    for address in addresses:
        if engine_address(address) is None:
            parse(address)
    deadline = time.monotonic() + timeout
    with _asking_engine(secret, timeout) as engine, ThreadPoolExecutor(min(_MOST_AT_ONCE, len(addresses))) as pool:
        try:
            return list(pool.map(partial(_ask_patiently, engine, deadline, timeout), addresses))
        finally:
            engine.close()  # where one fails or the wait is interrupted, the others end


def _asking_engine(secret: Secret, timeout: float) -> Engine:
    """It only dials: it needs neither a port out of our range nor to be found."""
    return Engine(
        secret=secret,
        name="asker",
        listen_host="::1" if config.get("ip_family") == 6 else "127.0.0.1",
        advertise_host="",
        port_min=0,
        port_max=0,
        lanes="shm",
        connect_timeout=max(0.01, min(float(config.get("connect_timeout")), timeout)),
    )


def _ask_patiently(engine: Engine, deadline: float, timeout: float, address: str) -> Introduction:
    pause, until = _FIRST_PAUSE, 0.0
    while True:
        try:
            return _ask(engine, address, max(0.01, deadline - time.monotonic()))
        except PeerLost as error:
            if time.monotonic() + pause > deadline:
                raise PeerLost(
                    f"no process of the job was reached at {address} within {timeout:g} s: {error}",
                    peer=address,
                    operation="attach",
                ) from error
        except ConfigError as error:
            until = until or time.monotonic() + _BEGINNING
            if time.monotonic() + pause > until or not engine.is_open:
                raise
            if time.monotonic() + pause > deadline:
                raise TransferTimeout(f"{error} (asked for {timeout:g} s)", peer=address, operation="attach") from error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _ask(engine: Engine, address: str, timeout: float) -> Introduction:
    try:
        blob = look_up(engine, _dialled(address), _NAME, timeout)
    except ConfigError as error:
        raise ConfigError(f"{address} is no worker loop, nor a client that has called this_host(): {error}") from error
    try:
        said = json.loads(blob)
        return Introduction(str(said["address"]), str(said["host"]), said["client"] and str(said["client"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"what the process at {address} says of itself is malformed: {error}") from error


def _dialled(address: str) -> str:
    complete = engine_address(address)
    if complete is not None:
        return complete
    where = parse(address)
    if not isinstance(where, FileAddress):
        return where.dial
    return _dialled(rendezvous.read_shared(where.path) if where.is_shared else rendezvous.read(where.path))
