"""Casts over large meshes: the sender serves a few actors' processes, each of these passes it on to a part of the rest.

Members stand in the order of their hosts, so that what is large crosses between two hosts once. Each process hands the
call to its own actor and tells its parent when all below it have it; only then does the sender's next message to any of
them leave, so that messages stay in order although they go different ways. Where a process in the middle is lost, its
parent sends to everyone below it once more; casts have numbers, and nobody takes one twice. Answers go up the same
tree together; see collect.py.
"""

from __future__ import annotations

import itertools
import pickle
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...errors import PeerLost, RdmaError
from ..encoding.codec import Outgoing
from ..failure import SupervisionError
from ..future import Future
from . import message
from .collect import Collector
from .message import Frame

if TYPE_CHECKING:
    from .proc import Proc

__all__ = ["Branches", "Cast", "Member", "next_number", "on_cast", "saves_transfers", "start"]

_SIZE = struct.Struct("<I")
_numbers = itertools.count(1)


class Member(NamedTuple):
    rank: int
    address: str


@dataclass(frozen=True)
class Cast:
    """What travels down the tree, beside the call's body."""

    sender: str  # address of the process that called
    number: int  # counts that process's casts
    fanout: int
    flags: int  # of the call, as are the next ones
    target: int
    reply: int
    method: bytes
    extent: bytes
    is_collected: bool = False  # answers go up the tree together


class Branches:
    """The processes right below this one: sends to them, and waits until all below have the call.

    `done` ends then, never with an error: that somebody is lost is for others to tell. Until then it holds the large
    buffers.
    """

    def __init__(self, proc: Proc, cast: Cast, up: int, groups: Sequence[Sequence[Member]], outgoing: Outgoing) -> None:
        """The first of each group gets the call from here, and passes it on to the others of its group. `up`: the
        number here that takes their answers.
        """
        self.done: Future[None] = Future.pending()
        self._proc = proc
        self._cast = cast
        self._up = up
        self._outgoing = outgoing
        self._lock = threading.Lock()
        self._number = proc.register(self)
        self._open = {group[0].address: group for group in groups}
        self._send_all(groups)

    def on_frame(self, frame: Frame) -> None:
        if frame.kind == message.DELIVERED:
            self._close(frame.address, ())

    def on_lost(self, address: str, error: SupervisionError) -> None:
        self._close(address, self._open.get(address, ())[1:])

    def _send_all(self, groups: Sequence[Sequence[Member]]) -> None:
        for group in groups:
            self._send(group)

    def _send(self, group: Sequence[Member]) -> None:
        address = group[0].address
        self._proc.expect(self._number, address)
        head = message.pack(message.CAST, self._cast.target, reply=self._number)
        meta = pickle.dumps((self._cast, self._up, [tuple(member) for member in group]))
        try:
            self._proc.post(address, head, b"".join((_SIZE.pack(len(meta)), meta, self._outgoing.body)), 60.0)
        except (SupervisionError, RdmaError):
            self._close(address, group[1:])

    def _close(self, address: str, orphans: Sequence[Member]) -> None:
        """This branch has the call, or is lost: then `orphans` get it from us."""
        with self._lock:
            if self._open.pop(address, None) is None:
                return
            self._open.update({member.address: [member] for member in orphans})
            is_last = not self._open
        self._proc.fulfil(self._number, address)
        if orphans:
            self._proc.fetcher.do(partial(self._send_all, [[member] for member in orphans]))
        if is_last and self._proc.forget(self._number):
            self._outgoing.release()
            self.done.set_result(None)


def start(proc: Proc, cast: Cast, members: Sequence[Member], alone: Sequence[Member], outgoing: Outgoing) -> Branches:
    """Sends from the root. `alone`: to these directly, after what was sent to them directly before."""
    hosts = by_host(members)
    here = hosts.pop(host_of(proc.address), [])
    if outgoing.num_large and len(here) + len(hosts) <= cast.fanout:  # to another host once, here from our memory
        groups: list[Sequence[Member]] = [*([member] for member in here), *hosts.values()]
    else:
        groups = split([*here, *itertools.chain(*hosts.values())], cast.fanout)
    return Branches(proc, cast, cast.reply, [*groups, *([member] for member in alone)], outgoing)


