"""Checks of arguments, the same for native kernels and references: a sentence with the argument's name and value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from ..errors import ConfigError

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, *FLOAT8)
COMPUTED = (*INTEGERS, *FLOATS, torch.bool)  # dtypes that kernels can do arithmetic with


def refuse(message: str) -> NoReturn:
    raise ConfigError(message)


def check_tensor(value: object, argument: str, *, aligned: bool = True) -> None:
    if not isinstance(value, torch.Tensor):
        refuse(f"{argument} must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        refuse(f"{argument} must be a plain strided tensor, got layout {value.layout}")
    if aligned and _has_memory(value) and value.data_ptr() % value.element_size() != 0:
        refuse(f"{argument} must have elements aligned to their size, got address {value.data_ptr():#x}")


def check_tensors(values: object, argument: str, *, at_least: int = 0, aligned: bool = True) -> None:
    if not isinstance(values, (list, tuple)):
        refuse(f"{argument} must be a list or tuple of tensors, got {type(values).__name__}")
    if len(values) < at_least:
        refuse(f"{argument} must hold at least {at_least} tensor, got {len(values)}")
    for i, value in enumerate(values):
        check_tensor(value, f"{argument}[{i}]", aligned=aligned)


def check_dtype(dtype: object, allowed: Sequence[torch.dtype], argument: str) -> None:
    if dtype not in allowed:
        names = ", ".join(str(one).removeprefix("torch.") for one in allowed)
        refuse(f"{argument} must be one of {names}, got {str(dtype).removeprefix('torch.')}")


def check_contiguous(tensor: torch.Tensor, argument: str) -> None:
    if not tensor.is_contiguous():
        refuse(f"{argument} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}")


def check_numel(tensor: torch.Tensor, numel: int, argument: str, of: str) -> None:
    if tensor.numel() != numel:
        refuse(f"{argument} must have {numel} elements, {of}, got {tensor.numel()}")


def check_multiple(value: object, of: int, argument: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value <= 0 or value % of != 0:
        refuse(f"{argument} must be a positive multiple of {of}, got {value}")


def check_device(tensors: Sequence[torch.Tensor], argument: str, device: torch.device) -> None:
    for tensor in tensors:
        if tensor.device != device:
            refuse(f"{argument} must all be on {device}, got one on {tensor.device}")


def wants_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check_no_gradient(tensors: Sequence[torch.Tensor], function: str, instead: str) -> None:
    if wants_gradient(tensors):
        refuse(
            f"{function} is not differentiable, and an argument requires a gradient; use {instead}, or torch.no_grad()"
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    """False where there are only shapes: on the meta device, and while torch traces."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and after the last one."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def check_apart(
    written: torch.Tensor, argument: str, others: Sequence[torch.Tensor], name: str, *, may_be_same: bool = False
) -> None:
    """`written` shares no memory with any of the others, or is exactly one of them where that is allowed."""
    if not _has_memory(written):
        return
    begin, end = _span(written)
    for other in others:
        other_begin, other_end = _span(other)
        same = may_be_same and (begin, end) == (other_begin, other_end)
        if begin < other_end and other_begin < end and not same:
            refuse(f"{argument} shares memory with {name}")


def check_own_elements(tensor: torch.Tensor, argument: str) -> None:
    """No two elements share memory."""
    if not _has_memory(tensor):
        return
    inner = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel() > 0:
            if stride <= inner:
                refuse(
                    f"{argument} has elements that share memory: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                )
            inner += (size - 1) * stride
