"""Each process's agent: ends it, and says what goes on in it."""

from __future__ import annotations

import logging
from typing import Any

from ..actor import Actor
from ..debugging import breakpoints, inspection
from ..endpoint import endpoint
from ..port import Port

__all__ = ["ProcAgent"]


class ProcAgent(Actor):
    """Under the number that everyone knows, in every worker process, and in programs that have actors."""

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
        """See inspection.py."""
        return inspection.status()

    @endpoint
    def inject(self, fault: dict[str, Any], peer: str, event: str) -> None:
        """Carries a fault of supervision/chaos out in this process: now, or at its moment."""
        from ..chaos import inject_here

        inject_here(fault, peer, event)

    @endpoint
    def metrics(self) -> dict[str, Any]:
        """See actor/metrics.py."""
        from .. import metrics

        return metrics.of_process()

    @endpoint
    def stacks(self) -> dict[str, Any]:
        """See inspection.py."""
        return inspection.stacks()

    # For debuggers: `session` is a number that `status` tells under "breakpoints". See breakpoints.py.

    @endpoint
    def debugger_attach(self, session: int, port: Port[tuple[str, str]], who: str) -> dict[str, Any]:
        return breakpoints.session(session).attach(port, who)

    @endpoint
    def debugger_enter(self, session: int, line: str) -> None:
        breakpoints.session(session).enter(line)

    @endpoint
    def debugger_detach(self, session: int) -> None:
        breakpoints.session(session).detach()
