"""torch.ops.monarch_rdma against torch's own copies, for tensors of any shape, strides and dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma import _C, _engine  # noqa: F401  (importing _C registers the ops)

ops = torch.ops.monarch_rdma
ffi, lib = _engine.ffi, _engine.lib

DTYPES = [
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex128,
]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in logical order, by torch's own copy."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def filled(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of that shape whose bytes all differ from their neighbours'."""
    numel = torch.Size(shape).numel()
    data = (torch.arange(numel * dtype.itemsize) % 251).to(torch.uint8)
    if dtype == torch.bool:
        return (data % 2).view(torch.bool).reshape(shape)
    return data.view(dtype).reshape(shape)


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A view of up to five dimensions, permuted, stepped and sliced; each element its own memory."""
    shape = draw(st.lists(st.integers(0, 5), max_size=5))
    tensor = filled(shape, draw(st.sampled_from(DTYPES)))
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, draw(st.integers(1, 3))),)]
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


@given(st.lists(strided(), max_size=4))
def test_pack_and_unpack_copy_what_torch_copies(parts: list[torch.Tensor]) -> None:
    expected = torch.cat([torch.empty(0, dtype=torch.uint8), *map(raw, parts)])
    packed = torch.full_like(expected, 255)
    ops.pack(parts, packed)
    assert torch.equal(packed, expected)

    wider = [torch.zeros((*part.shape, 2), dtype=part.dtype) for part in parts]
    outs = [wide[..., 0] for wide in wider]
    ops.unpack(packed, outs)
    for part, out, wide in zip(parts, outs, wider, strict=True):
        assert torch.equal(raw(out), raw(part))
        assert not raw(wide[..., 1]).any(), "wrote between the elements"


def test_pack_takes_expanded_parts() -> None:
    part = torch.arange(3.0)[:, None].expand(3, 4)
    packed = torch.empty(12)
    ops.pack([part], packed)
    assert torch.equal(packed.reshape(3, 4), part)


BYTES = torch.zeros(16, dtype=torch.uint8)
REFUSED = [
    ("out has 16 bytes, parts have 12 together", lambda: ops.pack([torch.zeros(3)], BYTES.clone())),
    ("out must be contiguous", lambda: ops.pack([torch.zeros(2)], BYTES.clone()[::2])),
    ("out shares memory with an element of parts", lambda: ops.pack([BYTES], BYTES)),
    ("packed has 16 bytes, outs have 4 together", lambda: ops.unpack(BYTES, [torch.zeros(1)])),
    ("outs has elements that share memory", lambda: ops.unpack(BYTES, [torch.zeros(1).expand(4)])),
    ("dst has elements that share memory", lambda: ops.read_(torch.zeros(1).expand(4), 1, 1.0)),
    ("remote must be an open handle, got 0", lambda: ops.read_(BYTES.clone(), 0, 1.0)),
    ("remote must be an open handle, got 0", lambda: ops.write(BYTES, 0, 1.0)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message for message, _ in REFUSED])
def test_bad_arguments_are_named_before_a_byte_moves(message: str, call: Any) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
    assert not BYTES.any()


def test_more_dimensions_than_a_view_holds() -> None:
    tensor = torch.zeros((3,) * 17, dtype=torch.uint8, device="meta")[(slice(None, None, 2),) * 17]
    small = torch.zeros(3**17 + 1, dtype=torch.uint8).as_strided(tensor.shape, tensor.stride())
    with pytest.raises(RuntimeError, match="parts has 17 dimensions that cannot be merged; at most 16"):
        ops.pack([small], torch.empty(small.numel(), dtype=torch.uint8))


# --- transfers: two engines in this process -----------------------------------------------------------------------


class Region:
    """A tensor that one engine owns, and the handle by which another engine reaches it."""

    def __init__(self, tensor: torch.Tensor, access: int) -> None:
        self.tensor = tensor
        self.engines = [self._engine(f"test-ops-{role}") for role in ("owner", "reader")]
        error = ffi.new("mr_error *")
        region = ffi.new("mr_region **")
        address = ffi.cast("void *", tensor.data_ptr())
        size = tensor.numel() * tensor.element_size()
        assert lib.mr_region_create(self.engines[0], address, size, access, region, error) == 0, self._text(error)
        descriptor = ffi.new("uint8_t[]", lib.mr_region_descriptor(region[0], ffi.NULL, 0))
        lib.mr_region_descriptor(region[0], descriptor, len(descriptor))
        self.remote = ffi.new("mr_remote **")
        opened = lib.mr_remote_open(self.engines[1], descriptor, len(descriptor), self.remote, error)
        assert opened == 0, self._text(error)

    @staticmethod
    def _text(error: Any) -> str:
        return str(ffi.string(error.message).decode())

    def _engine(self, name: str) -> Any:
        options, engine, error = ffi.new("mr_options *"), ffi.new("mr_engine **"), ffi.new("mr_error *")
        lib.mr_options_default(options)
        keep = ffi.new("char[]", name.encode()), ffi.new("uint8_t[]", b"a secret for these tests")
        options.name, options.secret, options.secret_len = keep[0], keep[1], len(keep[1])
        assert lib.mr_engine_create(options, engine, error) == 0, self._text(error)
        return engine[0]

    @property
    def handle(self) -> int:
        return int(ffi.cast("intptr_t", self.remote[0]))

    def close(self) -> None:
        lib.mr_remote_close(self.remote[0])
        for engine in reversed(self.engines):
            lib.mr_engine_close(engine)


@pytest.fixture
def region() -> Iterator[Region]:
    opened = Region(torch.arange(60, dtype=torch.float32), lib.MR_READ | lib.MR_WRITE)
    yield opened
    opened.close()


@pytest.fixture
def read_only_region() -> Iterator[Region]:
    opened = Region(torch.arange(60, dtype=torch.float32), lib.MR_READ)
    yield opened
    opened.close()


def test_read_and_write_of_strided_tensors(region: Region) -> None:
    wide = torch.zeros(5, 4, 6)
    dst = wide[..., ::2].permute(2, 0, 1)
    ops.read_(dst, region.handle, 10.0)
    assert torch.equal(raw(dst), raw(region.tensor))
    assert not wide[..., 1::2].any(), "wrote between the elements"

    src = -torch.arange(120.0).reshape(10, 12).t()[::2]
    ops.write(src, region.handle, 10.0)
    assert torch.equal(raw(region.tensor), raw(src))


def test_a_size_that_does_not_match_is_refused(region: Region) -> None:
    with pytest.raises(RuntimeError, match="dst has 236 bytes, the remote region 240"):
        ops.read_(torch.zeros(59), region.handle, 10.0)
    with pytest.raises(RuntimeError, match="src has 244 bytes, the remote region 240"):
        ops.write(torch.zeros(61), region.handle, 10.0)


def test_the_engines_refusal_is_the_error(read_only_region: Region) -> None:
    with pytest.raises(RuntimeError, match="write"):
        ops.write(torch.zeros(60), read_only_region.handle, 10.0)
    assert torch.equal(read_only_region.tensor, torch.arange(60.0))
