"""The last snapshot of each actor whose class takes any: kept beside its supervisor, for its next incarnation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from ..encoding.codec import encode
from ..failure import SupervisionError, encode_failure
from ..future import Future
from ..runtime import message
from ..runtime.message import Frame

if TYPE_CHECKING:
    from ..runtime.proc import Proc

__all__ = ["KeptStates"]


class KeptStates:
    """A snapshot is a pickle; it is never loaded here."""

    METHOD: ClassVar[bytes] = b"__snapshot__"

    def __init__(
        self,
        proc: Proc,
        number: int,
        put: Callable[..., None],
        is_of_member: Callable[[Frame, int, int, int], bool],
    ) -> None:
        """`number`: of the supervisor. `put(action, *args)` runs something on its thread. `is_of_member(frame, number,
        rank, own)`: whether the sender, which is number `own` in its process, is who lives now as that one.
        """
        self._proc = proc
        self._number = number
        self._put = put
        self._is_of_member = is_of_member
        self._states: dict[tuple[int, int], bytes] = {}

    def of(self, number: int, rank: int) -> bytes | None:
        """The last one of that actor, if any."""
        return self._states.get((number, rank))

    def forget(self, number: int) -> None:
        """Of all actors of that number."""
        self._states = {key: state for key, state in self._states.items() if key[0] != number}

    def on_frame(self, frame: Frame) -> None:
        """On the receiving thread: a snapshot comes. Answered when it is kept."""
        if not frame.flags & message.LARGE:
            return self._put(self._keep, frame)
        fetched: Future[None] = Future.pending()
        frame.fetched = fetched
        fetched.add_callback(lambda: self._put(self._keep, frame))
        self._proc.fetcher.fetch(frame)

    def _keep(self, frame: Frame) -> None:
        self._proc.credit(frame.address, self._number, 1)
        try:
            if frame.fetched is not None:
                frame.fetched.get()
            number, rank, own, state = frame.load()
            self._check(frame, number, rank, own)
        except Exception as error:  # whoever sent it waits for an answer
            failed = SupervisionError(f"a snapshot could not be kept: {error}")
            return self._answer(frame, encode_failure(failed), message.FAILED)
        self._states[number, rank] = bytes(state)
        self._answer(frame, encode(None), 0)

    def _check(self, frame: Frame, number: int, rank: int, own: int) -> None:
        if not self._is_of_member(frame, number, rank, own):
            raise SupervisionError("another incarnation has taken the place of its actor")

    def _answer(self, frame: Frame, outgoing: Any, flags: int) -> None:
        self._proc.reply(frame.address, frame.reply, 0, outgoing, flags)
