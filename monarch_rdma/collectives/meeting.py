"""How the members of a group find each other: each publishes its end at its engine, and looks up the others'."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from ..errors import ConfigError, PeerLost, RdmaError, TransferTimeout
from ..rdma.engine import Engine
from ..rdma.group import CoreGroup
from ..rdma.names import look_up, publish, unpublish
from .algorithms import digest_of_choices
from .table import row_for

__all__ = ["MemberLost", "digest", "meet", "member"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between looks for a member that has not come yet
_LOOK = 1.0  # seconds that one look may take


class MemberLost(PeerLost):
    """A member was lost before the group was formed."""

    def __init__(self, rank: int, why: PeerLost) -> None:
        super().__init__(f"rank {rank} was lost before the group was formed: {why}", peer=why.peer, operation="join")
        self.rank = rank


def digest(members: Sequence[str]) -> str:
    """A name for a group of just these engines, in this order."""
    return hashlib.sha256("\n".join(members).encode()).hexdigest()[:24]


def member(engine: Engine, rank: int, size: int) -> CoreGroup:
    """This process's end of a group that is yet to meet, with the options that are best for its size."""
    row = row_for(size)
    return CoreGroup(engine, rank, size, step_bytes=row.step_bytes, choices=digest_of_choices(row))


def meet(engine: Engine, members: Sequence[str], name: str, timeout: float) -> CoreGroup:
    """Forms the group of the engines at these addresses, in the order of ranks. All call it with the same arguments.

    Raises MemberLost, TransferTimeout naming those that did not come, ConfigError.
    """
    rank = members.index(engine.address)
    group = member(engine, rank, len(members))
    key = f"collectives/{name}/{digest(members)}"
    deadline = time.monotonic() + timeout
    publish(engine, key, group.descriptor)
    try:
        descriptors = _descriptors(engine, group, members, key, deadline)
        try:
            group.join(descriptors, members, max(0.0, deadline - time.monotonic()))
        except PeerLost as error:
            lost = group.failed_rank
            raise error if lost is None else MemberLost(lost, error) from error
    except BaseException:
        group.close()
        raise
    finally:
        unpublish(engine, key)  # all have met: nobody looks for it any more
    return group


def _descriptors(engine: Engine, own: CoreGroup, members: Sequence[str], key: str, deadline: float) -> list[bytes]:
    """Of all members, in the order of ranks. Looks for those that have not come in turn: who waits for one learns that
    another is lost, for which that one may have left already.
    """
    found = {own.rank: own.descriptor}
    pause = _FIRST_PAUSE
    while True:
        missing = [rank for rank in range(len(members)) if rank not in found]
        late: RdmaError | None = None
        for rank in missing:
            try:
                limit = min(_LOOK, max(0.01, deadline - time.monotonic()))
                found[rank] = look_up(engine, members[rank], key, limit)
            except (ConfigError, TransferTimeout) as error:  # it has not come yet, or is slow to answer
                late = late or error
            except PeerLost as error:
                raise MemberLost(rank, error) from error
        if late is None:
            return [found[rank] for rank in range(len(members))]
        left = deadline - time.monotonic()
        if left <= 0:
            rank = next(rank for rank in missing if rank not in found)
            raise TransferTimeout(
                f"rank {rank} ({members[rank]}) did not come to the group in time: {late}",
                peer=members[rank],
                operation="join",
            ) from late
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
