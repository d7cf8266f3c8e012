"""Casts over large meshes: the sender serves a few actors' processes, each of these passes it on to a part of the rest.

Members stand in the order of their hosts, so that what is large crosses between two hosts once. Each process hands the
call to its own actor and tells its parent when all below it have it; only then does the sender's next message to any of
them leave, so that messages stay in order although they go different ways. Where a process in the middle is lost, its
parent sends to everyone below it once more; casts have numbers, and nobody takes one twice. Whom a process cannot reach
its parent tries, and at last the sender. Answers go up the same tree together, or combined; see collect.py and
reduce.py.
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

from ...errors import PeerLost, RdmaError, TransferTimeout
from ..encoding.codec import Outgoing
from ..failure import SupervisionError, encode_failure
from ..future import Future
from . import holders, message
from .collect import Collector
from .message import Frame
from .reduce import Reducer

if TYPE_CHECKING:
    from .proc import Proc

__all__ = ["Branches", "Cast", "Member", "next_number", "on_cast", "saves_transfers", "start"]

_SIZE = struct.Struct("<I")
_PATIENCE = 60.0  # seconds that a process may take no frames
_numbers = itertools.count(1)


class Member(NamedTuple):
    """`number`: of the actor there, where it is not the cast's target."""

    rank: int
    address: str
    number: int = 0


@dataclass(frozen=True)
class Cast:
    """What travels down the tree, beside the call's body."""

    sender: str  # address of the process that called
    number: int  # counts that process's casts
    fanout: int
    flags: int  # of the call, as are the next ones
    target: int  # the number of most of the actors
    reply: int
    method: bytes
    extent: bytes
    is_collected: bool = False  # answers go up the tree together
    reduction: bytes = b""  # ... combined; see reduce.py


class Branches:
    """The processes right below this one: sends to them, and waits until all below have the call.

    `done` ends then, never with an error: that somebody is lost is for others to tell. Until then it holds the large
    buffers.
    """

    def __init__(
        self,
        proc: Proc,
        cast: Cast,
        groups: Sequence[Sequence[Member]],
        outgoing: Outgoing,
        *,
        up: int,
        collector: Collector | None = None,
        done: Future[None] | None = None,
        patience: float = 0.0,
    ) -> None:
        """The first of each group gets the call from here, and passes it on to the others of its group. `up`: the
        number here that takes their answers, `collector`'s where these are collected. `done`: ends with this.
        `patience`: seconds that this thread may wait for room.
        """
        self.done: Future[None] = done or Future.pending()
        self.missed: list[Member] = []  # could not be reached from here: for the parent to try
        self._proc = proc
        self._cast = cast
        self._up = up
        self._collector = collector
        self._outgoing = outgoing
        self._lock = threading.Lock()
        self._number = proc.register(self)
        self._open = {group[0].address: group for group in groups}
        for group in groups:
            self._send(group, patience)

    def on_frame(self, frame: Frame) -> None:
        if frame.kind != message.DELIVERED:
            return
        missed = [Member(*member) for member in pickle.loads(frame.body)] if frame.body else []
        self.missed += [member for member in missed if member.address == frame.address]
        self._close(frame.address, [member for member in missed if member.address != frame.address])

    def on_lost(self, address: str, error: SupervisionError) -> None:
        self._on_missed(address, error)

    def _send(self, group: Sequence[Member], patience: float) -> None:
        address = group[0].address
        self._proc.expect(self._number, address)
        if self._collector is not None:
            self._collector.wait_for(address)
        head = message.pack(message.CAST, group[0].number or self._cast.target, reply=self._number)
        meta = pickle.dumps((self._cast, self._up, [tuple(member) for member in group]))
        try:
            self._proc.post(address, head, b"".join((_SIZE.pack(len(meta)), meta, self._outgoing.body)), patience)
        except TransferTimeout as error:
            if patience:
                self._on_missed(address, error)
            else:  # this thread may be the one that receives: it does not wait
                self._proc.errands.run(address, partial(self._send, group, _PATIENCE))
        except (SupervisionError, RdmaError) as error:
            self._on_missed(address, error)

    def _on_missed(self, address: str, error: Exception) -> None:
        """It is lost, or takes nothing from here."""
        group = self._open.get(address)
        if group is None:
            return
        self.missed.append(group[0])
        if self._collector is not None:
            self._collector.give_up(str(error))
        if self._cast.sender == self._proc.address and not isinstance(error, SupervisionError):
            self._tell_caller(group[0].rank, error)
        self._close(address, group[1:])

    def _tell_caller(self, rank: int, error: Exception) -> None:
        """At the root, of one that lives and has not got the call: nobody else will say so."""
        if self._cast.reply:
            failure = encode_failure(SupervisionError(str(error), self._cast.method.decode()))
            head = message.pack(message.SEND, self._cast.reply, flags=message.FAILED, rank=rank)
            self._proc.post_quietly(self._proc.address, head, failure.body)

    def _close(self, address: str, orphans: Sequence[Member]) -> None:
        """This branch has the call, or is lost. `orphans`: those of it that have not, and get it from here."""
        with self._lock:
            if self._open.pop(address, None) is None:
                return
            self._open.update({member.address: [member] for member in orphans})
            is_last = not self._open
        self._proc.fulfil(self._number, address)
        for orphan in orphans:
            self._proc.errands.run(orphan.address, partial(self._send, [orphan], _PATIENCE))
        if is_last and self._proc.forget(self._number):
            self._outgoing.release()
            self.done.set_result(None)


