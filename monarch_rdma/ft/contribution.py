"""What a member brings into a round, as it travels: fp32, or blocks of int8 or fp8 with what is lost kept for later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels import dequantize_reduce, quantize, reduce

__all__ = ["BLOCK", "Contribution", "Plain", "Quantized", "Wire", "wire_of"]

BLOCK = 128  # elements that share a scale, and that stay together when a contribution is cut


@dataclass(frozen=True)
class Contribution:
    """`numel` numbers, made once and sent as often as it takes. Of each part, `widths[i]` elements are one block."""

    numel: int
    parts: tuple[Tensor, ...]
    widths: tuple[int, ...]

    def cut(self, pieces: int) -> Tensor:
        """The bytes of so many pieces of equal size, with zeros after the end: (pieces, bytes), uint8."""
        blocks = blocks_of_piece(self.numel, pieces)
        rows = []
        for part, width in zip(self.parts, self.widths, strict=True):
            wanted = pieces * blocks * width
            padded = part if part.numel() == wanted else part.new_zeros(wanted)
            if padded is not part:
                padded[: part.numel()] = part
            rows.append(padded.view(torch.uint8).view(pieces, -1))
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def blocks_of_piece(numel: int, pieces: int) -> int:
    return max(1, -(-numel // (pieces * BLOCK)))


class Wire(Protocol):
    """How numbers travel to where they are added up, and how their mean travels back."""

    mean_dtype: torch.dtype

    def contribution(self, values: Tensor, error: Tensor | None) -> Contribution:
        """Of flat fp32 `values`. `error`: as many, what earlier ones have lost; it is added, and replaced."""
        ...

    def mean(self, pieces: Sequence[Tensor]) -> Tensor:
        """Of one piece of each member, in this order."""
        ...


class Plain:
    """Everything in fp32."""

    mean_dtype = torch.float32

    def contribution(self, values: Tensor, error: Tensor | None) -> Contribution:
        return Contribution(values.numel(), (values,), (BLOCK,))

    def mean(self, pieces: Sequence[Tensor]) -> Tensor:
        return reduce([piece.view(torch.float32) for piece in pieces], "avg")


class Quantized:
    """8 bits and a scale for each 128 on the way to the sum; it is made in fp32, and its mean travels as bf16."""

    mean_dtype = torch.bfloat16

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def contribution(self, values: Tensor, error: Tensor | None) -> Contribution:
        q, scales = quantize(values, self._dtype, BLOCK, error)
        return Contribution(values.numel(), (q, scales), (BLOCK, 1))

    def mean(self, pieces: Sequence[Tensor]) -> Tensor:
        blocks = pieces[0].numel() // (BLOCK + 4)
        cuts = [torch.split(piece, [blocks * BLOCK, blocks * 4]) for piece in pieces]
        qs = [q.view(self._dtype) for q, _ in cuts]
        scales = [scale.clone().view(torch.float32) for _, scale in cuts]  # clone: aligned
        return (dequantize_reduce(qs, scales, BLOCK) / len(pieces)).to(self.mean_dtype)


_WIRES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def wire_of(quantize: str | None) -> Wire:
    """None is fp32. Raises ConfigError."""
    if quantize is None:
        return Plain()
    if not isinstance(quantize, str) or quantize not in _WIRES:
        raise ConfigError(f"quantize is {quantize!r}, but must be None, {', '.join(map(repr, _WIRES))}")
    return Quantized(_WIRES[quantize])
