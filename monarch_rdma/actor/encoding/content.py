"""What a codec makes of a value, before it is known how the bytes travel."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Content", "note_passenger", "passengers_noted"]


@dataclass(frozen=True)
class Content:
    """A stream, and the buffers and tensors that it refers to."""

    stream: bytes
    buffers: list[memoryview]  # flat bytes, of this process's memory
    rows: list[list[Any]]  # tensors over the buffers; see tensors.Row
    slots: list[int]  # what the stream takes, in order: buffer i as i, tensor i as ~i
    passengers: Sequence[Any] = ()  # see note_passenger


class _Sent(threading.local):
    def __init__(self) -> None:
        self.passengers: list[Any] | None = None


_sent = _Sent()


@contextmanager
def passengers_noted() -> Iterator[list[Any]]:
    """Of a message that this thread pickles: what there is in it whose owner wants to know its way."""
    before, _sent.passengers = _sent.passengers, []
    try:
        yield _sent.passengers
    finally:
        _sent.passengers = before


def note_passenger(value: Any) -> bool:
    """For the __reduce__ of such a thing. False where it is no message that is pickled."""
    if _sent.passengers is None:
        return False
    _sent.passengers.append(value)
    return True