def by_host(members: Sequence[Member]) -> dict[str, list[Member]]:
    hosts: dict[str, list[Member]] = {}
    for member in members:
        hosts.setdefault(host_of(member.address), []).append(member)
    return hosts


def saves_transfers(proc: Proc, addresses: Sequence[str]) -> bool:
    """Whether large arguments would go to another host more than once if each of these processes read them from us."""
    here = host_of(proc.address)
    remote = [host for host in map(host_of, addresses) if host != here]
    return len(remote) > len(set(remote))


def next_number() -> int:
    """For the casts of this process: they count up."""
    return next(_numbers)


def on_cast(proc: Proc, frame: Frame, seen: dict[tuple[str, int], int]) -> None:
    """A cast arrives: hands it to our actor and passes it on. `seen`: by sender and actor, the last one's number."""
    (size,) = _SIZE.unpack_from(frame.body)
    cast, up, raw = pickle.loads(frame.body[_SIZE.size : _SIZE.size + size])
    members = [Member(*member) for member in raw]
    body = frame.body[_SIZE.size + size :]
    if cast.number <= seen.get((cast.sender, cast.target), 0):
        return _pass_on(proc, frame, cast, up, members, Outgoing(bytes(body)))
    answer_to = None
    if cast.is_collected:
        up = Collector(proc, cast, frame.address, up, len(members)).number
        answer_to = proc.address, up
    call = Frame(
        message.CALL,
        cast.flags & ~message.LARGE,
        members[0].rank,
        cast.target,
        cast.reply,
        0,
        cast.method,
        cast.extent,
        body,
        cast.sender,
        answer_to,
    )
    if cast.flags & message.LARGE:
        return proc.fetcher.do(lambda: _relay_large(proc, frame, cast, up, members, call, seen))
    seen[cast.sender, cast.target] = cast.number
    proc.on_frame(call)
    _pass_on(proc, frame, cast, up, members, Outgoing(bytes(body)))


def _relay_large(
    proc: Proc,
    frame: Frame,
    cast: Cast,
    up: int,
    members: Sequence[Member],
    call: Frame,
    seen: dict[tuple[str, int], int],
) -> None:
    """Reads the buffers, offers them further down, and only then lets the actor have them."""
    try:
        call.incoming.fetch(timeout=None)
        outgoing = call.incoming.relay() if len(members) > 1 else Outgoing(b"")
    except PeerLost:
        return  # with our parent; its own parent sends to us again
    except (RdmaError, MemoryError) as error:
        proc.refuse(call, f"large arguments could not be read by process {proc.name}: {error}")
        outgoing = Outgoing(bytes(call.body))  # those below read from our parent's memory
    else:
        proc.on_frame(call)
    seen[cast.sender, cast.target] = cast.number
    _pass_on(proc, frame, cast, up, members, outgoing)


def _pass_on(proc: Proc, frame: Frame, cast: Cast, up: int, members: Sequence[Member], outgoing: Outgoing) -> None:
    """To those below; then the parent is told."""

    def tell() -> None:
        proc.post_quietly(frame.address, message.pack(message.DELIVERED, frame.reply))

    if len(members) == 1:
        tell()
    else:
        Branches(proc, cast, up, split(members[1:], cast.fanout), outgoing).done.add_callback(tell)


def split(members: Sequence[Member], count: int) -> list[Sequence[Member]]:
    """At most `count` parts of about the same size, in order."""
    count = max(1, min(count, len(members)))
    ends = [len(members) * part // count for part in range(count + 1)]
    return [members[begin:end] for begin, end in itertools.pairwise(ends) if begin < end]


def host_of(address: str) -> str:
    """What tells hosts apart in an address: the boot that it names."""
    _, _, query = address.partition("?")
    return next((item for item in query.split("&") if item.startswith("boot=")), address)
