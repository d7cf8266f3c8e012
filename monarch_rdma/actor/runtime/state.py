"""What an actor that is started again goes on with: the hooks of its class, the last snapshot, or a peer's state.

A class that declares `__snapshot__` and `__restore__` has its state kept by its supervisor: after messages, before
their answers leave, so that what was answered is in it. Where anything of this fails, that is a StateError: nobody
goes on from nothing as if there had been no state.
"""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, RdmaError
from ...supervision.events import emit
from ..encoding.codec import encode
from ..failure import StateError, SupervisionError
from ..future import Future
from ..remote_error import ActorError
from .cast import cast
from .reply import SingleReply

if TYPE_CHECKING:
    from ..actor import Actor
    from .proc import Proc

__all__ = ["SNAPSHOT", "Keeping", "Upkeep", "check_hooks", "has_hooks", "restored"]

SNAPSHOT = "__snapshot__"
_RESTORE = "__restore__"
_PATIENCE = 60.0  # seconds for a snapshot to be kept
_PEER_PATIENCE = 10.0  # seconds for a peer to end the message at hand and give its state


@dataclass(frozen=True)
class Upkeep:
    """Of an actor whose class has the hooks. `keeper`: its supervisor's process and number; `number`: of its mesh
    there. `state`: the last snapshot, a pickle. `peers`: processes and numbers of other members, to be asked for theirs
    where the class wants that. `is_first`: nothing is to be restored.
    """

    keeper: tuple[str, int]
    number: int
    state: bytes | None = None
    peers: tuple[tuple[str, int], ...] = ()
    is_first: bool = True


def has_hooks(cls: type[Actor]) -> bool:
    return hasattr(cls, SNAPSHOT)


def check_hooks(cls: type[Actor], strategy: str, size: int, *, comes_back: bool) -> None:
    """ConfigError where a class declares half of them, or options that make no sense. `strategy`, `size`: of its mesh.
    `comes_back`: whether somebody starts it again.
    """
    for has, lacks in ((SNAPSHOT, _RESTORE), (_RESTORE, SNAPSHOT)):
        if hasattr(cls, has) and not hasattr(cls, lacks):
            raise ConfigError(
                f"{cls.__name__} has {has}, but no {lacks}: a state is taken by one, and given to the other"
            )
    every, source = cls.snapshot_every, cls.restore_from
    if not has_hooks(cls):
        if source == "peer":
            raise ConfigError(f"{cls.__name__}.restore_from is 'peer', but it has no {SNAPSHOT}")
        return  # what it calls by these names is its own
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ConfigError(f"{cls.__name__}.snapshot_every is {every!r}, but must be an integer of at least 1, or None")
    if source not in ("snapshot", "peer"):
        raise ConfigError(f"{cls.__name__}.restore_from is {source!r}, but must be 'snapshot' or 'peer'")
    if source == "peer" and comes_back and (strategy == "one_for_all" or size < 2):
        raise ConfigError(f"{cls.__name__}.restore_from is 'peer', but when it is started again no peer of it lives")


class Keeping:
    """Sends the snapshots of one actor to its supervisor."""

    def __init__(self, proc: Proc, cls: type[Actor], name: str, rank: int, number: int, upkeep: Upkeep) -> None:
        """`rank`: in its mesh. `number`: its own, in its process."""
        self._proc = proc
        self._name = name
        self._rank = rank
        self._number = number
        self._upkeep = upkeep
        self._every = cls.snapshot_every if cls.restore_from == "snapshot" else None
        self._count = 0

    def is_due(self) -> bool:
        """Called after each message."""
        self._count += 1
        return bool(self._every) and self._count % (self._every or 1) == 0

    def take(self, actor: Any) -> Any:
        """The state, or a coroutine that returns it."""
        try:
            state = getattr(actor, SNAPSHOT)()
        except Exception as error:
            raise _failed(self._name, SNAPSHOT, error) from error
        return _named(self._name, SNAPSHOT, state) if inspect.iscoroutine(state) else state

    def send(self, state: Any) -> Future[None]:
        """Done when the supervisor has it; fails with StateError where it cannot be kept."""
        from ..encoding.pickling import in_one_stream

        what = f"the state of {self._name} could not be kept"
        keeper = self._proc.route(*self._upkeep.keeper)
        try:
            data = pickle.PickleBuffer(in_one_stream(state))
            value = encode((self._upkeep.number, self._rank, self._number, data))
        except Exception as error:
            raise StateError(f"{what}: {error}") from error
        waiting = SingleReply(self._proc, keeper, f"{self._name}.{SNAPSHOT}")
        deadline = time.monotonic() + _PATIENCE
        waiting.expire_at(deadline, _PATIENCE)
        try:
            cast(self._proc, [keeper], value, SNAPSHOT.encode(), b"", waiting, deadline)
        except RdmaError as error:
            raise StateError(f"{what}: {error}") from error

        def outcome() -> None:
            try:
                waiting.future.wait_get()
            except (SupervisionError, RdmaError) as error:
                raise StateError(f"{what}: {error}") from error

        kept: Future[None] = Future.pending()
        waiting.future.add_callback(lambda: kept.set_loader(outcome))
        return kept


def restored(proc: Proc, actor: Any, name: str, rank: int, upkeep: Upkeep) -> Coroutine[Any, Any, None] | None:
    """Gives a new incarnation the state of the old one, or a peer's; None, or what is left to be awaited. Where no
    snapshot was ever taken there is nothing to give. Raises StateError.
    """
    if upkeep.is_first:
        return None
    if type(actor).restore_from == "peer":
        source, state = "peer", _state_of_peer(proc, name, upkeep)
    elif upkeep.state is None:
        return None
    else:
        source, state = "snapshot", _loaded(name, upkeep.state)
    emit("state.restored", mesh=name, rank=rank, source=source)
    try:
        value = getattr(actor, _RESTORE)(state)
    except Exception as error:
        raise _failed(name, _RESTORE, error) from error
    return _named(name, _RESTORE, value) if inspect.iscoroutine(value) else None


def _loaded(name: str, state: bytes) -> Any:
    try:
        return pickle.loads(state)
    except Exception as error:  # of users' classes
        raise StateError(f"the snapshot of {name} cannot be loaded: {type(error).__name__}: {error}") from error


def _state_of_peer(proc: Proc, name: str, upkeep: Upkeep) -> Any:
    why = "none lives"
    for address, number in upkeep.peers:
        route = proc.route(address, number)
        waiting = SingleReply(proc, route, f"{name}.{SNAPSHOT}")
        deadline = time.monotonic() + _PEER_PATIENCE
        waiting.expire_at(deadline, _PEER_PATIENCE)
        try:
            cast(proc, [route], encode(((), {})), SNAPSHOT.encode(), b"", waiting, deadline)
            return waiting.future.wait_get()
        except ActorError as error:
            raise StateError(f"a peer of {name} could not give its state: {error}") from error
        except (SupervisionError, RdmaError) as error:  # the next one may do
            why = str(error)
    raise StateError(f"no peer of {name} gives its state: {why}")


async def _named(name: str, hook: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except Exception as error:
        raise _failed(name, hook, error) from error


def _failed(name: str, hook: str, error: Exception) -> StateError:
    return StateError(f"{hook} of {name} failed: {type(error).__name__}: {error}")
