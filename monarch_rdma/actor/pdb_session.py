"""pdb for an actor that is debugged from another process."""

from __future__ import annotations

import pdb
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from .breakpoints import Session

__all__ = ["PdbSession"]

_AROUND = "monarch_rdma.actor.instance"  # the module that calls endpoints


class PdbSession(pdb.Pdb):
    """Reads and writes through a session. Stepping out of the endpoint means to continue."""

    def __init__(self, session: Session) -> None:
        stream = cast(Any, session)
        super().__init__(stdin=stream, stdout=stream, skip=["asyncio", "asyncio.*"], nosigint=True, readrc=False)
        self.session = session
        self._outside: FrameType | None = None  # who called the endpoint

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
            self._outside = _around(frame)
        super().interaction(frame, *args)

    def stop_here(self, frame: FrameType) -> bool:
        if frame is self._outside:
            self.set_continue()
            return False
        return super().stop_here(frame)

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:  # else it may stop again
            self._outside = None
            self.session.end("it goes on\n")

    def set_quit(self) -> None:
        super().set_quit()
        self._outside = None
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


def _around(frame: FrameType) -> FrameType | None:
    outer: FrameType | None = frame
    while outer is not None and outer.f_globals.get("__name__") != _AROUND:
        outer = outer.f_back
    return outer
