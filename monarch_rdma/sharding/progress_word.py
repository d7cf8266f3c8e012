"""Progress words: 16 bytes beside a relay's tensors that say which version is arriving there and how much of it has.

A reader looks before and after it reads. Each time that something is written anew the epoch is another one: where it is
the same, what was said to be there stayed as it was in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..rdma import Engine, RDMAAction, RDMABuffer, shared_memory

__all__ = ["Progress", "ProgressWord", "RemoteProgress"]

_BITS = 24  # of the count of units; the epoch is above it
_CHANGING = (1 << _BITS) - 1  # as a count: the version is about to be another one
MOST_UNITS = _CHANGING - 2


@dataclass(frozen=True)
class Progress:
    """`units` of `version` are there; in the same epoch they stay."""

    epoch: int
    version: int
    units: int


class ProgressWord:
    """The owner's side."""

    def __init__(self, engine: Engine) -> None:
        self._old = np.zeros(1, dtype=np.int64)
        self._memory = np.frombuffer(shared_memory(16, engine=engine), dtype=np.int64)
        self._memory[:] = _CHANGING, 0
        self.buffer = RDMABuffer(self._memory, engine=engine)
        self._parts = self.buffer[0:1], self.buffer[1:2]
        self._state, self._version = _CHANGING, 0
        self._epoch = 0

    def begin(self, version: int) -> None:
        """Before anything is written: a new epoch, nothing is there."""
        self._epoch += 1
        self._set_state(self._epoch << _BITS | _CHANGING)
        self._add(1, version - self._version)
        self._version = version
        self._set_state(self._epoch << _BITS)

    def advance(self, units: int) -> None:
        """So many are there."""
        self._set_state(self._epoch << _BITS | units)

    def _set_state(self, state: int) -> None:
        self._add(0, state - self._state)
        self._state = state

    def _add(self, word: int, amount: int) -> None:
        """Atomically, and in order with what is written to the tensors, on every kind of processor."""
        if amount:
            RDMAAction().fetch_add(self._parts[word], self._old, amount).submit().get()

    def close(self) -> None:
        self.buffer.drop().get()


class RemoteProgress:
    """A reader's side."""

    def __init__(self, buffer: RDMABuffer) -> None:
        self._values = np.zeros(2, dtype=np.int64)
        self._start = buffer.prepare_read(self._values)
        self._last_epoch = -1

    def look(self, timeout: float | None) -> Progress | None:
        """What is said there; None where nothing is. Raises what reads raise.

        The two words are not read at once. A version is believed when the look before had seen its epoch begin.
        """
        for _ in range(2):
            self._start(timeout).get()
            state, version = self._values.tolist()
            epoch, units = state >> _BITS, state & _CHANGING
            if units == _CHANGING:
                return None
            if epoch == self._last_epoch:
                return Progress(epoch, version, units)
            self._last_epoch = epoch
        return None
