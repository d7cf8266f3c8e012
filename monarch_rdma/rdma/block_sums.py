"""Checksums of the blocks of one read, made as its bytes pass, by the threads that copy them."""

from __future__ import annotations

from typing import Any

from .._engine import ffi
from ..errors import ConfigError

__all__ = ["BlockSums"]


class BlockSums:
    """Of a read whose first byte is byte `first` of `total`, which are cut into blocks of `block_bytes`: a sum for each
    block that it has a part of, as `kernels.checksum` makes them. Of a block that several reads bring, theirs add up.
    """

    def __init__(self, first: int, size: int, total: int, block_bytes: int) -> None:
        """`size`: bytes of the read. ConfigError where it does not begin and end between words of 8 bytes."""
        if not self.fits(first, size, total):
            raise ConfigError(f"a read of {size} bytes from {first} on, of {total}, has no whole words of 8 bytes")
        if block_bytes <= 0 or block_bytes % 8:
            raise ConfigError(f"block_bytes is {block_bytes!r}, but must be a positive multiple of 8")
        self.first, self.size = first, size
        self.first_block = first // block_bytes
        count = -(-(first + size) // block_bytes) - self.first_block
        self._words = ffi.new("uint64_t[]", 1 + count)
        self.wanted = ffi.new("mr_block_sums *", (first, total, block_bytes, self._words))

    @staticmethod
    def fits(first: int, size: int, total: int) -> bool:
        """Whether sums can be made of such a read."""
        return first % 8 == 0 and 0 < size <= total - first and (size % 8 == 0 or first + size == total)

    @property
    def are_made(self) -> bool:
        """When the read has ended: False where its lane has not copied by itself, so that nobody has made them."""
        return int(self._words[0]) == self.size

    @property
    def values(self) -> Any:
        """A buffer of uint64, one for each block that is touched, from `first_block` on."""
        return ffi.buffer(self._words)[8:]
