"""Blobs published under names: how processes that know only an address find out more. Served without the GIL."""

from __future__ import annotations

from .._engine import ffi, lib
from .engine import Engine, as_text, raise_error, scratch, seconds

__all__ = ["look_up", "publish", "unpublish"]

_USUAL = 64 << 10  # bytes


def publish(engine: Engine, name: str, blob: bytes) -> None:
    """Makes `blob` findable, and replaces what was there. ResourceExhausted over half of max_frame_bytes."""
    error = scratch.error
    if kind := lib.mr_publish(engine.handle, as_text(name, "name"), blob, len(blob), error):
        raise_error(error, kind, operation="publish", size=len(blob))


def unpublish(engine: Engine, name: str) -> None:
    """ConfigError where nothing is published under the name."""
    error = scratch.error
    if kind := lib.mr_unpublish(engine.handle, as_text(name, "name"), error):
        raise_error(error, kind, operation="unpublish")


def look_up(engine: Engine, address: str, name: str, timeout: float | None) -> bytes:
    """What the engine at `address` (plain `host:port` too) has published. Connects if need be.

    ConfigError where there is no such name; PeerLost, TransferTimeout, AuthenticationError, ProtocolError.
    """
    length, error, capacity, limit = ffi.new("uint64_t *"), scratch.error, _USUAL, seconds(timeout)
    while True:
        out = ffi.new("uint8_t[]", capacity)
        call = (engine.handle, as_text(address, "address"), as_text(name, "name"), limit, out, capacity, length, error)
        if kind := lib.mr_lookup(*call):
            raise_error(error, kind, operation="lookup", peer=address)
        if length[0] <= capacity:
            return bytes(ffi.buffer(out, length[0]))
        capacity = int(length[0])
