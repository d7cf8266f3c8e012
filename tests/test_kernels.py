"""monarch_rdma.kernels: the C++ on the CPU against the plain torch references beside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma import kernels
from monarch_rdma.errors import ConfigError
from monarch_rdma.kernels import native
from monarch_rdma.kernels.arguments import COMPUTED, FLOAT8
from monarch_rdma.kernels.pack import converted
from monarch_rdma.kernels.quantize import QUANTIZED, SOURCES

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OPS = ("sum", "avg", "min", "max", "prod")
SIZES = st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 1000, 4097]))
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 3e38, -3e38, 1e-6, 448.0, 57344.0]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(RAW[tensor.element_size()])


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(bits(found), bits(expected))


def assert_same_values(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, but one NaN is as good as another."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    nan = expected.double().isnan()
    assert torch.equal(found.double().isnan(), nan)
    assert torch.equal(bits(found)[~nan], bits(expected)[~nan])


def values(size: int, dtype: torch.dtype, seed: int, special: bool = False) -> torch.Tensor:
    """Random ones, a few of them special, at an offset in their storage that no vector likes."""
    random = torch.Generator().manual_seed(seed)
    offset = seed % 7
    if dtype.is_floating_point:
        wide = torch.randn(size + offset, generator=random) * 10.0 ** (seed % 5 - 2)
        if special and size:
            where = torch.randperm(size + offset, generator=random)[: 1 + size // 8]
            which = torch.randint(0, len(SPECIAL), where.shape, generator=random)
            wide[where] = torch.tensor(SPECIAL)[which]
        return converted(wide, dtype)[offset:]
    if dtype == torch.bool:
        return (torch.randint(0, 2, (size + offset,), generator=random) == 1)[offset:]
    if dtype.is_complex:
        return torch.randn(size + offset, dtype=dtype, generator=random)[offset:]
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (size + offset,), generator=random, dtype=dtype)[offset:]


@st.composite
def strided(draw: st.DrawFn, dtypes: Any = COMPUTED) -> torch.Tensor:
    """A view of up to four dimensions, permuted, stepped, expanded."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    tensor = values(torch.Size(shape).numel(), draw(st.sampled_from(dtypes)), draw(st.integers(0, 99))).reshape(shape)
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, draw(st.integers(1, 3))),)]
    if draw(st.booleans()):
        tensor = tensor[None].expand(2, *tensor.shape)
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


# --- pack ----------------------------------------------------------------------------------------------------------


@given(st.lists(strided(), min_size=1, max_size=4), st.sampled_from(COMPUTED))
def test_pack_converts_what_torch_converts(parts: list[torch.Tensor], dtype: torch.dtype) -> None:
    parts = [part if part.dtype.is_floating_point <= dtype.is_floating_point else part.isnan() for part in parts]
    expected = kernels.pack_reference(parts, dtype)
    assert_same_values(kernels.pack(parts, dtype), expected)

    wider = [torch.zeros((*part.shape, 2), dtype=part.dtype) for part in parts]
    outs = [wide[..., 1] for wide in wider]
    back = [out.dtype for out in outs] if not dtype.is_floating_point else [dtype] * len(outs)
    wider = [wide.to(one) for wide, one in zip(wider, back, strict=True)]
    outs = [wide[..., 1] for wide in wider]
    kernels.unpack_into(expected, outs)
    shapes = [part.shape for part in parts]
    for out, wide, piece in zip(outs, wider, kernels.unpack_reference(expected, shapes, back), strict=True):
        assert_same_values(out.contiguous(), piece)
        assert not wide[..., 0].to(torch.bool).any(), "wrote between the elements"
    for found, piece in zip(kernels.unpack(expected, shapes, back), outs, strict=True):
        assert_same_values(found, piece.contiguous())


