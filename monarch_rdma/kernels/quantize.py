"""Blocks of floating-point numbers as int8 or fp8 and one fp32 scale each, with what is lost kept for the next time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold

import torch

from .arguments import (
    FLOAT8,
    check_apart,
    check_contiguous,
    check_device,
    check_dtype,
    check_multiple,
    check_no_gradient,
    check_numel,
    check_tensor,
    check_tensors,
    refuse,
)
from .native import native
from .reduce import with_one_nan

SOURCES = (torch.float32, torch.float16, torch.bfloat16)
QUANTIZED = (torch.int8, *FLOAT8)
Tensors = Sequence[torch.Tensor]


def num_blocks(numel: int, block: int) -> int:
    return (numel + block - 1) // block


def largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def _in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    flat = x.reshape(-1)
    block = max(1, min(block, flat.numel()))  # no more padding than needed
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block)).reshape(-1, block)


def quantize_reference(
    x: torch.Tensor, dtype: torch.dtype, block: int = 128, error: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, scales and the new error."""
    v = _in_blocks(x.to(torch.float32) if error is None else x.to(torch.float32) + error, block)
    most = v.abs().amax(1, keepdim=True) if v.numel() else v.new_zeros(v.shape[0], 1)
    scales = most / largest(dtype)
    scales = torch.where(scales == 0, 1.0, scales)
    scales = torch.where(most.isfinite(), scales, float("nan"))
    exact = (v / scales).clamp(-largest(dtype), largest(dtype)).nan_to_num(0)
    q = exact.round().to(dtype) if dtype == torch.int8 else exact.to(dtype)
    q = torch.where(scales.isnan(), 0, q.view(torch.uint8)).view(dtype)
    lost = torch.where(scales.isnan(), 0.0, v - q.to(torch.float32) * scales)
    shape, numel = x.shape, x.numel()
    return q.reshape(-1)[:numel].reshape(shape), scales.reshape(-1), lost.reshape(-1)[:numel].reshape(shape)


def dequantize_reference(
    q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32, block: int = 128
) -> torch.Tensor:
    values = _in_blocks(q.to(torch.float32), block) * scales.reshape(-1, 1)
    return values.reshape(-1)[: q.numel()].reshape(q.shape).to(dtype)


def dequantize_reduce_reference(qs: Tensors, scales: Tensors, block: int = 128) -> torch.Tensor:
    total = fold(torch.add, [dequantize_reference(q, s, block=block) for q, s in zip(qs, scales, strict=True)])
    return with_one_nan(total)


def _check_scales(scales: torch.Tensor, q: torch.Tensor, block: int, argument: str) -> None:
    check_tensor(scales, argument)
    check_dtype(scales.dtype, (torch.float32,), f"the dtype of {argument}")
    check_contiguous(scales, argument)
    check_device([scales], argument, q.device)
    check_numel(scales, num_blocks(q.numel(), block), argument, f"one for each block of {block}")


def quantize_into(
    x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, block: int = 128, error: torch.Tensor | None = None
) -> None:
    """As quantize, into `q` (its dtype is the target), `scales` and, where given, `error`: contiguous, in memory apart.

    Raises ConfigError, before anything is written.
    """
    check_multiple(block, 16, "block")
    for tensor, argument in ((x, "x"), (q, "q")):
        check_tensor(tensor, argument)
        check_contiguous(tensor, argument)
    check_dtype(x.dtype, SOURCES, "the dtype of x")
    check_dtype(q.dtype, QUANTIZED, "the dtype of q")
    check_device([q], "x and q", x.device)
    check_numel(q, x.numel(), "q", "as many as x")
    _check_scales(scales, q, block, "scales")
    written = [(q, "q"), (scales, "scales")]
    if error is not None:
        check_tensor(error, "error")
        check_dtype(error.dtype, (torch.float32,), "the dtype of error")
        check_contiguous(error, "error")
        check_device([error], "x and error", x.device)
        check_numel(error, x.numel(), "error", "as many as x")
        written.append((error, "error"))
    apart = [(x, "x")]
    for tensor, argument in written:
        for other, name in apart:
            check_apart(tensor, argument, [other], name)
        apart.append((tensor, argument))
    check_no_gradient([tensor for tensor, _ in apart], "quantize_into", "detached tensors")
    kernel = native("quantize", x.device)
    if kernel is not None:
        kernel(x, q, scales, block, error)
        return
    bits, factors, lost = quantize_reference(x, q.dtype, block, None if error is None else error.reshape(x.shape))
    q.copy_(bits.reshape(q.shape))
    scales.copy_(factors.reshape(scales.shape))
    if error is not None:
        error.copy_(lost.reshape(error.shape))


