"""Shards of one shape to one tensor, in the order of the shards: the same bits wherever it is computed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce as fold
from itertools import accumulate
from typing import Any

import torch

from .arguments import (
    COMPUTED,
    FLOATS,
    check_apart,
    check_contiguous,
    check_device,
    check_dtype,
    check_no_gradient,
    check_tensor,
    check_tensors,
    refuse,
    wants_gradient,
)
from .native import native
from .pack import converted

Tensors = Sequence[torch.Tensor]


def _smaller(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((b < a) | (b != b), b, a)


def _larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((b > a) | (b != b), b, a)


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": operator.add,
    "avg": operator.add,
    "min": _smaller,
    "max": _larger,
    "prod": operator.mul,
}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in FLOATS and dtype != torch.float64 else dtype


_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAN = {  # as bits
    torch.float64: 0x7FF8 << 48,
    torch.float32: 0x7FC0 << 16,
    torch.bfloat16: 0x7FC0,
    torch.float16: 0x7E00,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7E,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
}


def with_one_nan(x: torch.Tensor) -> torch.Tensor:
    """Every NaN as the same bits: processors differ in which of two NaNs comes out of a sum."""
    if x.dtype not in _NAN:
        return x
    return torch.where(x.isnan(), _NAN[x.dtype], x.view(_RAW[x.element_size()])).view(x.dtype)


def reduce_reference(shards: Tensors, op: str = "sum") -> torch.Tensor:
    dtype = shards[0].dtype
    wide = [shard.to(_wide(dtype)) for shard in shards]
    if dtype == torch.bool:
        wide = [shard.to(torch.uint8) for shard in shards]
    out = fold(_COMBINE[op], wide)
    if op == "avg":
        out = out / len(shards)
    return with_one_nan(converted(out, dtype))


def check_op(op: str, dtype: torch.dtype) -> None:
    if op not in _COMBINE:
        refuse(f"op must be one of {', '.join(_COMBINE)}, got {op!r}")
    if (op == "avg" and dtype not in FLOATS) or (dtype == torch.bool and op not in ("min", "max")):
        refuse(f"op must be one that {dtype} has, got {op!r}")


def _check(shards: Tensors, op: str) -> None:
    check_tensors(shards, "shards", at_least=1)
    first = shards[0]
    check_dtype(first.dtype, COMPUTED, "the dtype of shards")
    check_device(shards, "shards", first.device)
    for i, shard in enumerate(shards):
        if shard.shape != first.shape or shard.dtype != first.dtype:
            refuse(
                f"shards must be alike, got {tuple(first.shape)} of {first.dtype} and, as shards[{i}], "
                f"{tuple(shard.shape)} of {shard.dtype}"
            )
        check_contiguous(shard, f"shards[{i}]")
    check_op(op, first.dtype)


def _reduce(shards: Tensors, out: torch.Tensor, op: str) -> None:
    kernel = native("reduce", out.device)
    if kernel is not None:
        kernel(shards, out, op)
    else:
        out.copy_(reduce_reference(shards, op))


def _reduced(shards: Tensors, op: str) -> torch.Tensor:
    out = torch.empty_like(shards[0], memory_format=torch.contiguous_format)
    _reduce(shards, out, op)
    return out


def _products_of_others(shards: Tensors) -> list[torch.Tensor]:
    """For each shard the product of all others, without a division: a shard may hold zeros."""
    one = torch.ones_like(shards[0])
    before = list(accumulate([one, *shards[:-1]], operator.mul))
    after = list(accumulate([one, *reversed(shards[1:])], operator.mul))[::-1]
    return [b * a for b, a in zip(before, after, strict=True)]


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, *shards: torch.Tensor) -> torch.Tensor:
        out = _reduced(shards, op)
        ctx.op, ctx.num_shards = op, len(shards)
        if op in ("min", "max"):
            ctx.save_for_backward(*shards, out)
        elif op == "prod":
            ctx.save_for_backward(*shards)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.op == "sum":
            return None, *[grad] * ctx.num_shards
        if ctx.op == "avg":
            return None, *[grad / ctx.num_shards] * ctx.num_shards
        if ctx.op == "prod":
            wide = [shard.to(_wide(shard.dtype)) for shard in ctx.saved_tensors]
            return None, *[(grad * others).to(grad.dtype) for others in _products_of_others(wide)]
        *shards, out = ctx.saved_tensors
        grads, free = [], torch.ones_like(out, dtype=torch.bool)
        for shard in shards:  # to the first shard that has the result
            here = free & ((shard == out) | (shard != shard))
            grads.append(torch.where(here, grad, torch.zeros_like(grad)))
            free = free & ~here
        return None, *grads


def reduce(shards: Tensors, op: str = "sum") -> torch.Tensor:
    """One new tensor from k >= 1 shards: combined element by element, in the order of the shards. Differentiable.

    fp32, fp16, bf16 and fp8 are combined in fp32 and rounded once, at the end; fp64 in fp64; integers wrap around.
    "min" and "max" keep the first of two equals. A NaN in any shard makes the result NaN, for every op.

    Args:
        shards: contiguous tensors of one shape, dtype and device.
        op: "sum", "avg" (floating dtypes only), "min", "max" or "prod"; bool has only "min" (all) and "max" (any).

    Raises ConfigError.
    """
    _check(shards, op)
    if wants_gradient(shards):
        return _Reduce.apply(op, *shards)  # type: ignore[no-any-return, no-untyped-call]
    return _reduced(shards, op)


def reduce_into(shards: Tensors, out: torch.Tensor, op: str = "sum") -> None:
    """As reduce, into a contiguous tensor like the shards, which may be one of them.

    Raises ConfigError, before anything is written.
    """
    _check(shards, op)
    check_tensor(out, "out")
    check_contiguous(out, "out")
    check_device([out], "shards and out", shards[0].device)
    if out.shape != shards[0].shape or out.dtype != shards[0].dtype:
        refuse(
            f"out must be like the shards, {tuple(shards[0].shape)} of {shards[0].dtype}, "
            f"got {tuple(out.shape)} of {out.dtype}"
        )
    check_apart(out, "out", shards, "a part of an element of shards", may_be_same=True)
    check_no_gradient([*shards, out], "reduce_into", "reduce")
    _reduce(shards, out, op)
