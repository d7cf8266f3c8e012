"""Tensors of the fake GPU runtime, and kernels for them: where FAKE_GPU_TOUCHABLE is set, this process's.

A tensor is a CPU tensor over the fake device's memory that says of itself what one of a GPU does. Kernels are those of
the emulation (emulated_kernels), which runs one at a time, at once; it waits for other processes' kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import emulated_kernels
import torch
from fake_gpus import _Block, fake
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from monarch_rdma.kernels import native, peers

__all__ = ["GpuTensor", "on_gpu"]

PATIENCE = 60.0  # seconds in which nothing moves, until the emulation gives up


class _Storage:
    """What `untyped_storage` says of a GPU's memory."""

    def __init__(self, storage: Any) -> None:
        self._storage, self.device = storage, torch.device("cuda:0")

    def nbytes(self) -> int:
        return int(self._storage.nbytes())

    def data_ptr(self) -> int:
        return int(self._storage.data_ptr())


class GpuTensor(torch.Tensor):
    """Made by `on_gpu`; what is made of it is on the GPU as well."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    device = property(lambda self: torch.device("cuda:0"))
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def untyped_storage(self) -> Any:
        return _Storage(plain(self).untyped_storage())

    def cpu(self) -> torch.Tensor:
        return plain(self).clone()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", False)
        with no_dispatch():
            out = func(*args, **kwargs)
        if pinned:
            return out
        if func.overloadpacket in _FRESH:  # its memory must be the GPU's
            return on_gpu(out)
        return tree_map_only(torch.Tensor, lambda each: each if isinstance(each, GpuTensor) else _gpu(each), out)


_FRESH = {torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.new_zeros, torch.ops.aten.clone}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a CPU tensor."""
    with no_dispatch():
        return tensor.as_subclass(torch.Tensor)


def _gpu(tensor: torch.Tensor) -> GpuTensor:
    return torch.Tensor._make_subclass(GpuTensor, tensor)  # type: ignore[return-value]


def on_gpu(values: torch.Tensor, *, offset: int = 0) -> GpuTensor:
    """A contiguous tensor with these values on the fake device, `offset` bytes into an allocation."""
    block = _Block(max(1, values.nbytes) + offset, 0, "fake_gpu_malloc")
    memory = (ctypes.c_char * (values.nbytes + offset)).from_address(block.address)
    memory.block = block  # type: ignore[attr-defined]  # freed with the last tensor on it
    if values.nbytes == 0:
        return _gpu(values)
    raw = torch.frombuffer(memory, dtype=torch.uint8)[offset:]
    raw.copy_(values.contiguous().view(-1).view(torch.uint8))
    return _gpu(raw.view(values.dtype).view(values.shape))


class _Stream:
    """The device's only one."""

    cuda_stream = 0


@contextmanager
def _on_stream(_: Any) -> Iterator[None]:
    yield


def use_fake_gpu(before_each: Callable[[], None] | None = None) -> None:
    """From now on this process's torch has that GPU, and the package kernels for it. `before_each`: kernel."""
    fake()
    emulated_kernels.face()[1].mr_emulation_set_patience(PATIENCE)
    emulated = emulated_kernels.ops().peer_collective

    def kernel(own: Any, out: Any, *rest: Any) -> None:
        if before_each is not None:
            before_each()
        emulated(plain(own), plain(out), *rest)

    def native_with_gpu(name: str, device: torch.device) -> Any:
        return kernel if device.type == "cuda" else native.native(name, device)

    import monarch_rdma.collectives.device as device_collectives

    peers.native = native_with_gpu  # type: ignore[assignment]
    device_collectives.native = native_with_gpu  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: _Stream()  # type: ignore[assignment,return-value,misc]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.stream = _on_stream  # type: ignore[assignment,misc]
