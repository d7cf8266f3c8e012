"""Views: any shape and strides as runs, compared with torch's own idea of the same elements."""

from __future__ import annotations

import array
import ctypes
import itertools
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monarch_rdma._engine import ffi

from monarch_rdma import errors
from monarch_rdma.rdma import Engine, RDMABuffer, Secret
from monarch_rdma.rdma.memory import as_memoryview, as_tensor, memory_of
from monarch_rdma.rdma.view import View, contiguous_strides, merge


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """An int16 tensor of up to 4 dimensions: a sliced and permuted part of distinct numbers."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    starts = [draw(st.integers(0, 2)) for _ in shape]
    room = [start + count * step for start, count, step in zip(starts, shape, steps, strict=True)]
    base = torch.arange(int(np.prod(room, dtype=int)), dtype=torch.int16).reshape(room)
    part = base[tuple(slice(s, s + n * k, k) for s, n, k in zip(starts, shape, steps, strict=True))]
    return part.permute(draw(st.permutations(range(part.dim()))))


@st.composite
def shaped(draw: st.DrawFn) -> torch.Tensor:
    tensor = draw(strided())
    return tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape) if draw(st.booleans()) else tensor


def offsets(view: View) -> list[int]:
    """Of every byte, in order, by the definition of mr_view."""
    run, counts, strides = view.merged
    starts = [
        view.offset + sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, counts))
    ]
    return [start + byte for start in starts for byte in range(run)]


def view_of(tensor: torch.Tensor) -> View:
    return memory_of(tensor, "tensor").view


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def storage_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage())[tensor.storage_offset() * 2 :]


@given(shaped())
def test_merged_runs_are_the_tensors_bytes_in_order(tensor: torch.Tensor) -> None:
    view = view_of(tensor)
    memory = storage_bytes(tensor)
    assert bytes(memory[at] for at in offsets(view)) == bytes_of(tensor)
    assert view.nbytes == tensor.numel() * 2
    assert view.extent == max((at + 1 for at in offsets(view)), default=0)


@given(shaped())
def test_merged_dimensions_cannot_be_merged_further(tensor: torch.Tensor) -> None:
    run, counts, strides = view_of(tensor).merged
    assert 1 not in counts
    assert all(outer != inner * count for (outer, inner, count) in zip(strides, strides[1:], counts[1:], strict=False))
    assert not counts or strides[-1] != run
    assert view_of(tensor).is_contiguous == (tensor.is_contiguous() or not tensor.numel())


@given(shaped())
def test_overlap_with_itself_is_never_missed(tensor: torch.Tensor) -> None:
    reached = offsets(view_of(tensor))
    assert view_of(tensor).overlaps_itself == (len(set(reached)) < len(reached))


@given(
    st.lists(st.integers(1, 4), max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)))
    )
)
def test_overlap_is_never_missed_with_any_strides(case: tuple[list[int], list[int]]) -> None:
    shape, strides = case
    view = View("int16", 2, tuple(shape), tuple(2 * stride for stride in strides))
    reached = offsets(view)
    assert view.overlaps_itself or len(set(reached)) == len(reached)


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    def part(count: int) -> Any:
        bound = st.none() | st.integers(-count - 2, count + 2)
        choices = [st.builds(slice, bound, bound, st.none() | st.integers(1, 4))]
        if count:
            choices.append(st.integers(-count, count - 1))
        return draw(st.one_of(choices))

    taken = draw(st.integers(0, len(shape)))
    front = draw(st.integers(0, taken))
    key: list[Any] = [part(count) for count in shape[:front]]
    if draw(st.booleans()):
        key.append(...)
        key += [part(count) for count in shape[len(shape) - (taken - front) :]] if taken > front else []
    for _ in range(draw(st.integers(0, 2))):
        key.insert(draw(st.integers(0, len(key))), None)
    return tuple(key) if draw(st.booleans()) or len(key) != 1 else key[0]


@given(st.data(), shaped())
def test_slicing_is_torchs(data: st.DataObject, tensor: torch.Tensor) -> None:
    key = data.draw(indices(tuple(tensor.shape)))
    expected = tensor[key]
    got = view_of(tensor)[key]
    assert got.shape == tuple(expected.shape)
    memory = storage_bytes(tensor)
    assert bytes(memory[at] for at in offsets(got)) == bytes_of(expected)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (4, "4 is outside dimension 0 of 4"), (-5, "-5 is outside"), ((0, 0, 0), "3 dimensions"),
        (slice(None, None, -1), "negative step"),
        (slice(None, None, 0), "zero"), ((..., ...), "dimensions"), (True, "booleans"), ([0, 1], "list"),
        ("a", "str"), (1.0, "float"),
        (slice("a", None), "slice"),
    ],
)  # fmt: skip
def test_what_cannot_index_is_named(key: Any, why: str) -> None:
    with pytest.raises(errors.OutOfBounds, match=why):
        View("int8", 1, (4, 3), (3, 1))[key]


def test_more_dimensions_than_the_core_takes_are_refused() -> None:
    many = View("int8", 1, (2,) * 17, tuple(3**power for power in range(17, 0, -1)))
    with pytest.raises(errors.ConfigError, match="17 dimensions"):
        many.c_view  # noqa: B018
    few = View("int8", 1, (2,) * 40, contiguous_strides((2,) * 40, 1))
    assert (few.c_view.run, few.c_view.ndim) == (2**40, 0)


def test_merge_of_nothing() -> None:
    assert merge((), (), 4) == (4, [], [])
    assert merge((3, 0, 2), (8, 4, 2), 2) == (0, [], [])


# --- both ways through an engine: any strided copy is torch's


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    secret = Secret.generate()
    with Engine(secret=secret, name="owner") as owner, Engine(secret=secret, name="reader") as reader:
        yield owner, reader


@settings(max_examples=150, deadline=None)
@given(source=strided(), layout=st.data(), same_engine=st.booleans())
def test_a_read_is_torchs_copy(
    engines: tuple[Engine, Engine], source: torch.Tensor, layout: st.DataObject, same_engine: bool
) -> None:
    owner, reader = engines
    order = layout.draw(st.permutations(range(source.dim())))
    gap = layout.draw(st.integers(1, 3))
    holder = torch.full((*(source.shape[dim] for dim in order), gap), -1, dtype=source.dtype)
    inverse = [order.index(dim) for dim in range(source.dim())]
    destination = holder[..., 0].permute(inverse)
    expected = holder.clone()
    expected[..., 0].permute(inverse).copy_(source)
    buffer = RDMABuffer(source, engine=owner)
    RDMABuffer.from_bytes(buffer.to_bytes(), engine=owner if same_engine else reader).read_into(destination).get(60)
    assert torch.equal(holder, expected)
    back = torch.randint(-9, 9, source.shape, dtype=source.dtype)
    buffer.write_from(back).get(60)
    assert torch.equal(source, back)
    buffer.drop().get(60)


# --- what objects are


@pytest.mark.parametrize("letter", "bBhHiIlLqQfd")
def test_arrays_of_python(letter: str) -> None:
    data = array.array(letter, [1, 2, 3])
    memory = memory_of(data, "data")
    kind = "float" if letter in "fd" else "uint" if letter.isupper() else "int"
    assert memory.view == View(f"{kind}{8 * data.itemsize}", data.itemsize, (3,), (data.itemsize,))
    assert memory.address == data.buffer_info()[0]
    assert memory.writable


def test_memory_of_many_kinds() -> None:
    assert not memory_of(b"abc", "data").writable
    assert memory_of(memoryview(bytearray(6)).cast("B", (2, 3)), "data").view.shape == (2, 3)
    assert memory_of(mmap.mmap(-1, 4096), "data").view.nbytes == 4096
    assert memory_of((ctypes.c_float * 3)(), "data").view.dtype == "float32"
    assert memory_of(bytearray(), "data").view.nbytes == 0
    assert memory_of(torch.nn.Parameter(torch.zeros(2)), "data").view.dtype == "float32"


def test_strided_memoryviews_and_arrays_of_numpy() -> None:
    data = np.arange(24, dtype=np.complex64).reshape(4, 6)
    memory = memory_of(data[1:, ::2], "data")
    assert (memory.view.dtype, memory.view.shape, memory.view.strides) == ("complex64", (3, 3), (48, 16))
    assert memory.address == data.ctypes.data + 48
    memory = memory_of(memoryview(bytearray(10))[::3], "data")
    assert (memory.view.dtype, memory.view.strides) == ("uint8", (3,))
    data.flags.writeable = False
    assert not memory_of(data, "data").writable


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: "text", "str"), (lambda: None, "NoneType"), (lambda: 5, "int"), (lambda: [1], "list"),
        (lambda: torch.zeros(2, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "layout"), (lambda: torch.zeros(2, 2).to_mkldnn(), "layout"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "int_repr"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "nested"),
        (lambda: np.arange(4)[::-1], "negative strides"), (lambda: np.array([None]), "Python objects"),
        (lambda: np.arange(2, dtype=">i4"), "byte order"),
        (lambda: (ctypes.py_object * 2)(), "pointers"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about what it will drop
def test_memory_that_cannot_be_moved_is_named(make: Any, why: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"data .*{why}"):
        memory_of(make(), "data")


def test_a_storage_that_was_resized_is_noticed() -> None:
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(8)
    with pytest.raises(errors.ConfigError, match="storage has only 8 .it was resized"):
        memory_of(tensor, "data")


def test_wrappers_of_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(errors.ConfigError, match="wraps other tensors"):
        memory_of(TwoTensor(torch.zeros(2), torch.zeros(2)), "data")
    with FakeTensorMode(), pytest.raises(errors.ConfigError, match="no memory of its own"):
        memory_of(torch.zeros(2), "data")

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(errors.ConfigError, match="no memory of its own"):
            memory_of(tensor, "data")
        return tensor

    torch.func.vmap(inside)(torch.zeros(2, 2))


@given(shaped())
def test_a_tensor_made_from_a_view_is_the_tensor(tensor: torch.Tensor) -> None:
    view = view_of(tensor)
    again = as_tensor(bytearray(storage_bytes(tensor)), view)
    assert again.stride() == tensor.stride() or view.nbytes == 0
    assert torch.equal(again, tensor)


@given(shaped())
def test_a_memoryview_made_from_a_view_has_its_values(tensor: torch.Tensor) -> None:
    made = as_memoryview(bytearray(storage_bytes(tensor)), view_of(tensor))
    assert made.tobytes() == bytes_of(tensor)
    assert made.shape == tuple(tensor.shape) or 0 in tensor.shape


@pytest.mark.parametrize("view", [View("int16", 2, (5,), (2,)), View("int16", 2, (4,), (2,), 2)])
def test_a_view_outside_its_memory_is_refused(view: View) -> None:
    for make in (as_tensor, as_memoryview):
        with pytest.raises(errors.OutOfBounds, match="of memory of 8 bytes"):
            make(bytearray(8), view)


@pytest.mark.parametrize(
    "data",
    [
        None, 5, [], ["int8", 1, [2], [1]], ["int8", 1, [2], [1], -1], ["int8", 1, [2], [1, 1], 0],
        ["int8", 0, [2], [1], 0],
        ["int8", 1, [2.0], [1], 0], ["int8", 1, [True], [1], 0], ["int8", 1, [2], [-1], 0], [5, 1, [2], [1], 0],
        ["int8", 1, 2, 1, 0],
        ["int8", 1, [2**62, 2], [1, 1], 0], ["int8", 1, [2], [2**63], 0], ["x" * 65, 1, [2], [1], 0],
        ["int8", 1, [1] * 65, [1] * 65, 0],
        ["int8", 1, [2], [2**62], 2**62],
    ],
)  # fmt: skip
def test_a_malformed_view_of_another_process_is_refused(data: Any) -> None:
    with pytest.raises(errors.ProtocolError, match="malformed"):
        View.from_json(data)


@pytest.mark.parametrize(("dtype", "itemsize"), [("load", 1), ("Tensor", 8), ("float32", 2), ("nothing", 1)])
def test_a_dtype_that_torch_has_not_is_refused(dtype: str, itemsize: int) -> None:
    with pytest.raises(errors.ProtocolError, match="no dtype of torch"):
        as_tensor(bytearray(64), View(dtype, itemsize, (2,), (itemsize,)))


def test_the_c_view_keeps_its_numbers() -> None:
    view = view_of(torch.zeros(6, 8, dtype=torch.int16)[1::2, :3])
    c = view.c_view
    assert (c.offset, c.run, c.ndim, list(c.count)[:1], list(c.stride)[:1]) == (0, 6, 1, [3], [32])
    assert ffi.typeof(c) is ffi.typeof("mr_view *")
