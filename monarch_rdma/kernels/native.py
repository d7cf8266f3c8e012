"""Which kernels there are for which device, and their shapes for torch.compile."""

from __future__ import annotations

import importlib
from typing import Any

import torch

_GPU_OPS = ("peer_collective",)
_OPS = ("pack", "unpack", "pack_cast", "unpack_cast", "reduce", "quantize", "dequantize", "dequantize_sum", "checksum")


def _load(module: str) -> bool:
    """Registers the ops of a native piece; False where it was not built."""
    try:
        importlib.import_module(f"monarch_rdma.{module}")
    except ImportError:
        return False
    return True


def _available() -> dict[str, tuple[str, ...]]:
    """Names of ops for each type of device. torch calls AMD's and NVIDIA's "cuda"."""
    if not _load("_C"):
        return {}
    available: dict[str, tuple[str, ...]] = {"cpu": _OPS, "meta": _OPS + _GPU_OPS}
    if _load("_kernels"):
        available["cuda"] = _OPS + _GPU_OPS
    return available


AVAILABLE = _available()


def native(name: str, device: torch.device) -> Any:
    """torch.ops.monarch_rdma.NAME if it runs on that device, or None."""
    return getattr(torch.ops.monarch_rdma, name) if name in AVAILABLE.get(device.type, ()) else None


def _writes_only(*_arguments: Any) -> None:
    """What torch.compile has to know of an op whose results are all in its arguments."""


def _checksum_shape(x: torch.Tensor, block_bytes: int) -> torch.Tensor:
    nbytes = x.numel() * x.element_size()
    return x.new_empty((nbytes + block_bytes - 1) // block_bytes, dtype=torch.int64)


if AVAILABLE:
    for _name in _OPS + _GPU_OPS:
        torch.library.register_fake(f"monarch_rdma::{_name}", _checksum_shape if _name == "checksum" else _writes_only)
