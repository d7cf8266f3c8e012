"""Conversions between dtypes (csrc/kernels/float_formats.h, elements.h) against torch's, over all patterns."""

from __future__ import annotations

import itertools

import pytest
import torch

from monarch_rdma import _C  # noqa: F401  (importing it registers the ops)

ops = torch.ops.monarch_rdma

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
SMALL = [torch.float16, torch.bfloat16, *FLOAT8]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*SMALL, torch.float32, torch.float64, *INTEGERS, torch.bool]


def cast(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(source.shape, dtype=dtype)
    ops.pack_cast([source], out)
    return out


def torch_cast(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As torch 2.13 has it: what is too large for e4m3fn becomes its largest value, as older ones don't have it."""
    if dtype == torch.float8_e4m3fn and source.is_floating_point():
        source = source.float().clamp(-448, 448)
    return source.to(dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, but one NaN is as good as another."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    wide_found, wide_expected = found.double(), expected.double()
    nan = wide_expected.isnan()
    assert torch.equal(wide_found.isnan(), nan)
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    assert torch.equal(found.view(raw)[~nan], expected.view(raw)[~nan])


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    storage = torch.uint8 if dtype.itemsize == 1 else torch.int16
    return torch.arange(256**dtype.itemsize).to(storage).view(dtype)


def probing_floats(dtype: torch.dtype) -> torch.Tensor:
    """fp32 values where rounding to dtype is decided: its numbers, the middles between them, their neighbours."""
    values = all_patterns(dtype).float()
    values = values[values.isfinite()].unique()
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    steps = torch.cat([values, middles])
    infinity = torch.tensor(float("inf"))
    beyond = torch.tensor([1.0, 1.03, 1.0625, 1.1, 1.25, 2, 1e20]) * torch.finfo(dtype).max
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45, 1.2e-38])
    random = torch.randint(-(2**31), 2**31 - 1, (1 << 18,)).to(torch.int32).view(torch.float32)
    near = [steps, torch.nextafter(steps, infinity), torch.nextafter(steps, -infinity)]
    return torch.cat([*near, beyond, -beyond, special, -special, random])


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_pattern_becomes_its_value(dtype: torch.dtype) -> None:
    patterns = all_patterns(dtype)
    assert_same(cast(patterns, torch.float32), patterns.float())
    assert_same(cast(patterns, torch.float64), patterns.double())


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_fp32_is_rounded_as_torch_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for source in (probing_floats(dtype), all_patterns(torch.float16), all_patterns(torch.bfloat16)):
        assert_same(cast(source, dtype), torch_cast(source, dtype))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_every_pair_of_dtypes(source: torch.dtype, target: torch.dtype) -> None:
    torch.manual_seed(1)
    values = torch.cat([torch.arange(-300.0, 300), torch.randn(500) * 10, torch.tensor([0.0, -0.0, 0.5, -0.5, 1e-7])])
    values = torch_cast(values, source)
    if not target.is_floating_point and target != torch.bool:
        values = values[values.double().isfinite()]
    assert_same(cast(values, target), torch_cast(values, target))


def test_floats_outside_of_an_integer_go_to_the_nearest_64_bit_integer_and_then_to_its_low_bits() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e9, -3e9, 300.7])
    big, small = 2**63 - 1, -(2**63)
    assert cast(values, torch.int64).tolist() == [0, big, small, 3_000_000_000, -3_000_000_000, 300]
    assert cast(values, torch.int32).tolist() == [0, -1, 0, 3_000_000_000 - 2**32, 2**32 - 3_000_000_000, 300]
    assert cast(values, torch.uint8).tolist()[-1] == 300 - 256
    assert cast(values.double(), torch.int64).tolist() == cast(values, torch.int64).tolist()
