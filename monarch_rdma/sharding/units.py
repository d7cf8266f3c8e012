"""Tensors as one line of bytes, cut into units: the steps in which they are passed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from .plan import Copies

__all__ = ["Units"]


class Units:
    """Rows of the tensors, one tensor after another. A row belongs to the unit that its first byte lies in."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self._rows: dict[str, tuple[int, int, int]] = {}  # where the tensor begins, bytes of a row, rows
        at = 0
        for name, tensor in tensors.items():
            rows = tensor.shape[0] if tensor.ndim else 1
            if tensor.nbytes:
                self._rows[name] = at, tensor.nbytes // rows, rows
            at += tensor.nbytes
        self.count = -(-at // unit_bytes)
        self.nbytes = at

    def of(self, name: str, row: int) -> int:
        """The unit that a row is in."""
        begin, row_bytes, _ = self._rows[name]
        return (begin + row * row_bytes) // self.unit_bytes

    def first_of(self, name: str, copies: Copies) -> int:
        """The first unit that copies into a tensor touch."""
        return self.of(name, int(copies.target_at[:, 0].min()) if copies.target_at.shape[1] else 0)

    def rows(self) -> Iterator[tuple[int, str, int, int]]:
        """Each unit's tensors: unit, name, and their rows from one to another."""
        for name, (begin, row_bytes, rows) in self._rows.items():
            low = 0
            while low < rows:
                unit = self.of(name, low)
                high = min(rows, -(-((unit + 1) * self.unit_bytes - begin) // row_bytes))
                yield unit, name, low, high
                low = high
