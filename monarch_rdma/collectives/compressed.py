"""All-reduce of numbers that cross in 8 bits each: a block of them as int8 or fp8, with a scale.

A member quantizes its tensor, adding what was lost the last time (error feedback), and sends each part to the member
that sums it; that one sums in fp32, in the order of ranks, quantizes the sum, again with error feedback, and sends it
to all. Every member gets the same bits.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from .. import kernels
from ..errors import ConfigError, demand_whole
from .group import Group

__all__ = ["CompressedAllReduce"]

_DTYPES = {name: getattr(torch, name) for name in ("int8", "float8_e4m3fn", "float8_e5m2")}


class CompressedAllReduce:
    """Sums or averages of one tensor, over and over: it keeps what was lost, so each tensor has one of its own.

    tensor: fp32, fp16 or bf16, contiguous, on the CPU, always of `numel` elements. `dtype`: int8, float8_e4m3fn or
    float8_e5m2; `block`: elements that share a scale. A new one begins without an error: after `shrink`, make one.
    """

    def __init__(self, group: Group, numel: int, *, dtype: str = "int8", block: int = 128) -> None:
        if not isinstance(group, Group):
            raise ConfigError(f"group is {group!r:.200}, but must be a Group")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(_DTYPES)}")
        demand_whole("numel", numel, 0)
        demand_whole("block", block, 1)
        self._group, self._dtype, self._block = group, _DTYPES[dtype], block
        blocks = -(-numel // block)
        per_rank = -(-blocks // group.size) * block
        ends = [min(numel, per_rank * rank) for rank in range(group.size + 1)]
        self._parts = list(pairwise(ends))  # of the tensor; whole blocks but the last
        begin, end = self._parts[group.rank]
        self._numel = numel
        self._lost = torch.zeros(numel)  # of our tensor
        self._lost_of_sum = torch.zeros(end - begin)  # of the part that we sum

    def run(self, tensor: torch.Tensor, *, op: str = "sum", timeout: float | None = None) -> None:
        """`tensor` becomes the sum ("sum") or mean ("avg") over all members, as exactly as 8 bits have it."""
        if op not in ("sum", "avg"):
            raise ConfigError(f"op is {op!r}, but must be sum or avg")
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"tensor is {tensor!r:.200}, but must be a tensor")
        if tensor.numel() != self._numel or not tensor.is_contiguous():
            raise ConfigError(f"tensor has {tensor.numel()} elements, but must have {self._numel}, contiguous")
        size, flat = self._group.size, tensor.detach().view(-1)
        q, scales = self._quantized(flat, self._lost)
        mine, num_scales = self._parts[self._group.rank], self._scales_of(self._parts[self._group.rank])
        qs = [torch.empty(mine[1] - mine[0], dtype=self._dtype) for _ in range(size)]
        all_scales = [torch.empty(num_scales) for _ in range(size)]
        self._group.all_to_all(qs, [q[begin:end] for begin, end in self._parts], timeout=timeout)
        self._group.all_to_all(all_scales, [self._slice_of(scales, part) for part in self._parts], timeout=timeout)
        total = kernels.dequantize_reduce(qs, all_scales, self._block)
        if op == "avg":
            total /= size
        q, scales = self._quantized(total, self._lost_of_sum)
        qs = [torch.empty(end - begin, dtype=self._dtype) for begin, end in self._parts]
        all_scales = [torch.empty(self._scales_of(part)) for part in self._parts]
        self._group.all_gather(qs, q, timeout=timeout)
        self._group.all_gather(all_scales, scales, timeout=timeout)
        for (begin, end), part, its_scales in zip(self._parts, qs, all_scales, strict=True):
            kernels.dequantize_into(part, its_scales, flat[begin:end], self._block)

    def _quantized(self, x: torch.Tensor, lost: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, scales = torch.empty(x.numel(), dtype=self._dtype), torch.empty(-(-x.numel() // self._block))
        kernels.quantize_into(x, q, scales, self._block, error=lost)
        return q, scales

    def _scales_of(self, part: tuple[int, int]) -> int:
        return -(-(part[1] - part[0]) // self._block)

    def _slice_of(self, scales: torch.Tensor, part: tuple[int, int]) -> torch.Tensor:
        first = part[0] // self._block if part[0] < part[1] else 0
        return scales[first : first + self._scales_of(part)]
