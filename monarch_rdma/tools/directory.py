"""`monarch-rdma directory`: a process that keeps the names of published weights."""

from __future__ import annotations

import threading
from pathlib import Path

from ..actor.joining.job_secret import job_secret
from ..actor.joining.worker_address import TcpAddress, parse, port_of
from ..errors import ConfigError, ResourceExhausted
from ..sharding.name_server import NameServer

__all__ = ["run"]


def run(address: str, secret_file: Path | None) -> int:
    """Serves until SIGTERM or Ctrl-C. ConfigError without a secret or for a wrong address; ResourceExhausted where that
    is taken.
    """
    where = parse(address)
    if not isinstance(where, TcpAddress):
        raise ConfigError(f"address {address!r} is a file, but a directory listens at tcp://host:port")
    with NameServer(secret=job_secret(secret_file), **where.options) as server:
        if port_of(server.address) != where.port:
            raise ResourceExhausted(
                f"address {address!r} is taken: another process listens at port {where.port}", operation="listen"
            )
        print(f"names are kept at {address}", flush=True)
        try:
            threading.Event().wait()
        except (KeyboardInterrupt, SystemExit):
            return 0
    return 0