@given(st.lists(strided((torch.float32, torch.int16, torch.complex64, torch.float8_e5m2, torch.bool)), max_size=4))
def test_bytes_of_several_dtypes(parts: list[torch.Tensor]) -> None:
    raw = [part.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for part in parts]
    expected = torch.cat([torch.empty(0, dtype=torch.uint8), *raw])
    out = torch.full_like(expected, 7)
    kernels.pack_bytes_into(parts, out)
    assert torch.equal(out, expected)
    outs = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
    kernels.unpack_bytes_into(out, outs)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(outs, parts, strict=True))


def test_large_boxes_of_every_kind_of_stride() -> None:
    base = torch.arange(3 << 20, dtype=torch.int32)
    square = base[: 1 << 20].view(1024, 1024)
    parts = [
        base,
        square.t(),
        square[:, 1::2],
        square[::3, 5:1000],
        base.view(4, 16, 64, 768)[:, ::2, :, ::3].permute(2, 0, 3, 1),
        torch.tensor([[1], [2]], dtype=torch.int32).expand(2, 70_000),
    ]
    assert_same_bits(kernels.pack(parts), kernels.pack_reference(parts, torch.int32))
    assert_same_bits(kernels.pack(parts, torch.float16), kernels.pack_reference(parts, torch.float16))
    outs = [torch.empty_like(part) if i < 5 else part.contiguous() for i, part in enumerate(parts)]
    wide = torch.zeros(1024, 1024, dtype=torch.int32)
    outs[2] = wide[:, 1::2]
    packed = kernels.pack(parts)
    kernels.unpack_into(packed, outs)
    assert all(torch.equal(out, part) for out, part in zip(outs, parts, strict=True))
    assert not wide[:, ::2].any()


# --- reduce --------------------------------------------------------------------------------------------------------


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.bool:
        return ("min", "max")
    return OPS if dtype.is_floating_point else tuple(op for op in OPS if op != "avg")


@given(st.data())
def test_reduce_has_the_bits_of_the_reference(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(COMPUTED))
    op = data.draw(st.sampled_from(ops_of(dtype)))
    size, num, seed = data.draw(SIZES), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 10_000))
    shards = [values(size, dtype, seed + i, special=seed % 2 == 0) for i in range(num)]
    expected = kernels.reduce_reference(shards, op)
    assert_same_bits(kernels.reduce(shards, op), expected)
    into = shards[seed % num]
    kernels.reduce_into(shards, into, op)
    assert_same_bits(into, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOAT8], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_reduce_of_every_pattern(dtype: torch.dtype, op: str) -> None:
    patterns = torch.arange(256**dtype.itemsize).to(RAW[dtype.itemsize]).view(dtype)
    others = [bits(patterns).roll(step).view(dtype) for step in (1, 77, 130)]
    assert_same_bits(kernels.reduce([patterns, *others], op), kernels.reduce_reference([patterns, *others], op))
    assert_same_values(kernels.reduce([patterns], "sum"), patterns)


def test_sums_are_taken_in_the_order_of_shards() -> None:
    shards = [torch.full((100,), value) for value in (1e8, 1.0, -1e8)]
    assert kernels.reduce(shards).tolist() == [0.0] * 100
    assert kernels.reduce([shards[0], shards[2], shards[1]]).tolist() == [1.0] * 100


# --- quantise ------------------------------------------------------------------------------------------------------


