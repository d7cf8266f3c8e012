"""Reads the large buffers of messages that arrived."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import message
from .message import Frame

if TYPE_CHECKING:
    from .proc import Proc

__all__ = ["Fetcher"]


class Fetcher:
    """One per process. Frames of one sender are fetched in the order in which they come; each read uses several threads
    below.
    """

    def __init__(self, proc: Proc) -> None:
        self._proc = proc

    def fetch(self, frame: Frame) -> None:
        """Ends frame.fetched, and tells the sender, on another thread."""
        self._proc.errands.run(("fetch", frame.address), partial(self.fetch_now, frame))

    def fetch_now(self, frame: Frame) -> None:
        """The same in this thread."""
        assert frame.fetched is not None, "made by who queued it"
        try:
            frame.incoming.fetch(timeout=None)
        except Exception as error:  # whatever it is: the actor and the sender wait for the end of this
            return self.give_up(frame, error)
        frame.fetched.set_result(None)
        self.tell_sender(frame, 0)

    def give_up(self, frame: Frame, error: Exception, *, is_full: bool = False) -> None:
        """The buffers will not be read: ends frame.fetched with that, and tells the sender; `is_full`: why not, too."""
        assert frame.fetched is not None, "made by who queued it"
        frame.fetched.set_error(error)
        self.tell_sender(frame, *((message.FAILED | message.FULL, str(error)) if is_full else (message.FAILED,)))

    def tell_sender(self, frame: Frame, flags: int, why: str = "") -> None:
        """Once, that its buffers are not needed any more."""
        if not frame.is_taken:
            frame.is_taken = True
            head = message.pack(message.TAKEN, frame.origin, flags=flags)
            self._proc.post_quietly(frame.address, head, why.encode())
