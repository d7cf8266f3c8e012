"""What a codec makes of a value, before it is known how the bytes travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Content"]


@dataclass(frozen=True)
class Content:
    """A stream, and the buffers and tensors that it refers to."""

    stream: bytes
    buffers: list[memoryview]  # flat bytes, of this process's memory
    rows: list[list[Any]]  # tensors over the buffers; see tensors.Row
    slots: list[int]  # what the stream takes, in order: buffer i as i, tensor i as ~i