@given(st.data())
def test_quantize_has_the_bits_of_the_reference(data: st.DataObject) -> None:
    dtype, source = data.draw(st.sampled_from(QUANTIZED)), data.draw(st.sampled_from(SOURCES))
    size, block, seed = (
        data.draw(SIZES),
        data.draw(st.sampled_from([16, 48, 128, 4096])),
        data.draw(st.integers(0, 9999)),
    )
    x = values(size, source, seed, special=seed % 3 == 0)
    error = values(size, torch.float32, seed + 1) * 0.01 if seed % 2 else None
    expected_q, expected_scales, lost = kernels.quantize_reference(x, dtype, block, error)
    q, scales = kernels.quantize(x, dtype, block, error)
    assert_same_bits(q, expected_q)
    assert_same_values(scales, expected_scales)
    if error is not None:
        assert torch.equal(error, lost)
    for target in SOURCES:
        found = kernels.dequantize(q, scales, target, block)
        assert_same_values(found, kernels.dequantize_reference(q, scales, target, block))


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quantize_keeps_its_promises(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    error = torch.zeros(1000)
    q, scales = kernels.quantize(x, dtype, 64, error)
    found = kernels.dequantize(q, scales, block=64)
    assert torch.equal(x - found, error), "what was lost is kept"
    most = torch.nn.functional.pad(x.abs(), (0, 24)).view(-1, 64).amax(1)
    steps = {torch.int8: 127 * 2}.get(dtype, 2 / torch.finfo(dtype).eps if dtype != torch.int8 else 0)
    assert bool((error.abs() <= most.repeat_interleave(64)[:1000] / steps * 2).all())
    special = torch.zeros(64)
    special[40] = float("inf")
    for poison in (special, special * 0.0):
        q, scales = kernels.quantize(
            torch.cat([torch.ones(64), poison, torch.zeros(64), torch.full((5,), 1e-45)]), dtype, 64
        )
        found = kernels.dequantize(q, scales, block=64)
        assert found[:64].isfinite().all() and found[64:128].isnan().all() and not found[128:].any()
        assert scales[2] == 1 and scales[3] == 1


def test_error_feedback_loses_nothing_over_time() -> None:
    torch.manual_seed(0)
    x, error, total = torch.randn(256), torch.zeros(256), torch.zeros(256, dtype=torch.float64)
    for _ in range(50):
        total += kernels.dequantize(*kernels.quantize(x, torch.float8_e5m2, error=error)).double()
    assert torch.allclose(total / 50, x.double(), atol=0.02)
    once = kernels.dequantize(*kernels.quantize(x, torch.float8_e5m2))
    assert (once - x).abs().max() > 0.1


@given(st.sampled_from(QUANTIZED), SIZES, st.integers(1, 5), st.sampled_from([16, 128]), st.integers(0, 9999))
def test_dequantize_reduce(dtype: torch.dtype, size: int, num: int, block: int, seed: int) -> None:
    pairs = [kernels.quantize(values(size, torch.float32, seed + i, seed % 3 == 0), dtype, block) for i in range(num)]
    qs, scales = [q for q, _ in pairs], [s for _, s in pairs]
    assert_same_bits(
        kernels.dequantize_reduce(qs, scales, block), kernels.dequantize_reduce_reference(qs, scales, block)
    )


# --- checksum ------------------------------------------------------------------------------------------------------


def plain_checksum(data: bytes, block: int) -> list[int]:
    """As docs/kernels.md has it, in Python's integers."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    sums = []
    for begin in range(0, len(data), block):
        piece = data[begin : begin + block]
        total = mix(len(piece))
        for i in range(0, len(piece), 8):
            total += mix(int.from_bytes(piece[i : i + 8], "little") + (i // 8 + 1) * 0x9E3779B97F4A7C15 & mask)
        sums.append(int.from_bytes((total & mask).to_bytes(8, "little"), "little", signed=True))
    return sums


@given(st.binary(max_size=300), st.sampled_from([8, 24, 64, 1 << 20]), st.integers(0, 7))
def test_checksum_is_what_the_document_says(data: bytes, block: int, offset: int) -> None:
    x = torch.frombuffer(bytearray(offset) + bytearray(data) + bytearray(1), dtype=torch.uint8)[offset:-1]
    expected = plain_checksum(data, block)
    assert kernels.checksum(x, block).tolist() == expected
    assert kernels.checksum_reference(x, block).tolist() == expected


@pytest.mark.parametrize("block", [4096, 1 << 20, 1 << 30])
def test_checksum_finds_the_block_of_a_changed_bit(block: int) -> None:
    x = torch.arange(700_001, dtype=torch.int32)
    before = kernels.checksum(x, block)
    assert torch.equal(before, kernels.checksum_reference(x, block))
    x[500_000] ^= 1 << 17
    changed = (kernels.checksum(x, block) != before).nonzero().flatten().tolist()
    assert changed == [2_000_000 // block]
    swapped = x.clone()
    swapped[10], swapped[11] = x[11], x[10]
    assert not torch.equal(kernels.checksum(swapped, block), kernels.checksum(x, block))


# --- one result, however it is computed ------------------------------------------------------------------------------


def everything() -> list[torch.Tensor]:
    """A result of each kernel, large enough for several threads."""
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16):
        shards = [values(400_003, dtype, seed, special=True) for seed in range(3)]
        results += [kernels.reduce(shards, op) for op in ops_of(dtype)]
    x = values(400_003, torch.float32, 5)
    for dtype in QUANTIZED:
        error = x * 0.01
        q, scales = kernels.quantize(x, dtype, error=error)
        results += [q, scales, error, kernels.dequantize(q, scales), kernels.dequantize_reduce([q, q], [scales] * 2)]
    parts = [x, x[::3], x[: 4 * 90_000].view(4, -1).t()]
    results += [kernels.checksum(x), kernels.checksum(x, 8), kernels.pack(parts), kernels.pack(parts, torch.float16)]
    return results


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_threads_change_no_bit() -> None:
    torch.set_num_threads(1)
    alone = everything()
    for number in (2, 5):
        torch.set_num_threads(number)
        for found, expected in zip(everything(), alone, strict=True):
            assert_same_bits(found, expected)


WITHOUT = """
import sys, torch
sys.modules["monarch_rdma._C"] = None
from monarch_rdma import kernels
from monarch_rdma.kernels import native
assert not native.AVAILABLE and not hasattr(torch.ops.monarch_rdma, "reduce")
x = torch.randn(1000)
shards = [x, 2 * x, 3 * x]
assert torch.equal(kernels.reduce(shards), kernels.reduce_reference(shards))
into = torch.empty(1000)
kernels.reduce_into(shards, into, "max")
q, scales = kernels.quantize(x, torch.int8, error=torch.zeros(1000))
assert (kernels.dequantize(q, scales) - x).abs().max() < 0.1
assert kernels.dequantize_reduce([q, q], [scales, scales]).shape == x.shape
assert torch.equal(kernels.checksum(x, 800), kernels.checksum_reference(x, 800))
assert torch.equal(kernels.pack([x, x[::2]], torch.bfloat16), torch.cat([x, x[::2]]).bfloat16())
a, b = torch.empty(10, 20), torch.empty(800, dtype=torch.float64)
kernels.unpack_into(x, [a, b])
assert torch.equal(b, x[200:].double())
raw = torch.empty(4000, dtype=torch.uint8)
kernels.pack_bytes_into([x], raw)
kernels.unpack_bytes_into(raw, [into])
assert torch.equal(into, x)
y = torch.ones(3, requires_grad=True)
kernels.reduce([y, y], "prod").sum().backward()
assert y.grad.tolist() == [2.0] * 3
try:
    kernels.reduce_into(shards, torch.empty(999))
except ValueError as error:
    print(error)
"""


def test_without_the_native_piece_references_do_it() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out must be like the shards, (1000,) of torch.float32, got (999,) of torch.float32\n"


# --- torch.compile, meta tensors, gradients --------------------------------------------------------------------------


def exchange(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    error = torch.zeros(x.shape)
    q, scales = kernels.quantize(x, torch.float8_e4m3fn, 32, error)
    packed = kernels.pack([x, y.t()], torch.bfloat16)
    a, b = kernels.unpack(packed, [x.shape, y.shape], torch.float32)
    into = torch.zeros(x.numel())
    kernels.unpack_into(packed[: x.numel()].clone(), [into])
    kernels.reduce_into([x, a], a, "max")
    total = kernels.dequantize_reduce([q, q], [scales, scales], 32)
    back = kernels.dequantize(q, scales, torch.float16, 32)
    return packed, b, into, a, total, back, error, kernels.checksum(x, 64), kernels.reduce([x, a, total], "avg")


def test_compiled_whole() -> None:
    torch.manual_seed(0)
    for x, y in ((torch.randn(5, 30), torch.randn(7, 9)), (torch.randn(5, 31), torch.randn(8, 9))):
        compiled = torch.compile(exchange, backend="aot_eager", fullgraph=True)
        for found, expected in zip(compiled(x, y), exchange(x, y), strict=True):
            assert_same_bits(found, expected)


def test_compiled_gradients() -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (kernels.pack([x, y.t()]) ** 2).sum() + (kernels.reduce([x, y], "prod") ** 3).sum()

    x, y = (torch.randn(6, 6, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(loss(x, y), [x, y])
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(x, y), [x, y])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_shapes_on_the_meta_device() -> None:
    x = torch.empty(100, 50, device="meta")
    q, scales = kernels.quantize(x, torch.int8)
    assert q.shape == x.shape and scales.shape == (40,) and scales.is_meta
    assert kernels.reduce([x, x]).shape == x.shape
    assert kernels.checksum(x, 800).shape == (25,)
    packed = kernels.pack([x, x.t()], torch.float16)
    assert packed.shape == (10_000,) and packed.dtype == torch.float16
    assert [part.shape for part in kernels.unpack(packed, [(50, 100), (5000,)])] == [(50, 100), (5000,)]
    assert kernels.dequantize(q, scales, torch.bfloat16).dtype == torch.bfloat16
    assert kernels.dequantize_reduce([q, q], [scales, scales]).shape == x.shape


def op_calls() -> list[tuple[str, tuple[object, ...]]]:
    x, y, q, scale = torch.randn(6, 8), torch.randn(8, 6), torch.ones(6, 8, dtype=torch.int8), torch.ones(3)
    flat, half, out = torch.zeros(96), torch.zeros(96, dtype=torch.bfloat16), torch.zeros(6, 8)
    return [
        ("pack", ([x, y.t()], flat)),
        ("unpack", (flat, [x, y])),
        ("pack_cast", ([x, y], half)),
        ("unpack_cast", (half, [x, y])),
        ("reduce", ([x, out], torch.zeros(6, 8), "sum")),
        ("quantize", (x, q, scale, 16, out)),
        ("dequantize", (q, scale, out, 16)),
        ("dequantize_sum", ([q, q], [scale, scale], out, 16)),
        ("checksum", (x, 64)),
    ]


@pytest.mark.parametrize(("name", "arguments"), op_calls(), ids=[name for name, _ in op_calls()])
def test_ops_are_what_torch_compile_takes_them_for(name: str, arguments: tuple[object, ...]) -> None:
    """They write what their schema says and nothing else, and their meta functions tell the results' shapes."""
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.monarch_rdma, name).default, arguments, test_utils=tests)


