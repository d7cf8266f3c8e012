"""A process that holds tensors and publishes them as buffers. It takes no part in the transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..rdma import RDMABuffer, listen, share_, zeros
from . import weights

__all__ = ["Owner", "as_bytes", "sweep_contents"]


def as_bytes(tensor: torch.Tensor) -> weights.Bytes:
    """A contiguous tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def sweep_contents(size: int) -> torch.Tensor:
    """The bytes of the memory that is read in every size: 251 values, so that no place looks like the next page's."""
    return torch.arange(251, dtype=torch.uint8).repeat(size // 251 + 1)[:size]


class Owner:
    """Its public methods are the orders of the parent. Names published: "weights", "sweep"."""

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._listener = listen()
        self._tensors: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, RDMABuffer] = {}

    def address(self) -> str:
        return self._listener.address

    def hold(self, description: dict[str, Any], names: list[str]) -> None:
        """Fills these tensors of the set, in ordinary memory, and publishes them; lets go of what was held before."""
        self._drop()
        self._tensors.clear()
        held = weights.load(description)
        for tensor in held.tensors:
            if tensor.name in names:
                data = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
                weights.fill(held, tensor, as_bytes(data))
                self._tensors[tensor.name] = data
                self._emit(progress=tensor.nbytes)
        self._publish()

    def move_to_shared_memory(self) -> None:
        """What it holds becomes mappable by others, in place."""
        self._drop()
        for tensor in self._tensors.values():
            share_(tensor)
            self._emit(progress=tensor.nbytes)
        self._publish()

    def hold_sweep(self, size: int) -> None:
        """Publishes `size` bytes of each kind of memory."""
        ordinary = sweep_contents(size)
        shared = zeros(size, dtype=torch.uint8)
        shared.copy_(ordinary)
        self._sweep = {"ordinary": RDMABuffer(ordinary), "shared": RDMABuffer(shared)}
        self._listener.publish("sweep", self._sweep)

    def _publish(self) -> None:
        # Nothing but readers: owners can hand out memory that nobody may write.
        self._buffers = {name: RDMABuffer(tensor, access="read") for name, tensor in self._tensors.items()}
        self._listener.publish("weights", self._buffers)

    def _drop(self) -> None:
        for buffer in self._buffers.values():
            buffer.drop().get(10)
        self._buffers = {}
