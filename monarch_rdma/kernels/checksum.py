"""Checksums of a tensor's bytes, block by block: did all of it arrive, and if not, where is the difference?"""

from __future__ import annotations

import torch

from .arguments import check_contiguous, check_multiple, check_tensor
from .native import native
from .pack import bytes_of


def _signed(value: int) -> int:
    """The 64 bits as torch's int64 has them."""
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_FACTORS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64. Shifts to the right bring in zeros."""

    def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
        return (x >> by) & ((1 << (64 - by)) - 1)

    words = (words ^ shifted(words, 30)) * _FACTORS[0]
    words = (words ^ shifted(words, 27)) * _FACTORS[1]
    return words ^ shifted(words, 31)


def checksum_reference(x: torch.Tensor, block_bytes: int = 1 << 20) -> torch.Tensor:
    flat = bytes_of(x)
    nbytes = flat.numel()
    sums = []
    for begin in range(0, nbytes, block_bytes):
        block = flat[begin : begin + block_bytes]
        words = torch.nn.functional.pad(block, (0, -block.numel() % 8)).clone().view(torch.int64)
        numbers = torch.arange(1, words.numel() + 1, device=x.device)
        start = torch.tensor(block.numel(), device=x.device)
        sums.append(_mixed(start) + _mixed(words + numbers * _STEP).sum())
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=x.device)


def checksum(x: torch.Tensor, block_bytes: int = 1 << 20) -> torch.Tensor:
    """One int64 for each block of `block_bytes` bytes (the last may be shorter) of a contiguous tensor of any dtype.

    Compare what two processes got for a tensor: equal for equal bytes; else the blocks with a difference differ, but
    for a chance of 2**-64 each. Not cryptographic: it finds faults, not forgers.

    Args:
        x: contiguous; only its bytes count, not its shape or dtype.
        block_bytes: a multiple of 8.

    Raises ConfigError.
    """
    check_tensor(x, "x", aligned=False)
    check_contiguous(x, "x")
    check_multiple(block_bytes, 8, "block_bytes")
    kernel = native("checksum", x.device)
    if kernel is None:
        return checksum_reference(x, block_bytes)
    return kernel(x.detach(), block_bytes)  # type: ignore[no-any-return]