def quantize(
    x: torch.Tensor, dtype: torch.dtype, block: int = 128, error: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x in blocks of `block` elements, each as `dtype` times one scale. Not differentiable.

    For each block v = x + error; scale = max|v| / the largest value of dtype (1 where that is 0); q = v / scale rounded
    to nearest, ties to even. A block with a NaN or an Inf gets scale NaN: all of it dequantises to NaN.

    Args:
        x: contiguous fp32, fp16 or bf16, seen flat.
        dtype: int8 or one of the four float8 dtypes.
        block: a multiple of 16; the last block may be shorter.
        error: fp32 with as many elements as x, or None. It is changed in place to what was lost, v - q * scale, to be
            added the next time ("error feedback").

    Returns q, shaped like x, and fp32 scales, one for each block. Raises ConfigError.
    """
    check_multiple(block, 16, "block")
    check_tensor(x, "x")
    check_dtype(dtype, QUANTIZED, "dtype")
    x = x.detach()
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(num_blocks(x.numel(), block), dtype=torch.float32, device=x.device)
    quantize_into(x, q, scales, block, error)
    return q, scales


def _check_quantized(q: torch.Tensor, scales: torch.Tensor, block: int, names: tuple[str, str]) -> None:
    check_tensor(q, names[0])
    check_dtype(q.dtype, QUANTIZED, f"the dtype of {names[0]}")
    check_contiguous(q, names[0])
    _check_scales(scales, q, block, names[1])


def dequantize_into(q: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, block: int = 128) -> None:
    """As dequantize, into a contiguous fp32, fp16 or bf16 tensor of as many elements.

    Raises ConfigError, before anything is written.
    """
    check_multiple(block, 16, "block")
    _check_quantized(q, scales, block, ("q", "scales"))
    check_tensor(out, "out")
    check_dtype(out.dtype, SOURCES, "the dtype of out")
    check_contiguous(out, "out")
    check_device([out], "q and out", q.device)
    check_numel(out, q.numel(), "out", "as many as q")
    check_apart(out, "out", [q], "q")
    check_apart(out, "out", [scales], "scales")
    check_no_gradient([scales, out], "dequantize_into", "detached tensors")
    kernel = native("dequantize", q.device)
    if kernel is not None:
        kernel(q, scales, out, block)
    else:
        out.copy_(dequantize_reference(q, scales, out.dtype, block).reshape(out.shape))


def dequantize(
    q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32, block: int = 128
) -> torch.Tensor:
    """q times the scale of its block, computed in fp32 and rounded to dtype (fp32, fp16 or bf16), shaped like q.

    Not differentiable. Raises ConfigError.
    """
    check_tensor(q, "q")
    check_dtype(dtype, SOURCES, "dtype")
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    dequantize_into(q, scales.detach() if isinstance(scales, torch.Tensor) else scales, out, block)
    return out


def dequantize_reduce(qs: Tensors, scales: Tensors, block: int = 128) -> torch.Tensor:
    """The fp32 sum of k >= 1 quantised shards, in the order of the shards, shaped like them: what an exchange of
    compressed gradients adds up to. Not differentiable. Raises ConfigError.
    """
    check_multiple(block, 16, "block")
    check_tensors(qs, "qs", at_least=1)
    check_tensors(scales, "scales")
    if len(scales) != len(qs):
        refuse(f"scales must be as many as qs, {len(qs)}, got {len(scales)}")
    for i, (q, factors) in enumerate(zip(qs, scales, strict=True)):
        _check_quantized(q, factors, block, (f"qs[{i}]", f"scales[{i}]"))
        if q.shape != qs[0].shape or q.dtype != qs[0].dtype:
            refuse(
                f"qs must be alike, got {tuple(qs[0].shape)} of {qs[0].dtype} and, as qs[{i}], "
                f"{tuple(q.shape)} of {q.dtype}"
            )
    check_device(qs, "qs", qs[0].device)
    scales = [one.detach() for one in scales]
    kernel = native("dequantize_sum", qs[0].device)
    if kernel is None:
        return dequantize_reduce_reference(qs, scales, block)
    out = torch.empty(qs[0].shape, dtype=torch.float32, device=qs[0].device)
    kernel(qs, scales, out, block)
    return out