def start(
    proc: Proc,
    cast: Cast,
    members: Sequence[Member],
    alone: Sequence[Member],
    outgoing: Outgoing,
    done: Future[None],
) -> None:
    """Sends from the root. `alone`: to these directly, after what was sent to them directly before. `done`: ends when
    all have it.
    """
    hosts = by_host(members)
    here = hosts.pop(host_of(proc.address), [])
    if outgoing.num_large and len(here) + len(hosts) <= cast.fanout:  # to another host once, here from our memory
        groups: list[Sequence[Member]] = [*([member] for member in here), *hosts.values()]
    else:
        groups = split([*here, *itertools.chain(*hosts.values())], cast.fanout)
    groups += [[member] for member in alone]
    Branches(proc, cast, groups, outgoing, up=cast.reply, done=done, patience=_PATIENCE)


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
    arrived = _Arrived(proc, frame, cast, up, [Member(*member) for member in raw], frame.body[_SIZE.size + size :])
    if cast.flags & message.LARGE:
        proc.errands.run(("cast", cast.sender), partial(arrived.relay_large, seen))  # one that comes again after it
    else:
        arrived.relay(seen)


class _Arrived:
    """A cast at a process that it goes through. `up`: the parent's number that takes answers."""

    def __init__(
        self, proc: Proc, frame: Frame, cast: Cast, up: int, members: Sequence[Member], body: memoryview
    ) -> None:
        self._proc = proc
        self._frame = frame
        self._cast = cast
        self._up = up
        self._members = members
        self._target = members[0].number or cast.target
        self._body = body

    def relay(self, seen: dict[tuple[str, int], int]) -> None:
        outgoing = Outgoing(bytes(self._body))
        if self._is_new(seen):
            call = self._call()
            collector = call.collector  # a quick actor may answer another way, and leave it
            self._note(seen)
            self._proc.on_frame(call)
            self._pass_on(outgoing, collector)
        else:
            self._pass_on(outgoing, None)

    def relay_large(self, seen: dict[tuple[str, int], int]) -> None:
        """Reads the buffers, offers them further down, and only then lets the actor have them."""
        if not self._is_new(seen):  # it may also have come again while the first one waited to be read
            return self._pass_on(Outgoing(bytes(self._body)), None)
        call = self._call()
        collector = call.collector
        try:
            call.incoming.fetch(timeout=None)
            outgoing = call.incoming.relay() if len(self._members) > 1 else Outgoing(b"")
            outgoing.body = bytes(self._body[: len(self._body) - len(call.body)]) + outgoing.body  # ports
        except PeerLost:  # with our parent; its own parent sends to us again
            if collector is not None:
                self._proc.forget(collector.number)
            return self._tell_parent(self._members)
        except (RdmaError, MemoryError) as error:
            self._proc.refuse(call, f"large arguments could not be read by process {self._proc.name}: {error}")
            outgoing = Outgoing(bytes(self._body))  # those below read from our parent's memory
        else:
            self._proc.on_frame(call)
        self._note(seen)
        self._pass_on(outgoing, collector)

    def _is_new(self, seen: dict[tuple[str, int], int]) -> bool:
        return self._cast.number > seen.get((self._cast.sender, self._target), 0)

    def _note(self, seen: dict[tuple[str, int], int]) -> None:
        seen[self._cast.sender, self._target] = self._cast.number

    def _call(self) -> Frame:
        """For our actor."""
        cast = self._cast
        collector = None
        if cast.is_collected:
            kind = Reducer if cast.reduction else Collector
            collector = kind(self._proc, cast, self._frame.address, self._up, len(self._members))
        ports, body = None, self._body
        if cast.flags & message.PORTS:
            ports, body = holders.split(self._proc, body)
        return Frame(
            message.CALL,
            cast.flags & ~message.LARGE,
            self._members[0].rank,
            self._target,
            cast.reply,
            0,
            cast.method,
            cast.extent,
            body,
            cast.sender,
            collector,
            ports=ports,
        )

    def _pass_on(self, outgoing: Outgoing, collector: Collector | None) -> None:
        """To those below; then the parent is told."""
        if len(self._members) == 1:
            return self._tell_parent(())
        up = self._up if collector is None else collector.number
        groups = split(self._members[1:], self._cast.fanout)
        branches = Branches(self._proc, self._cast, groups, outgoing, up=up, collector=collector)
        branches.done.add_callback(lambda: self._tell_parent(branches.missed))

    def _tell_parent(self, missed: Sequence[Member]) -> None:
        """That all from here on have it, except for those `missed`."""
        body = pickle.dumps([tuple(member) for member in missed]) if missed else b""
        self._proc.post_quietly(self._frame.address, message.pack(message.DELIVERED, self._frame.reply), body)


def split(members: Sequence[Member], count: int) -> list[Sequence[Member]]:
    """At most `count` parts of about the same size, in order."""
    count = max(1, min(count, len(members)))
    ends = [len(members) * part // count for part in range(count + 1)]
    return [members[begin:end] for begin, end in itertools.pairwise(ends) if begin < end]


def host_of(address: str) -> str:
    """What tells hosts apart in an address: the boot that it names."""
    _, _, query = address.partition("?")
    return next((item for item in query.split("&") if item.startswith("boot=")), address)
