"""Each worker process's agent: ends it, and says what goes on in it."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from .actor import Actor
from .endpoint import endpoint
from .instance import Instance
from .proc import current_proc

__all__ = ["ProcAgent"]


class ProcAgent(Actor):
    """Under the number that everyone knows, in every worker process."""

    @endpoint
    def leave(self, reason: str) -> None:
        """Ends the process, its actors first."""
        from .worker import leave

        leave(reason)

    @endpoint
    def set_log_level(self, level: int) -> None:
        logging.getLogger().setLevel(level)

    @endpoint
    def status(self) -> dict[str, Any]:
        """What each actor does: mailbox depth, the message at hand and its age in seconds."""
        return status()


def status() -> dict[str, Any]:
    proc, now = current_proc(), time.monotonic()
    actors = [receiver for receiver in list(proc.receivers.values()) if isinstance(receiver, Instance)]
    return {
        "process": proc.name,
        "pid": os.getpid(),
        "address": proc.address,
        "actors": [actor.describe(now) for actor in actors],
    }