def test_every_op_is_checked() -> None:
    assert {name for name, _ in op_calls()} == set(native.AVAILABLE["cpu"])


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_gradients() -> None:
    torch.manual_seed(0)
    x, y, z = leaf(3, 4), leaf(3, 4), leaf(3, 4)
    assert torch.autograd.gradcheck(lambda a, b: kernels.pack([a.t(), b[::2]]), (x, y))
    assert torch.autograd.gradcheck(lambda a: tuple(kernels.unpack(a, [(2, 3), (6,)])), (x,))
    for op in OPS:
        assert torch.autograd.gradcheck(lambda a, b, c, op=op: kernels.reduce([a, b, c], op), (x, y, z))
    assert torch.autograd.gradgradcheck(lambda a, b, c: kernels.reduce([a, b, c], "prod"), (x, y, z))


def test_gradients_through_a_conversion() -> None:
    x = torch.randn(10, requires_grad=True)
    kernels.pack([x[::2], x], torch.bfloat16).backward(torch.full((15,), 2, dtype=torch.bfloat16))
    assert x.grad is not None and x.grad.tolist() == [4.0, 2.0] * 5
    packed = torch.randn(6, dtype=torch.float16, requires_grad=True)
    first, _second = kernels.unpack(packed, [(2,), (4,)], torch.float32)
    first.sum().backward()
    assert packed.grad is not None and packed.grad.tolist() == [1.0, 1.0, 0, 0, 0, 0]


