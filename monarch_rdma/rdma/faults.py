"""Faults on a connection of this process, put there on purpose: what a broken network would do."""

from __future__ import annotations

from .._engine import ffi, lib
from ..errors import ConfigError
from .engine import Engine, default_engine, raise_error

__all__ = ["KINDS", "put_fault"]

KINDS = {
    "break": lib.MR_FAULT_BREAK,
    "cut": lib.MR_FAULT_CUT,
    "slow": lib.MR_FAULT_SLOW,
    "corrupt": lib.MR_FAULT_CORRUPT,
}


def put_fault(
    address: str, kind: str, seconds: float = 0.0, amount: float = 0.0, *, engine: Engine | None = None
) -> None:
    """Does it to the connection between `engine` (None: this process's) and the engine at `address`, on this side.

    "break": its sockets end. "cut": for `seconds` nothing gets through, and nobody is told. "slow": for `seconds` only
    `amount` bytes a second are read, on each socket. "corrupt": the next frame that comes has a damaged head, in the
    way 0, 1 or 2 that `amount` names; whoever reads it finds that, and ends the connection. The shm and verbs lanes
    have no sockets: they go on until the connection is lost.

    ConfigError for what is no fault; PeerLost where there is no connection.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}, but must be one of {', '.join(KINDS)}")
    handle = (engine or default_engine()).handle
    error = ffi.new("mr_error *")
    if problem := lib.mr_peer_fault(handle, address.encode(), KINDS[kind], seconds, amount, error):
        raise_error(error, problem, operation="fault")
