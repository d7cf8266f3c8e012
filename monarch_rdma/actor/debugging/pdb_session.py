"""pdb for an actor that is debugged from another process."""

from __future__ import annotations

import pdb
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from .breakpoints import Session

__all__ = ["PdbSession"]

_AROUND = "monarch_rdma.actor.runtime.instance"  # the module that calls endpoints


class PdbSession(pdb.Pdb):
    """Reads and writes through a session. Stepping out of the endpoint means to continue."""

    def __init__(self, session: Session) -> None:
        stream = cast(Any, session)
        super().__init__(stdin=stream, stdout=stream, skip=["asyncio", "asyncio.*"], nosigint=True, readrc=False)
        self.session = session
        self._outside: list[FrameType] = []  # those of ours that the endpoint returns to

    def announce(self, frame: FrameType) -> None:
        """Tells people, through what the process prints."""
        self.session.stop_at(frame)
        found = self.session.describe()
        where = f"{found['function']} ({found['file']}:{found['line']})"
        said = f"{found['actor']}[{found['rank']}] waits at a breakpoint in {where}; attach with: monarch-rdma debug"
        print(said, file=sys.stderr, flush=True)

    # --- what pdb calls

    def interaction(self, frame: FrameType | None, *args: Any) -> None:
        if frame is not None:
            self.session.stop_at(frame)
            self._outside = list(_around(frame))
        super().interaction(frame, *args)

    def stop_here(self, frame: FrameType) -> bool:
        return frame not in self._outside and super().stop_here(frame)

    def dispatch_line(self, frame: FrameType) -> Any:
        if frame in self._outside:  # the endpoint has returned
            self.set_continue()
        return super().dispatch_line(frame)

    def dispatch_exception(self, frame: FrameType, arg: Any) -> Any:
        if frame in self._outside:  # it has raised, or is a coroutine that has returned
            self.set_continue()
            return self.trace_dispatch
        return super().dispatch_exception(frame, arg)

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:  # else it may stop again
            self._outside = []
            self.session.end("it goes on\n")

    def set_quit(self) -> None:
        super().set_quit()
        self._outside = []
        self.session.end("it was quit\n")

    # --- commands that would use the process's own terminal, or start it anew

    def do_clear(self, arg: str) -> bool | None:
        if arg:
            return super().do_clear(arg)
        self.clear_all_breaks()
        return None

    do_cl = do_clear

    def do_interact(self, arg: str) -> None:
        self.error("interact is not offered here; use !statement")

    def do_run(self, arg: str) -> None:
        self.error("an actor cannot be run again")

    do_restart = do_run


def _around(frame: FrameType) -> Iterator[FrameType]:
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_globals.get("__name__") == _AROUND:
            yield outer
        outer = outer.f_back
