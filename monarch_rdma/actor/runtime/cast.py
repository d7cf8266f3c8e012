"""Sends one encoded call to the actors of a mesh: to each directly, or, to more than `cast_fanout`, over a tree."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ... import config
from ...errors import ResourceExhausted
from ..failure import SupervisionError
from ..future import Future
from . import holders, message, tree
from .transmission import Transmission
from .tree import Cast

if TYPE_CHECKING:
    from ..encoding.codec import Outgoing
    from .proc import Proc
    from .reply import Waiting
    from .route import Route

__all__ = ["cast"]


class _Receiver(NamedTuple):
    rank: int
    route: Route


def cast(
    proc: Proc,
    routes: Sequence[Route],
    outgoing: Outgoing,
    method: bytes,
    extent: bytes,
    waiting: Waiting | None,
    deadline: float,
    first_rank: int = 0,
    flags: int = 0,
    reply: int = 0,
) -> None:
    """Returns when the receivers have what is large in it. `deadline`: for finding room, by time.monotonic().

    Raises SupervisionError where nobody waits for the answers and a receiver is lost; the others get theirs all the
    same. ResourceExhausted, TransferTimeout where a mailbox or a process takes nothing; then some may have the call.
    """
    if waiting is not None:
        reply = waiting.number
    if len(routes) == 1 and not outgoing.num_large and not outgoing.passengers:
        return _to_one(proc, routes[0], outgoing, method, extent, waiting, deadline, first_rank, flags, reply)
    if outgoing.num_large:
        flags |= message.LARGE
    if outgoing.passengers:
        flags |= message.PORTS
        outgoing.body = holders.pack(outgoing.passengers) + outgoing.body
    call = Cast(proc.address, 0, 0, flags, routes[0].number, reply, method, extent)
    receivers = [_Receiver(rank, route) for rank, route in enumerate(routes, first_rank)]
    patience = None if waiting is None or waiting.timeout is None else deadline
    fanout = _fanout()
    try:
        is_large = outgoing.num_large and tree.saves_transfers(proc, [route.address for route in routes])
        if len(receivers) > fanout or is_large:
            call = replace(call, fanout=fanout, flags=flags | message.PATIENT)
            lost = _over_tree(proc, receivers, outgoing, waiting, deadline, patience, call)
        else:
            lost = _directly(proc, receivers, outgoing, waiting, deadline, patience, call)
    except BaseException:
        if waiting is not None:
            waiting.finish()
        raise
    if outgoing.passengers:
        holders.give(proc, outgoing.passengers, [route.address for rank, route in receivers if rank not in lost])
    if lost and waiting is None:
        raise lost[max(lost)]


def _to_one(
    proc: Proc,
    route: Route,
    outgoing: Outgoing,
    method: bytes,
    extent: bytes,
    waiting: Waiting | None,
    deadline: float,
    rank: int,
    flags: int,
    reply: int,
) -> None:
    """What most calls are: small, and to one actor."""
    head = message.pack(message.CALL, route.number, flags=flags, rank=rank, reply=reply, method=method, extent=extent)
    try:
        _send(proc, route, head, outgoing.body, deadline, reply, is_counted=not flags & _UNCOUNTED)
    except SupervisionError as error:
        _fail(rank, error, waiting)
        if waiting is None:
            raise
    except BaseException:
        if waiting is not None:
            waiting.finish()
        raise


def _send(proc: Proc, route: Route, head: bytes, body: bytes, deadline: float, reply: int, *, is_counted: bool) -> None:
    route.enter(deadline, takes_place=is_counted)
    route.last_direct = reply or _UNANSWERED
    try:
        proc.post(route.address, head, body, max(0.0, deadline - time.monotonic()))
    except BaseException:
        if is_counted:
            route.give_back()
        raise


def _directly(
    proc: Proc,
    receivers: Sequence[_Receiver],
    outgoing: Outgoing,
    waiting: Waiting | None,
    deadline: float,
    patience: float | None,
    call: Cast,
) -> dict[int, SupervisionError]:
    """Those that are lost, by rank."""
    transmission = None
    if outgoing.num_large:
        transmission = Transmission(proc, outgoing, [receiver.route.address for receiver in receivers])
    origin = 0 if transmission is None else transmission.number
    lost: dict[int, SupervisionError] = {}
    unsent = list(receivers[::-1])
    try:
        for rank, route in receivers:
            head = message.pack(
                message.CALL,
                route.number,
                flags=call.flags,
                rank=rank,
                reply=call.reply,
                origin=origin,
                method=call.method,
                extent=call.extent,
            )
            try:
                is_counted = not call.flags & _UNCOUNTED
                _send(proc, route, head, outgoing.body, deadline, call.reply, is_counted=is_counted)
            except SupervisionError as error:
                lost[rank] = _fail(rank, error, waiting)
                if transmission is not None:
                    transmission.drop(route.address, 1)
            unsent.pop()
    except BaseException:
        if transmission is not None:
            for _, route in unsent:
                transmission.drop(route.address, 1)
        raise
    if transmission is not None:
        _await_taken(transmission, patience, waiting, call)
    return lost


def _await_taken(transmission: Transmission, patience: float | None, waiting: Waiting | None, call: Cast) -> None:
    if not transmission.taken.wait(_seconds_to(patience)):
        transmission.abandon()
    elif transmission.refusal:
        what = call.method.decode() if waiting is None else waiting.what
        raise ResourceExhausted(
            f"{what}: {transmission.refusal}. Two actors that send each other that much wait for each other, unless "
            "one of them leaves its handler; a timeout= of its own has a call wait for longer",
            operation="call",
        )


def _over_tree(
    proc: Proc,
    receivers: Sequence[_Receiver],
    outgoing: Outgoing,
    waiting: Waiting | None,
    deadline: float,
    patience: float | None,
    call: Cast,
) -> dict[int, SupervisionError]:
    """Those that are lost, by rank."""
    lost: dict[int, SupervisionError] = {}
    entered: list[_Receiver] = []
    members: list[tree.Member] = []
    alone: list[tree.Member] = []
    for receiver in receivers:
        try:
            receiver.route.enter(deadline, takes_place=not call.flags & _UNCOUNTED)
            entered.append(receiver)
        except SupervisionError as error:
            lost[receiver.rank] = _fail(receiver.rank, error, waiting)
    if not entered:
        return lost
    # A method that answers through a port may let others answer, from anywhere.
    is_collected = waiting is not None and waiting.wants_all and not call.flags & message.PORT
    reduction = b"" if waiting is None or not is_collected else waiting.reduction
    done: Future[None] = Future.pending()
    with _line_up:  # one order for all: two casts that wait for each other would never leave
        numbered = replace(call, number=tree.next_number(), is_collected=is_collected, reduction=reduction)
        before = []
        for receiver in entered:
            cast_before, is_direct = receiver.route.begin_cast(done)
            before.append(cast_before)
            number = 0 if receiver.route.number == call.target else receiver.route.number
            member = tree.Member(receiver.rank, receiver.route.address, number)
            (alone if is_direct else members).append(member)
    try:
        _await_all(before, deadline)
    except BaseException:
        if not call.flags & _UNCOUNTED:
            for receiver in entered:
                receiver.route.give_back()
        _end_after(before, done)
        raise
    try:
        tree.start(proc, numbered, members, alone, outgoing, done)
    except BaseException:
        done.set_result(None)
        raise
    if outgoing.num_large and not done.wait(_seconds_to(patience)):
        outgoing.release()
    return lost


def _await_all(casts: Sequence[Future[None] | None], deadline: float) -> None:
    """Those that other threads have begun: members take casts in the order of their numbers."""
    for cast in casts:
        if cast is not None and not cast.wait(max(0.0, deadline - time.monotonic())):
            raise ResourceExhausted("another cast to these actors is still on its way", operation="call")


def _end_after(casts: Sequence[Future[None] | None], done: Future[None]) -> None:
    """Of a cast that never left: what waits for it may go when those before it are over."""
    pending = next((cast for cast in casts if cast is not None and not cast.done()), None)
    if pending is None:
        done.set_result(None)
    else:
        pending.add_callback(lambda: _end_after(casts, done))


_fanout = config.Kept("cast_fanout", int)
_UNANSWERED = -1
_line_up = threading.Lock()
_UNCOUNTED = message.NEW | message.STOP  # they need no place in the mailbox


def _fail(rank: int, error: SupervisionError, waiting: Waiting | None) -> SupervisionError:
    if waiting is not None:
        waiting.on_unsent(rank, error)
    return error


def _seconds_to(when: float | None) -> float | None:
    return None if when is None else when - time.monotonic()
