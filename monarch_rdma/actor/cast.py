"""Sends one encoded call to the actors of a mesh."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import message
from .failure import SupervisionError
from .port import note_holders
from .transmission import Transmission

if TYPE_CHECKING:
    from .codec import Outgoing
    from .proc import Proc
    from .reply import Waiting
    from .route import Route

__all__ = ["cast"]


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
    same. ResourceExhausted, TransferTimeout where a mailbox or a process takes nothing.
    """
    transmission = Transmission(proc, outgoing, [route.address for route in routes]) if outgoing.num_large else None
    origin = 0
    if waiting is not None:
        reply = waiting.number
    if transmission is not None:
        origin, flags = transmission.number, flags | message.LARGE
    is_counted = not flags & (message.NEW | message.STOP)
    lost: SupervisionError | None = None
    sent = 0
    try:
        for rank, route in enumerate(routes, first_rank):
            head = message.pack(
                message.CALL,
                route.number,
                flags=flags,
                rank=rank,
                reply=reply,
                origin=origin,
                method=method,
                extent=extent,
            )
            try:
                if is_counted:
                    route.enter(deadline)
                proc.post(route.address, head, outgoing.body, max(0.0, deadline - time.monotonic()))
            except SupervisionError as error:
                lost = error
                if transmission is not None:
                    transmission.drop(route.address, 1)
                if waiting is not None:
                    waiting.on_failed(rank, error)
            sent += 1
    except BaseException:
        if waiting is not None:
            waiting.finish()
        if transmission is not None:
            for route in routes[sent:]:
                transmission.drop(route.address, 1)
        raise
    note_holders(proc, [route.address for route in routes])
    if transmission is not None and not transmission.taken.wait(
        None if waiting is None or waiting.timeout is None else deadline - time.monotonic()
    ):
        transmission.abandon()
    if lost is not None and waiting is None:
        raise lost
