"""Many tensors of any shape and strides, to and from one contiguous tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .arguments import (
    COMPUTED,
    check_apart,
    check_contiguous,
    check_device,
    check_dtype,
    check_no_gradient,
    check_numel,
    check_own_elements,
    check_tensor,
    check_tensors,
    refuse,
    wants_gradient,
)
from .native import native

Tensors = Sequence[torch.Tensor]


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x.to(dtype), as torch 2.13 has it: what is too large for e4m3fn becomes its largest value (before: NaN)."""
    if dtype == torch.float8_e4m3fn and x.dtype != dtype:
        x = x.to(torch.float32).clamp(-448, 448)
    return x.to(dtype)


def pack_reference(parts: Tensors, dtype: torch.dtype) -> torch.Tensor:
    device = parts[0].device if parts else None
    flat = [converted(part, dtype).reshape(-1) for part in parts]
    return torch.cat([torch.empty(0, dtype=dtype, device=device), *flat])


def unpack_reference(
    packed: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    pieces = torch.split(packed.reshape(-1), [math.prod(shape) for shape in shapes])
    return [
        converted(piece, dtype).reshape(tuple(shape))
        for piece, shape, dtype in zip(pieces, shapes, dtypes, strict=True)
    ]


def bytes_of(contiguous: torch.Tensor) -> torch.Tensor:
    """Its bytes, as a view. (A contiguous tensor of one element may have any strides, which view() refuses.)"""
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _check(parts: Tensors, parts_name: str, packed: torch.Tensor, packed_name: str) -> None:
    check_contiguous(packed, packed_name)
    check_device(parts, parts_name, packed.device)
    dtypes = {packed.dtype, *(part.dtype for part in parts)}
    if len(dtypes) > 1:
        for dtype in dtypes:
            check_dtype(dtype, COMPUTED, f"the dtype of {parts_name} and {packed_name}, where they differ,")
    check_numel(packed, sum(part.numel() for part in parts), packed_name, f"as many as {parts_name} together")


def _pack(parts: Tensors, out: torch.Tensor) -> None:
    same = all(part.dtype == out.dtype for part in parts)
    op = native("pack" if same else "pack_cast", out.device)
    if op is not None:
        op(parts, out)
    else:
        out.copy_(pack_reference(parts, out.dtype).reshape(out.shape))


def _unpack(packed: torch.Tensor, outs: Tensors) -> None:
    same = all(out.dtype == packed.dtype for out in outs)
    op = native("unpack" if same else "unpack_cast", packed.device)
    if op is not None:
        op(packed, outs)
    else:
        pieces = unpack_reference(packed, [out.shape for out in outs], [out.dtype for out in outs])
        for out, piece in zip(outs, pieces, strict=True):
            out.copy_(piece)


def _packed(parts: Tensors, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=parts[0].device)
    _pack(parts, out)
    return out


def _unpacked(
    packed: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    pairs = zip(shapes, dtypes, strict=True)
    outs = [torch.empty(tuple(shape), dtype=dtype, device=packed.device) for shape, dtype in pairs]
    _unpack(packed, outs)
    return outs


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parts: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [part.shape for part in parts]
        ctx.dtypes = [part.dtype for part in parts]
        return _packed(parts, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_Unpack.apply(ctx.shapes, ctx.dtypes, grad.contiguous())  # type: ignore[no-untyped-call]


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shapes: Any, dtypes: Any, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.shape, ctx.dtype = packed.shape, packed.dtype
        return tuple(_unpacked(packed, shapes, dtypes))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, _Pack.apply(ctx.dtype, *grads).reshape(ctx.shape)  # type: ignore[no-untyped-call]


def pack(parts: Tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
    """All elements of all parts, each part in logical (row-major) order, as a new 1-D tensor. Differentiable.

    Args:
        parts: at least one tensor, of any shape and strides, on one device.
        dtype: of the result; elements are converted as by `.to(dtype)`. Default: the dtype of the parts, which then
            must be one.

    Raises ConfigError.
    """
    check_tensors(parts, "parts", at_least=1)
    check_device(parts, "parts", parts[0].device)
    dtypes = {part.dtype for part in parts}
    if dtype is None:
        if len(dtypes) > 1:
            refuse(f"dtype must be given where parts have several, got {sorted(map(str, dtypes))}")
        dtype = parts[0].dtype
    if dtypes != {dtype}:
        check_dtype(dtype, COMPUTED, "dtype")
        for part in parts:
            check_dtype(part.dtype, COMPUTED, "the dtype of parts")
    if wants_gradient(parts):
        return _Pack.apply(dtype, *parts)  # type: ignore[no-any-return, no-untyped-call]
    return _packed(parts, dtype)


def pack_into(parts: Tensors, out: torch.Tensor) -> None:
    """As pack, into a contiguous tensor of as many elements, of any shape, whose dtype is that of the result.

    Raises ConfigError, before anything is written: sizes or devices differ, out is not contiguous or shares memory.
    """
    check_tensors(parts, "parts")
    check_tensor(out, "out")
    _check(parts, "parts", out, "out")
    check_apart(out, "out", parts, "an element of parts")
    check_no_gradient([*parts, out], "pack_into", "pack")
    _pack(parts, out)


def unpack(
    packed: torch.Tensor, shapes: Sequence[Sequence[int]], dtype: torch.dtype | Sequence[torch.dtype] | None = None
) -> list[torch.Tensor]:
    """The reverse of pack: new contiguous tensors of these shapes, filled one after the other. Differentiable.

    Args:
        packed: contiguous, with as many elements as the shapes together.
        dtype: of the results, one for all or one each; elements are converted as by `.to(dtype)`. Default: packed's.

    Raises ConfigError.
    """
    check_tensor(packed, "packed")
    check_contiguous(packed, "packed")
    dtype = packed.dtype if dtype is None else dtype
    dtypes = [dtype] * len(shapes) if isinstance(dtype, torch.dtype) else list(dtype)
    if len(dtypes) != len(shapes):
        refuse(f"dtype must be one, or one for each of the {len(shapes)} shapes, got {len(dtypes)}")
    if any(one != packed.dtype for one in dtypes):
        for one in (packed.dtype, *dtypes):
            check_dtype(one, COMPUTED, "dtype")
    check_numel(packed, sum(math.prod(shape) for shape in shapes), "packed", "as many as the shapes together")
    if wants_gradient([packed]) and shapes:
        return list(_Unpack.apply(shapes, dtypes, packed))  # type: ignore[no-untyped-call]
    return _unpacked(packed, shapes, dtypes)


def unpack_into(packed: torch.Tensor, outs: Tensors) -> None:
    """As unpack, into existing tensors of any shape and strides, none of which has elements that share memory.

    Raises ConfigError, before anything is written.
    """
    check_tensor(packed, "packed")
    check_tensors(outs, "outs")
    _check(outs, "outs", packed, "packed")
    for i, out in enumerate(outs):
        check_own_elements(out, f"outs[{i}]")
        check_apart(out, f"outs[{i}]", [packed], "packed")
    check_no_gradient([packed, *outs], "unpack_into", "unpack")
    _unpack(packed, outs)


def _check_bytes(parts: Tensors, parts_name: str, packed: torch.Tensor, packed_name: str) -> None:
    check_contiguous(packed, packed_name)
    check_device(parts, parts_name, packed.device)
    total, size = sum(part.nbytes for part in parts), packed.nbytes
    if total != size:
        refuse(f"{packed_name} must have {total} bytes, as many as {parts_name} together, got {size}")


def pack_bytes_into(parts: Tensors, out: torch.Tensor) -> None:
    """The bytes of all parts, whatever their dtypes are, into a contiguous tensor of as many bytes, of any dtype.

    Raises ConfigError, before anything is written.
    """
    check_tensors(parts, "parts", aligned=False)
    check_tensor(out, "out", aligned=False)
    _check_bytes(parts, "parts", out, "out")
    check_apart(out, "out", parts, "an element of parts")
    check_no_gradient([*parts, out], "pack_bytes_into", "pack")
    op = native("pack", out.device)
    if op is not None:
        op(parts, out)
    elif parts:
        bytes_of(out).copy_(torch.cat([bytes_of(part.contiguous()) for part in parts]))


def unpack_bytes_into(packed: torch.Tensor, outs: Tensors) -> None:
    """The reverse of pack_bytes_into.

    Raises ConfigError, before anything is written.
    """
    check_tensor(packed, "packed", aligned=False)
    check_tensors(outs, "outs", aligned=False)
    _check_bytes(outs, "outs", packed, "packed")
    for i, out in enumerate(outs):
        check_own_elements(out, f"outs[{i}]")
        check_apart(out, f"outs[{i}]", [packed], "packed")
    check_no_gradient([packed, *outs], "unpack_bytes_into", "unpack")
    op = native("unpack", packed.device)
    if op is not None:
        op(packed, outs)
        return
    for out, piece in zip(outs, torch.split(bytes_of(packed), [out.nbytes for out in outs]), strict=True):
        out.copy_(piece.clone().view(out.dtype).reshape(out.shape))