def test_the_gradient_of_a_minimum_goes_to_the_first_that_has_it() -> None:
    x, y = (torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([1.0, 3.0, 2.0], requires_grad=True))
    kernels.reduce([x, y], "min").sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1, 0]
    assert y.grad is not None and y.grad.tolist() == [0, 0, 1]


# --- bad arguments ---------------------------------------------------------------------------------------------------

F32, F16, I8 = torch.ones(32), torch.ones(32, dtype=torch.float16), torch.ones(32, dtype=torch.int8)
SCALES, GRAD = torch.ones(2), torch.ones(32, requires_grad=True)
META = torch.ones(32, device="meta")
ODD = torch.frombuffer(bytearray(132), dtype=torch.float32, offset=1, count=32)
Q: Any = kernels.quantize_into
BAD: list[tuple[str, Callable[[], object]]] = [
    ("parts must be a list or tuple of tensors, got Tensor", lambda: kernels.pack(F32)),  # type: ignore[arg-type]
    ("parts must hold at least 1 tensor, got 0", lambda: kernels.pack([])),
    ("parts[1] must be a tensor, got int", lambda: kernels.pack([F32, 3])),  # type: ignore[list-item]
    ("parts[0] must be a plain strided tensor", lambda: kernels.pack([F32.to_sparse()])),
    ("dtype must be given where parts have several", lambda: kernels.pack([F32, F16])),
    ("dtype must be one of uint8, ", lambda: kernels.pack([F32], torch.complex64)),
    ("x must have elements aligned to their size", lambda: kernels.quantize(ODD, torch.int8, 16)),
    ("parts must all be on cpu, got one on meta", lambda: kernels.pack([F32, META])),
    (
        "out must have 32 elements, as many as parts together, got 31",
        lambda: kernels.pack_into([F32], F32[:31].clone()),
    ),
    ("out must be contiguous, got shape (16,) with strides (2,)", lambda: kernels.pack_into([F32[:16]], F32[::2])),
    ("out shares memory with an element of parts", lambda: kernels.pack_into([F32[:16]], F32[8:24])),
    ("pack_into is not differentiable", lambda: kernels.pack_into([GRAD], F32.clone())),
    ("packed must be contiguous", lambda: kernels.unpack(F32[::2], [(16,)])),
    ("packed must have 9 elements, as many as the shapes together, got 32", lambda: kernels.unpack(F32, [(3, 3)])),
    (
        "dtype must be one, or one for each of the 1 shapes, got 2",
        lambda: kernels.unpack(F32, [(32,)], [torch.int8] * 2),
    ),
    ("outs[0] has elements that share memory", lambda: kernels.unpack_into(F32, [torch.ones(1).expand(32)])),
    ("outs[0] shares memory with packed", lambda: kernels.unpack_into(F32, [F32])),
    ("out must have 128 bytes, as many as parts together, got 64", lambda: kernels.pack_bytes_into([F32], F16)),
    ("packed must have 64 bytes, as many as outs together, got 128", lambda: kernels.unpack_bytes_into(F32, [F16])),
    ("shards must hold at least 1 tensor, got 0", lambda: kernels.reduce([])),
    ("the dtype of shards must be one of uint8, ", lambda: kernels.reduce([F32.to(torch.complex64)])),
    ("shards must be alike, got (32,) of torch.float32", lambda: kernels.reduce([F32, F16])),
    ("as shards[1], (16,) of torch.float32", lambda: kernels.reduce([F32, F32[:16]])),
    ("shards[0] must be contiguous", lambda: kernels.reduce([F32[::2]])),
    ("op must be one of sum, avg, min, max, prod, got 'mean'", lambda: kernels.reduce([F32], "mean")),
    ("op must be one that torch.int8 has, got 'avg'", lambda: kernels.reduce([I8], "avg")),
    ("op must be one that torch.bool has, got 'sum'", lambda: kernels.reduce([I8 == 1], "sum")),
    (
        "out must be like the shards, (32,) of torch.float32, got (16, 2)",
        lambda: kernels.reduce_into([F32], F32.view(16, 2)),
    ),
    ("out shares memory with a part of an element of shards", lambda: kernels.reduce_into([F32[:16]], F32[1:17])),
    ("block must be a positive multiple of 16, got 8", lambda: kernels.quantize(F32, torch.int8, 8)),
    ("block must be a positive multiple of 16, got -16", lambda: kernels.quantize(F32, torch.int8, -16)),
    ("block must be a positive multiple of 16, got True", lambda: kernels.quantize(F32, torch.int8, True)),
    ("dtype must be one of int8, float8_e4m3fn, ", lambda: kernels.quantize(F32, torch.uint8)),
    ("the dtype of x must be one of float32, float16, bfloat16, got int8", lambda: kernels.quantize(I8, torch.int8)),
    ("q must have 32 elements, as many as x, got 2", lambda: Q(F32, I8[:2], SCALES, 16)),
    ("scales must have 2 elements, one for each block of 16, got 32", lambda: Q(F32, I8.clone(), F32.clone(), 16)),
    ("the dtype of scales must be one of float32, got float16", lambda: Q(F32, I8.clone(), F16[:2].clone(), 16)),
    ("the dtype of error must be one of float32, got float16", lambda: Q(F32, I8.clone(), SCALES.clone(), 16, F16)),
    ("error must have 32 elements, as many as x, got 16", lambda: Q(F32, I8.clone(), SCALES.clone(), 16, F32[:16])),
    ("error shares memory with x", lambda: Q(F32, I8.clone(), SCALES.clone(), 16, F32)),
    ("scales shares memory with x", lambda: Q(F32, I8.clone(), F32[:2], 16)),
    ("the dtype of q must be one of int8, float8_e4m3fn", lambda: kernels.dequantize(F32, SCALES, block=16)),
    ("scales must have 2 elements", lambda: kernels.dequantize(I8, F32, block=16)),
    ("scales must be a tensor, got float", lambda: kernels.dequantize(I8, 1.0, block=16)),  # type: ignore[arg-type]
    ("dtype must be one of float32, float16, bfloat16, got int8", lambda: kernels.dequantize(I8, SCALES, torch.int8)),
    ("scales must be as many as qs, 2, got 1", lambda: kernels.dequantize_reduce([I8, I8], [SCALES], 16)),
    ("qs must be alike", lambda: kernels.dequantize_reduce([I8, I8.view(torch.float8_e5m2)], [SCALES] * 2, 16)),
    ("block_bytes must be a positive multiple of 8, got 12", lambda: kernels.checksum(F32, 12)),
    ("x must be contiguous, got shape (16,) with strides (2,)", lambda: kernels.checksum(F32[::2])),
    ("x must be a tensor, got bytes", lambda: kernels.checksum(b"bytes")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("message", "call"), BAD, ids=[message for message, _ in BAD])
def test_bad_arguments_are_named_and_nothing_is_written(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert message in str(caught.value)
    for tensor in (F32, F16, I8, SCALES):
        assert bool((tensor == 1).all())


def test_bytes_may_lie_anywhere() -> None:
    out = torch.ones(33, dtype=torch.float32)
    kernels.pack_bytes_into([ODD, F32[:1]], out)
    assert out.tolist() == [0.0] * 32 + [1.0]
    assert torch.equal(kernels.checksum(ODD, 64), kernels.checksum(torch.zeros(32), 64))
