"""What users subclass."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from .context import context
from .future import Future, done_future

__all__ = ["Actor"]


class Actor:
    """A class whose instances run in processes of a mesh: `procs.spawn("name", Class, *args)` makes one in each.

    Methods decorated with `@endpoint` can be called by messages; sync and async ones may be in one class. All run on
    the actor's own thread, one at a time and in the order in which they came (`@concurrent_endpoint` apart).

    Hooks, sync or async, all optional: `__supervise__(failure) -> bool` is asked when something this actor spawned has
    failed (true: handled; false or absent: this actor fails too); `__stuck__(failure)` is told when something it
    spawned works on a message for longer than its limit, or runs no Python, and lives; `__cleanup__(error)` runs at its
    end, with None for a stop that was asked for. `__snapshot__() -> state` and `__restore__(state)`, together: what an
    actor that is started again goes on with; see docs/supervision.md.
    """

    accept_codec: ClassVar[str] = "pickle"
    """"safe" refuses calls whose arguments are pickles: callers use `endpoint.options(codec="safe")`."""

    snapshot_every: ClassVar[int | None] = 1
    """Of classes with `__snapshot__`: after how many messages it is called; None: only when the actor asks for it."""

    restore_from: ClassVar[str] = "snapshot"
    """What `__restore__` gets: "snapshot", the last one; "peer", what `__snapshot__` of another rank gives then."""

    @property
    def logger(self) -> logging.Logger:
        """Named after this actor."""
        return logging.getLogger(f"monarch_rdma.actor.{context().actor_instance.name}")

    @property
    def initialized(self) -> Future[None]:
        """Whoever has an actor itself has it after its `__init__`."""
        return done_future(None)

    def stop(self, reason: str = "it stopped itself") -> Future[None]:
        """From inside: ends this actor after the messages that wait already."""
        context().actor_instance.stop(reason)
        return done_future(None)

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """Monarch's hook; here a message that cannot be delivered raises where it is sent."""
        return False
