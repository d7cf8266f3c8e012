"""Version words: 8 bytes beside a rank's tensors that say which version these are, or that they are being written.

A reader looks at the word before and after. Versions only grow: where it is the same, nothing was written in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from ..errors import ConfigError
from ..rdma import Engine, RDMAAction, RDMABuffer, shared_memory

__all__ = ["RemoteWord", "VersionWord"]

_WRITING = 1  # the lowest bit
_MOST = 2**62 - 1


class VersionWord:
    """The owner's side."""

    def __init__(self, version: int = 0, *, engine: Engine | None = None) -> None:
        self.version = _checked(version, 0)
        self._old = np.zeros(1, dtype=np.int64)
        self._memory = np.frombuffer(shared_memory(8, engine=engine), dtype=np.int64)
        self._memory[0] = version << 1
        self.buffer = RDMABuffer(self._memory, engine=engine)
        self._is_writing = False

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """While the tensors are being written. Afterwards they are `version`, which has to be a later one.

        Where the block raises, they stay unreadable until a later version is written: nobody can tell what they are.
        """
        _checked(version, self.version + 1)
        if not self._is_writing:
            self._add(_WRITING)
        self._is_writing = True
        yield
        self._add(((version - self.version) << 1) - _WRITING)
        self.version, self._is_writing = version, False

    def _add(self, amount: int) -> None:
        """Atomically, and in order with what is written to the tensors, on every kind of processor."""
        RDMAAction().fetch_add(self.buffer, self._old, amount).submit().get()

    def close(self) -> None:
        self.buffer.drop().get()


class RemoteWord:
    """A reader's side: the word of one rank as it was last read."""

    def __init__(self, buffer: RDMABuffer) -> None:
        self._value = np.zeros(1, dtype=np.int64)
        self.start = buffer.prepare_read(self._value)

    @property
    def version(self) -> int | None:
        """None: it is being written."""
        value = int(self._value[0])
        return None if value & _WRITING else value >> 1


def _checked(version: object, least: int) -> int:
    if isinstance(version, bool) or not isinstance(version, int) or not least <= version <= _MOST:
        raise ConfigError(f"version is {version!r}, but must be a number from {least} on")
    return version
