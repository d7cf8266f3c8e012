"""Checksums of the blocks of one read or copy, made as its bytes pass, by the threads that copy them."""

from __future__ import annotations

from typing import Any

from .._engine import ffi, lib
from ..errors import ConfigError
from .engine import Engine, raise_error, scratch
from .memory import memory_of, note_written

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

    def make(self, source: Any, target: Any = None, *, engine: Engine) -> None:
        """Of `size` bytes of this process, which are copied into `target` on the way, on as many threads as option
        copy_threads of the engine says.

        `source`, `target`: tensors or the like, contiguous, in memory of the host, which do not overlap. ConfigError.
        """
        places = []
        for argument, data in (("source", source), ("target", target)):
            if data is None:
                places.append(ffi.NULL)
                continue
            memory = memory_of(data, argument)
            view = memory.view
            if not view.is_contiguous or view.nbytes != self.size:
                what = f"{argument} has {view.nbytes} bytes of shape {view.shape}"
                raise ConfigError(f"{what}, but must have {self.size} that are contiguous")
            places.append(ffi.cast("void *", memory.address))
        if target is not None:
            note_written(target)
        error = scratch.error
        if kind := lib.mr_copy_with_sums(engine.handle, places[1], places[0], self.size, self.wanted, error):
            raise_error(error, kind, operation="copy")

    @property
    def are_made(self) -> bool:
        """When the read or copy has ended: False where its lane has not copied by itself, so nobody has made them."""
        return int(self._words[0]) == self.size

    @property
    def values(self) -> Any:
        """A buffer of uint64, one for each block that is touched, from `first_block` on."""
        return ffi.buffer(self._words)[8:]
