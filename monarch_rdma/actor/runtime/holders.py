"""Who has the ports that were sent on: a holder's process may be lost, or let go of a port that a caller waits for.

Ports that travel in a message are told of twice: to whoever they belong to (HOLD: that process has it now), and, before
the body, to the receiver, which may never load the message. Each process that lets go of its last copy of a response
port unused says so (HOLD with FAILED). When as many have let go as were given it, nobody is left to answer.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from . import message

if TYPE_CHECKING:
    from .message import Frame
    from .proc import Proc

__all__ = ["Holders", "PortKey", "Travelling", "arrived_now", "give", "pack", "release", "split"]

_COUNT = struct.Struct("<H")
_ENTRY = struct.Struct("<QIHB")  # number, rank, length of the address, is_response


class PortKey(NamedTuple):
    """`address` of the process it belongs to, its number there, the rank that answers through it."""

    address: str
    number: int
    rank: int
    is_response: bool


class SentPort(Protocol):
    @property
    def key(self) -> PortKey: ...

    def given(self) -> None:
        """Another process has it now."""


def pack(ports: Sequence[SentPort]) -> bytes:
    """What stands before the body of a message with these ports in it."""
    parts = [_COUNT.pack(len(ports))]
    for address, number, rank, is_response in (port.key for port in ports):
        name = address.encode()
        parts += (_ENTRY.pack(number, rank, len(name), is_response), name)
    return b"".join(parts)


def split(proc: Proc, body: memoryview) -> tuple[Travelling, memoryview]:
    """The ports in front of a body, and the body."""
    (count,) = _COUNT.unpack_from(body)
    at, keys = _COUNT.size, []
    for _ in range(count):
        number, rank, length, is_response = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        keys.append(PortKey(bytes(body[at : at + length]).decode(), number, rank, bool(is_response)))
        at += length
    return Travelling(proc, keys), body[at:]


def give(proc: Proc, ports: Sequence[SentPort], holders: Sequence[str]) -> None:
    """The message with these ports is on its way to these processes."""
    for port in ports if holders else ():
        address, number, rank, is_response = port.key
        for holder in holders:
            if is_response or holder != address:
                head = message.pack(message.HOLD, number, rank=rank)
                proc.post_quietly(address, head, holder.encode())
        port.given()


def release(proc: Proc, key: PortKey) -> None:
    """This process has one copy less of a response port, and has not used it. For destructors too."""
    head = message.pack(message.HOLD, key.number, flags=message.FAILED, rank=key.rank)
    proc.later(lambda: proc.post_quietly(key.address, head))


class Travelling:
    """The ports in a message that arrived. Those that nobody has unpickled when it is let go of are released."""

    __slots__ = ("_keys", "_proc")

    def __init__(self, proc: Proc, keys: list[PortKey]) -> None:
        self._proc = proc
        self._keys = keys

    def __enter__(self) -> None:
        """Until the end of the block, this thread unpickles them."""
        _loading.now.append(self)

    def __exit__(self, *_: object) -> None:
        _loading.now.pop()

    def take(self, key: PortKey) -> Proc | None:
        """It was unpickled: its object looks after it from now on. None where it is not one of these."""
        if key not in self._keys:
            return None
        self._keys.remove(key)
        return self._proc

    def __del__(self) -> None:
        for key in self._keys:
            if key.is_response:
                release(self._proc, key)


class _Loading(threading.local):
    def __init__(self) -> None:
        self.now: list[Travelling] = []


_loading = _Loading()


def arrived_now(key: PortKey) -> Proc | None:
    """Of a port that is being unpickled: the process that it has come to, if it came in a message."""
    return _loading.now[-1].take(key) if _loading.now else None


class Holders:
    """Of the response ports of one call: by rank, how often each process was given it and has not let go of it."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[str]] = {}

    def on_frame(self, rank: int, first: str, frame: Frame) -> bool:
        """A HOLD came. `first`: the process that was called. Whether nobody has the port any more.

        Frames of several processes have no order: a count may be negative for a while.
        """
        counts = self._counts.setdefault(rank, Counter({first: 1}))
        if frame.flags & message.FAILED:
            counts[frame.address] -= 1
        else:
            counts[holder_in(frame)] += 1
        return not any(counts.values())

    def ranks_of(self, address: str) -> list[int]:
        """Those whose port is there."""
        return [rank for rank, counts in self._counts.items() if counts[address] > 0]

    @property
    def addresses(self) -> set[str]:
        # By any thread: each list is made in one step.
        return {address for counts in list(self._counts.values()) for address in list(counts)}


def holder_in(frame: Frame) -> str:
    """Whom a HOLD names."""
    return bytes(frame.body).decode()
