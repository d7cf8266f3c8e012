"""RDMABuffer: what it takes, what it refuses, what it keeps alive, and how it travels."""

from __future__ import annotations

import asyncio
import base64
import copy
import gc
import json
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from child import Child
from knocks import without_knocks

from monarch_rdma import errors
from monarch_rdma.rdma import (
    Engine,
    RDMAAction,
    RDMABuffer,
    RDMAReadTransferWarning,
    RDMATcpFallbackWarning,
    RDMAWriteTransferWarning,
    Secret,
    default_engine,
    share,
    shared_memory,
    zeros,
)


@pytest.fixture(params=["tensor", "own"])
def far(request: pytest.FixtureRequest, owner: Engine, reader: Engine) -> Callable[..., RDMABuffer]:
    """Makes the handle that a reader has; once through another engine, once within one."""
    kept = []

    def make(data: Any, **arguments: Any) -> RDMABuffer:
        kept.append(RDMABuffer(data, engine=owner, **arguments))
        return RDMABuffer.from_bytes(kept[-1].to_bytes(), engine=reader) if request.param == "tensor" else kept[-1]

    return make


# --- the API of Monarch


def test_the_way_of_monarch(far: Callable[..., RDMABuffer]) -> None:
    weights = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    buffer = far(weights.view(torch.uint8).flatten())
    assert buffer.size() == 48
    assert buffer.owner == "owner"
    assert buffer.backend in ("shm", "local")
    local = torch.zeros(100, dtype=torch.uint8)  # larger is fine
    buffer.read_into(local, timeout=60).get()
    assert torch.equal(local[:48].view(torch.float32).reshape(3, 4), weights)
    assert not local[48:].any()
    buffer.write_from(torch.full((8,), 255, dtype=torch.uint8)).get(timeout=60)  # smaller is fine
    assert weights.view(torch.uint8).flatten().tolist()[:9] == [255] * 8 + [0]
    buffer.drop().get()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("run", [64, 2047, 2048, 5003, 70001])
def test_one_of_many_strided_reads(owner: Engine, reader: Engine, run: int, shared: bool) -> None:
    """Its bytes go past the caches, also where runs, ends and distances are no whole lines of them."""
    rows = -(-200_000 // run)
    source = torch.randint(0, 255, (rows, run + 13), dtype=torch.uint8)
    if shared:
        source = share(source, engine=owner)
    mine = RDMABuffer(source, engine=owner)
    theirs = RDMABuffer.from_bytes(mine.to_bytes(), engine=reader)
    there, here = source[:, 5 : 5 + run], torch.full((rows * run + 7,), 1, dtype=torch.uint8)
    spread = torch.full((rows, run + 3), 1, dtype=torch.uint8)
    for target in (here[3:-4].view(rows, run), spread[:, 2:-1]):
        theirs[:, 5 : 5 + run].prepare_read(target, bulk=True)(30).get()
        assert torch.equal(target, there)
    assert here[:3].eq(1).all() and here[-4:].eq(1).all()
    assert spread[:, :2].eq(1).all() and spread[:, -1].eq(1).all()


def test_an_action_of_many_bytes(owner: Engine, reader: Engine) -> None:
    sources = [torch.randint(0, 255, (1 << 20,), dtype=torch.uint8) for _ in range(20)]
    kept = [RDMABuffer(source, engine=owner) for source in sources]
    targets = [torch.zeros_like(source) for source in sources]
    action = RDMAAction()
    for buffer, target in zip(kept, targets, strict=True):
        action.read_remote(target, RDMABuffer.from_bytes(buffer.to_bytes(), engine=reader))
    for _ in range(2):  # the second one is restarted
        action.submit(timeout=30).get()
        assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))
        for target in targets:
            target.zero_()


def test_memoryviews(far: Callable[..., RDMABuffer]) -> None:
    data = bytearray(b"0123456789")
    buffer = far(memoryview(data))
    local = memoryview(bytearray(10))
    buffer.read_into(local).get()
    assert bytes(local) == b"0123456789"
    buffer.write_from(memoryview(b"abc")).get()
    assert bytes(data) == b"abc3456789"
    assert (buffer.dtype, buffer.shape) == ("uint8", (10,))
    asyncio.run(_await(buffer.read_into(local)))


async def _await(future: Any) -> None:
    await future


def test_transfers_over_tcp_warn_once_where_better_was_allowed(owner: Engine, secret: Secret) -> None:
    blob, local = RDMABuffer(bytearray(100_000), engine=owner).to_bytes(), bytearray(100_000)
    for category, start in [(RDMAReadTransferWarning, "read_into"), (RDMAWriteTransferWarning, "write_from")]:
        assert issubclass(category, RDMATcpFallbackWarning)
        with Engine(secret=secret, shm_process_vm=False) as engine:
            buffer = RDMABuffer.from_bytes(blob, engine=engine)
            with pytest.warns(category, match=r"tcp.*better lanes not used: shm"):
                getattr(buffer, start)(local).get(30)
            getattr(buffer, start)(local).get(30)
    for options in ({"lanes": "tcp"}, {}):  # asked for: no fallback
        with Engine(secret=secret, **options) as engine:
            RDMABuffer.from_bytes(blob, engine=engine).read_into(local, lanes="tcp").get(30)
            assert not engine.warned_of_tcp


# --- shapes, dtypes and sizes


def test_shape_and_dtype_are_carried(far: Callable[..., RDMABuffer]) -> None:
    source = torch.randn(4, 3, 5, dtype=torch.float64)[::2, :, 1:].permute(2, 0, 1)
    buffer = far(source)
    assert buffer.shape == (4, 2, 3)
    assert buffer.dtype is torch.float64
    assert buffer.size() == 4 * 2 * 3 * 8
    assert repr(buffer) == "<RDMABuffer of 192 bytes: float64 [4, 2, 3]>"
    for target in (
        torch.zeros(4, 2, 3, dtype=torch.float64),
        torch.zeros(24, dtype=torch.float64),
        torch.zeros(8, 3, dtype=torch.float64),
    ):
        buffer.read_into(target).get()
        assert torch.equal(target.flatten(), source.flatten())
    raw = torch.zeros(192, dtype=torch.uint8)
    buffer.read_into(raw).get()
    assert torch.equal(raw.view(torch.float64), source.flatten())


def test_numpy_at_both_ends(far: Callable[..., RDMABuffer]) -> None:
    source = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    buffer = far(source)
    assert (buffer.dtype, buffer.shape) == ("float32", (4, 3))
    target = torch.zeros(4, 3)
    buffer.read_into(target).get()
    assert np.array_equal(target.numpy(), source)
    buffer.write_from(np.zeros((4, 3), np.float32)).get()
    assert not source.any()


def test_parts_are_made_by_the_reader(far: Callable[..., RDMABuffer]) -> None:
    source = torch.arange(60).reshape(6, 10)
    buffer = far(source)
    for key in (slice(1, 4), (slice(None), slice(2, 9, 3)), 5, (..., 0), (None, 2, slice(3)), (3, 4), slice(6, 6)):
        target = torch.full_like(source[key], -1)
        buffer[key].read_into(target).get()
        assert torch.equal(target, source[key])
    buffer[1:3][:, 4:][1].write_from(torch.zeros(6, dtype=torch.int64)).get()
    assert source[2].tolist() == [20, 21, 22, 23, 0, 0, 0, 0, 0, 0]
    with pytest.raises(errors.OutOfBounds, match="6 is outside dimension 0"):
        buffer[6]


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(0, 3), lambda: bytearray(), lambda: np.zeros((2, 0)), lambda: torch.zeros(4)[2:2]]
)
def test_nothing_can_be_moved(far: Callable[..., RDMABuffer], make: Callable[[], Any]) -> None:
    buffer = far(make())
    assert buffer.size() == 0
    assert buffer.read_into(make()).done()
    assert buffer.write_from(make()).done()
    report = buffer.read_into(make()).explain()
    assert (report.bytes, report.lane, report.operation) == (0, "", "read")
    buffer.drop().get(30)


def test_a_scalar(far: Callable[..., RDMABuffer]) -> None:
    target = torch.tensor(0.0)
    far(torch.tensor(2.5)).read_into(target).get()
    assert target.item() == 2.5


@pytest.mark.parametrize(
    ("there", "here", "why"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64), "dst has dtype float64, but the buffer float32"),
        (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float16), "float16, but the buffer bfloat16"),
        (torch.zeros(4), np.zeros(4), "dtype float64, but the buffer float32"),
        (torch.zeros(4), torch.zeros(4).expand(3, 4)[:1].expand(4, 4), "overlapping"),
        (torch.zeros(4), bytes(16), "dst is read-only"),
        (torch.zeros(4), memoryview(bytearray(16)).toreadonly(), "dst is read-only"),
        (torch.zeros(4), "text", "dst is a str"),
        (torch.zeros(4), None, "dst is a NoneType"),
        (torch.zeros(4), torch.zeros(4, device="meta"), "dst .*meta device"),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_destination_that_does_not_fit_is_named(
    far: Callable[..., RDMABuffer], there: Any, here: Any, why: str
) -> None:
    with pytest.raises(errors.ConfigError, match=why):
        far(there).read_into(here)


@pytest.mark.parametrize(
    ("there", "here"),
    [((4,), (3,)), ((4, 4), (4, 3)), ((4, 4), (5, 4)), ((2, 2), (1, 2, 3)), ((4,), (0,))],
)  # fmt: skip
def test_sizes_that_differ_are_named(
    far: Callable[..., RDMABuffer], there: tuple[int, ...], here: tuple[int, ...]
) -> None:
    local = torch.full(here, 7.0)
    with pytest.raises(ValueError, match=r"dst has .* bytes .* but the buffer") as caught:
        far(torch.zeros(there)).read_into(local)
    assert isinstance(caught.value, errors.OutOfBounds)
    assert bool((local == 7).all())
    with pytest.raises(errors.OutOfBounds, match="src has"):
        far(torch.zeros(here)).write_from(torch.zeros(there))


def test_a_larger_destination_must_be_contiguous(far: Callable[..., RDMABuffer]) -> None:
    with pytest.raises(errors.OutOfBounds):
        far(torch.zeros(4)).read_into(torch.zeros(10)[::2])
    with pytest.raises(errors.OutOfBounds):
        far(torch.zeros(10)[::2]).write_from(torch.zeros(4))


def test_an_expanded_tensor_can_be_read_but_not_written(far: Callable[..., RDMABuffer]) -> None:
    buffer = far(torch.arange(3).expand(2, 3))
    target = torch.zeros(2, 3, dtype=torch.int64)
    buffer.read_into(target).get()
    assert target.tolist() == [[0, 1, 2]] * 2
    with pytest.raises(errors.ConfigError, match="buffer has overlapping elements"):
        buffer.write_from(target)
    far(torch.zeros(2, 3)).write_from(torch.ones(3).expand(2, 3)).get()


@pytest.mark.parametrize("lanes", ["smoke", [], "", ["shm", "pigeon"], 3])
def test_lanes_that_are_none_are_refused(far: Callable[..., RDMABuffer], lanes: Any) -> None:
    with pytest.raises(errors.ConfigError, match="lanes is"):
        far(bytearray(4)).read_into(bytearray(4), lanes=lanes)


def test_lanes_can_be_chosen(owner: Engine, reader: Engine) -> None:
    buffer = RDMABuffer.from_bytes(RDMABuffer(bytearray(b"x" * 1000), engine=owner).to_bytes(), engine=reader)
    for lanes in ("tcp", ["tcp"], ("shm",)):
        target = bytearray(1000)
        done = buffer.read_into(target, lanes=lanes)
        done.get(30)
        assert done.explain().lane.startswith("tcp" if "tcp" in lanes else "shm")
        assert target == b"x" * 1000


@pytest.mark.filterwarnings("ignore::monarch_rdma.rdma.RDMATcpFallbackWarning")
def test_strict_refuses_the_second_best(owner: Engine, secret: Secret) -> None:
    buffer = RDMABuffer(bytearray(1000), engine=owner).to_bytes()
    with Engine(secret=secret, shm_process_vm=False) as engine:
        handle = RDMABuffer.from_bytes(buffer, engine=engine)
        handle.read_into(bytearray(1000)).get(30)
        with pytest.raises(errors.RdmaError, match="shm"):
            handle.read_into(bytearray(1000), strict=True).get(30)


@pytest.mark.parametrize("notify", [-1, 2**64, 1.0, True, "1"])
def test_a_notification_that_is_none_is_refused(far: Callable[..., RDMABuffer], notify: Any) -> None:
    with pytest.raises(errors.ConfigError, match="notify is"):
        far(bytearray(4)).write_from(bytearray(4), notify=notify)


# --- gradients


def test_parameters_and_leaves_are_fine(far: Callable[..., RDMABuffer]) -> None:
    source = torch.nn.Parameter(torch.randn(5))
    target = torch.zeros(5, requires_grad=True)
    buffer = far(source)
    buffer.read_into(target).get()
    assert torch.equal(source, target)
    buffer.write_from(torch.nn.Parameter(torch.ones(5))).get()
    assert source.tolist() == [1.0] * 5
    with torch.inference_mode():
        buffer.read_into(torch.zeros(5)).get()


@pytest.mark.parametrize("index", [slice(None), slice(None, None, 2)])
def test_a_gradient_that_became_wrong_is_an_error(far: Callable[..., RDMABuffer], index: slice) -> None:
    saved, weight = torch.ones(6)[index], torch.ones(6, requires_grad=True)
    loss = (saved * weight[index]).sum()
    far(torch.zeros(6)[index]).read_into(saved).get()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- rights, drops and lifetimes


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "set_": lambda tensor: tensor.set_(torch.zeros(8, 8)),
    "data": lambda tensor: setattr(tensor, "data", torch.zeros(8, 8)),
    "data of another dtype": lambda tensor: setattr(tensor, "data", tensor.view(torch.int32)),
    "transposed": lambda tensor: tensor.t_(),
    "smaller": lambda tensor: tensor.resize_(4, 8),
    "larger": lambda tensor: tensor.resize_(80, 80),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "cut short": lambda tensor: tensor.untyped_storage().resize_(100),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_changed_since_its_last_transfer_is_looked_at_again(
    far: Callable[..., RDMABuffer], change: str
) -> None:
    source = torch.arange(64.0).reshape(8, 8)
    buffer, target = far(source), torch.zeros(8, 8)
    for _ in range(3):
        buffer.read_into(target).get(30)
        buffer.write_from(target).get(30)
    first = target.data_ptr()
    CHANGES[change](target)
    if change in ("set_", "data", "transposed"):
        target.zero_()
        buffer.read_into(target).get(30)
        assert torch.equal(target, source)
        assert change == "transposed" or target.data_ptr() != first
        source.zero_()
        buffer.write_from(target.add_(1)).get(30)
        assert torch.equal(source, target)
    else:
        for call in (buffer.read_into, buffer.write_from):
            with pytest.raises((errors.ConfigError, errors.OutOfBounds)):
                call(target)


@pytest.mark.parametrize("access", ["", "x", None, 3, "wr", ["read"]])
def test_rights_that_are_none_are_refused(owner: Engine, access: Any) -> None:
    with pytest.raises(errors.ConfigError, match="access is"):
        RDMABuffer(bytearray(4), access=access, engine=owner)


def test_rights(far: Callable[..., RDMABuffer]) -> None:
    with pytest.raises(errors.AccessDenied, match="write"):
        far(bytearray(4), access="read").write_from(bytearray(4)).get()
    with pytest.raises(errors.AccessDenied, match="read"):
        far(bytearray(4), access="write").read_into(bytearray(4)).get()
    with pytest.raises(errors.ConfigError, match=r'data is read-only.*access="read"'):
        far(b"1234")
    target = bytearray(4)
    far(b"1234", access="read").read_into(target).get()
    assert target == b"1234"


def test_after_a_drop_all_handles_are_refused(owner: Engine, reader: Engine) -> None:
    mine = RDMABuffer(bytearray(8), engine=owner)
    part, theirs = mine[2:4], RDMABuffer.from_bytes(mine.to_bytes(), engine=reader)
    mine.drop().get(30)
    mine.drop().get(30)  # again is no error
    for use in (
        lambda: mine.read_into(bytearray(8)).get(30),
        lambda: part.write_from(bytearray(2)).get(30),
        lambda: theirs.read_into(bytearray(8)).get(30),
        lambda: mine.next_notification(30),
        lambda: mine.to_bytes(),
    ):
        with pytest.raises(errors.AccessDenied, match="dropped"):
            use()


def test_one_drop_leaves_other_buffers_of_the_storage_alone(owner: Engine, reader: Engine) -> None:
    data = torch.arange(8)
    first, second = (RDMABuffer(data, engine=owner) for _ in range(2))
    theirs = RDMABuffer.from_bytes(second.to_bytes(), engine=reader)
    first.drop().get(30)
    target = torch.zeros(8, dtype=torch.int64)
    theirs.read_into(target).get(30)
    assert torch.equal(target, data)


class Watched(bytearray):
    """bytearray itself has no weak references."""


def until(holds: Callable[[], bool], engine: Engine) -> bool:
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        engine.sweep()
        gc.collect()
    return holds()


def test_a_buffer_keeps_its_memory_until_it_is_garbage(owner: Engine) -> None:
    data = Watched(8)
    gone = weakref.ref(data)
    buffer = RDMABuffer(data, engine=owner)
    del data
    gc.collect()
    assert gone() is not None
    assert owner.counters()["regions"] == 1
    with pytest.raises(BufferError):
        gone().append(1)  # it cannot even be resized
    del buffer
    assert until(lambda: gone() is None, owner)
    assert owner.counters()["regions"] == 0


def test_a_handle_that_went_out_keeps_the_memory_until_a_drop(owner: Engine, reader: Engine) -> None:
    data = Watched(b"12345678")
    gone = weakref.ref(data)
    blob = RDMABuffer(data, engine=owner).to_bytes()
    del data
    gc.collect()
    owner.sweep()
    assert gone() is not None
    theirs, target = RDMABuffer.from_bytes(blob, engine=reader), bytearray(8)
    theirs.read_into(target).get(30)
    assert target == b"12345678"
    theirs.drop().get(30)  # by a peer
    assert until(lambda: gone() is None, owner)


def test_a_tensors_storage_is_kept(owner: Engine, reader: Engine) -> None:
    tensor = torch.arange(1000)
    theirs = RDMABuffer.from_bytes(RDMABuffer(tensor[10:20], engine=owner).to_bytes(), engine=reader)
    del tensor
    gc.collect()
    torch.full((1000,), -1)  # would take the memory if it were free
    target = torch.zeros(10, dtype=torch.int64)
    theirs.read_into(target).get(30)
    assert target.tolist() == list(range(10, 20))


def test_a_closed_engine_says_so(owner: Engine, reader: Engine) -> None:
    mine = RDMABuffer(bytearray(8), engine=owner)
    theirs = RDMABuffer.from_bytes(mine.to_bytes(), engine=reader)
    unused = RDMABuffer.from_bytes(mine.to_bytes(), engine=reader)
    theirs.read_into(bytearray(8)).get(30)
    reader.close()
    owner.close()
    owner.close()  # again does nothing
    for use in (
        lambda: theirs.read_into(bytearray(8)),
        lambda: theirs.write_from(torch.zeros(8, dtype=torch.uint8)),
        lambda: unused.read_into(bytearray(8)),
        lambda: unused.owner,
        lambda: theirs.backend,
        lambda: theirs.map(),
        lambda: theirs.read_view(),
        lambda: mine.drop(),
        lambda: mine.to_bytes(),
        lambda: mine.next_notification(1),
        lambda: owner.counters(),
        lambda: owner.incarnation,
        lambda: RDMABuffer(bytearray(8), engine=owner),
        lambda: shared_memory(8, engine=owner),
        lambda: owner.watch(reader.address),
    ):
        with pytest.raises(errors.ConfigError, match="engine is closed"):
            use()


def test_many_buffers_of_one_storage_are_cheap(owner: Engine) -> None:
    data = torch.zeros(1 << 20)
    buffers = [RDMABuffer(data[index], engine=owner) for index in range(5000)]
    assert owner.counters()["regions"] == 5000
    del buffers
    assert until(lambda: owner.counters()["regions"] == 0, owner)


# --- mapped memory


def test_map_shows_the_owners_memory(owner: Engine, reader: Engine) -> None:
    data = zeros(4, 6, dtype=torch.int32, engine=owner)
    theirs = RDMABuffer.from_bytes(RDMABuffer(data, engine=owner).to_bytes(), engine=reader)
    mapped, part = theirs.map(), theirs[1:3, ::2].map()
    assert mapped.data_ptr() != data.data_ptr()
    data[2, 4] = 7
    assert mapped[2, 4] == 7 and part.tolist() == [[0, 0, 0], [0, 0, 7]]
    mapped[0, 0] = 3
    assert data[0, 0] == 3
    assert (mapped.dtype, mapped.shape) == (torch.int32, (4, 6))


def test_map_of_memoryviews(owner: Engine, reader: Engine) -> None:
    data = shared_memory(64, engine=owner)
    for access, readonly in (("rw", False), ("read", True)):
        theirs = RDMABuffer.from_bytes(RDMABuffer(data, access=access, engine=owner).to_bytes(), engine=reader)
        mapped = theirs[8:16].map()
        assert (len(mapped), mapped.readonly) == (8, readonly)
        data[8:16] = b"12345678"
        assert mapped == b"12345678"
        assert theirs.read_view().readonly


def test_a_map_outlives_its_buffer_and_its_engine(owner: Engine, reader: Engine) -> None:
    data = zeros(1000, engine=owner)
    mapped = RDMABuffer.from_bytes(RDMABuffer(data, engine=owner).to_bytes(), engine=reader).map()
    data.fill_(5)
    gc.collect()
    assert bool((mapped == 5).all())
    reader.close()
    owner.close()
    gc.collect()
    assert bool((mapped == 5).all())
    assert bool((data == 5).all())


def test_many_tensors_in_one_region(owner: Engine, reader: Engine) -> None:
    room = zeros(96, dtype=torch.uint8, engine=owner)
    whole = RDMABuffer(room, access="read", engine=owner)
    numbers, odd = room[8:72].view(torch.float64).copy_(torch.arange(8)), room[80:83].fill_(7)
    parts = [whole.part_at(numbers), whole.part_at(odd), whole.part_at(numbers.view(2, 4).t())]
    other = RDMABuffer(torch.ones(2), engine=owner)
    told = json.loads(json.dumps(RDMABuffer.many_to_json([*parts, other])))
    assert len(told[0]) == 2  # regions
    for buffer, wanted in zip(
        RDMABuffer.many_from_json(told, engine=reader),
        [numbers, odd, numbers.view(2, 4).t(), torch.ones(2)],
        strict=True,
    ):
        found = torch.zeros(buffer.shape, dtype=buffer.dtype)
        buffer.read_into(found).get()
        assert torch.equal(found, wanted)
    for elsewhere in (torch.zeros(3), room.new_zeros(96)):
        with pytest.raises(errors.OutOfBounds, match="not within this buffer"):
            whole.part_at(elsewhere)
    for malformed in (
        None,
        [[], [[0, True, None]]],
        [["?"], []],
        [told[0], [[-1, *told[1][0][1:]]]],
        [told[0], [[9, 1, told[1][0][2]]]],
    ):
        with pytest.raises(errors.ProtocolError, match="handles of buffers are malformed"):
            RDMABuffer.many_from_json(malformed, engine=reader)
    whole.drop().get()
    with pytest.raises(errors.AccessDenied, match="was dropped"):
        RDMABuffer.many_to_json(parts)


def test_maps_are_given_back(owner: Engine, reader: Engine) -> None:
    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("monarch_rdma (deleted)" in line for line in maps)

    gc.collect()
    before = mappings()
    data = zeros(1 << 20, engine=owner)
    theirs = RDMABuffer.from_bytes(RDMABuffer(data, engine=owner).to_bytes(), engine=reader)
    maps = [theirs.map() for _ in range(3)]
    assert mappings() > before + 1
    theirs.drop().get(30)
    del maps, theirs, data
    assert until(lambda: mappings() <= before, owner)


def test_ordinary_memory_cannot_be_mapped_but_viewed(owner: Engine, reader: Engine) -> None:
    data = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T
    theirs = RDMABuffer.from_bytes(RDMABuffer(data, engine=owner).to_bytes(), engine=reader)
    with pytest.raises((errors.RegistrationError, errors.ConfigError)):
        theirs.map()
    view = theirs.read_view()
    assert view.shape == (4, 3) and torch.equal(view, data)
    view = RDMABuffer.from_bytes(RDMABuffer(bytearray(b"abc"), engine=owner).to_bytes(), engine=reader).read_view()
    assert view == b"abc" and view.readonly
    assert torch.equal(theirs[1].read_view(), data[1])


def test_an_own_buffer_is_mapped_as_it_is(owner: Engine) -> None:
    data = torch.arange(6).reshape(2, 3)
    mapped = RDMABuffer(data, engine=owner)[:, 1:].map()
    assert mapped.data_ptr() == data[:, 1:].data_ptr() and torch.equal(mapped, data[:, 1:])
    gone = weakref.ref(data)
    del data
    gc.collect()
    assert gone() is not None and mapped.tolist() == [[1, 2], [4, 5]]


def test_a_map_is_never_larger_than_the_region(owner: Engine, reader: Engine) -> None:
    blob = json.loads(RDMABuffer(zeros(8, dtype=torch.uint8, engine=owner), engine=owner).to_bytes())
    blob[3] = ["uint8", 1, [9], [1], 0]
    with pytest.raises(errors.OutOfBounds, match="9"):
        RDMABuffer.from_bytes(json.dumps(blob).encode(), engine=reader).map()


# --- notifications


def test_notifications_in_order(owner: Engine, reader: Engine) -> None:
    data = torch.zeros(100)
    mine = RDMABuffer(data, engine=owner)
    theirs = RDMABuffer.from_bytes(mine.to_bytes(), engine=reader)
    for number in (0, 2**64 - 1, 7):
        theirs.write_from(torch.full((100,), float(number % 10)), notify=number).get(30)
    theirs[:0].write_from(torch.zeros(0), notify=5).get(30)  # of no byte at all
    numbers = mine.notifications()
    assert [next(numbers) for _ in range(4)] == [0, 2**64 - 1, 7, 5]
    with pytest.raises(TimeoutError, match="within 0.01 s"):
        mine.next_notification(0.01)
    with pytest.raises(errors.ConfigError, match="timeout is -1"):
        mine.next_notification(-1)
    with pytest.raises(errors.ConfigError, match="for the process that made the buffer"):
        theirs.notifications()
    mine.drop().get(30)
    assert list(numbers) == []


def test_notifications_end_with_the_buffer(owner: Engine, reader: Engine) -> None:
    mine = RDMABuffer(bytearray(8), engine=owner)
    theirs = RDMABuffer.from_bytes(mine.to_bytes(), engine=reader)
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.extend(mine.notifications()))
    waiting.start()
    theirs.write_from(bytearray(8), notify=1).get(30)
    theirs.drop().get(30)
    waiting.join(30)
    assert got == [1]


def test_async_notifications(owner: Engine, reader: Engine) -> None:
    mine = RDMABuffer(bytearray(8), engine=owner)
    theirs = RDMABuffer.from_bytes(mine.to_bytes(), engine=reader)

    async def main() -> list[int]:
        numbers = mine.notifications()
        for _ in range(3):  # a wait that is given up takes nothing away
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(numbers), 0.02)
        for number in range(5):
            await theirs.write_from(bytearray(8), notify=number)
        got = [await anext(numbers) for _ in range(5)]
        await mine.drop()
        return got + [number async for number in numbers]

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


# --- handles


def test_a_pickle_is_small_and_loads_with_the_default_engine(
    child_process: Callable[..., Child], secret: Secret
) -> None:
    data = torch.arange(10)
    with Engine(secret=secret, name="here") as engine:
        blob = pickle.dumps(RDMABuffer(data, engine=engine)[2:5])
        assert len(blob) < 600
        code = """
        import pickle, torch
        from monarch_rdma import config
        path = tempfile.mkdtemp() + "/secret"
        secret.write_file(path)
        config.configure(secret_file=path)
        buffer, result = pickle.loads(blob), torch.zeros(3, dtype=torch.int64)
        again = pickle.loads(pickle.dumps(buffer))
        again.read_into(result).get(30)
        result = result.tolist(), buffer.owner, buffer.dtype is torch.int64, buffer.shape
        """
        assert child_process().run("import tempfile\n" + _dedent(code), blob=blob) == ([2, 3, 4], "here", True, (3,))


def test_a_copy_is_the_same_handle(owner: Engine) -> None:
    buffer = RDMABuffer(bytearray(8), engine=owner)
    assert copy.copy(buffer) is buffer
    assert copy.deepcopy({"x": buffer})["x"] is buffer


def _dedent(code: str) -> str:
    import textwrap

    return textwrap.dedent(code)


def test_handles_of_memoryviews_load_without_torch() -> None:
    code = """
    import pickle, sys
    from monarch_rdma.rdma import RDMABuffer
    data = bytearray(b"12345678")
    buffer, target = pickle.loads(pickle.dumps(RDMABuffer(memoryview(data)))), bytearray(8)
    buffer.read_into(target).get(30)
    buffer[2:4].write_from(b"ab").get(30)
    print(target, data, bytes(buffer.read_view()), "torch" in sys.modules, "numpy" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", _dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "bytearray(b'12345678') bytearray(b'12ab5678') b'12ab5678' False False\n"
    assert without_knocks(done.stderr) == ""


@pytest.fixture
def parts(owner: Engine) -> list[Any]:
    """The fields of a sound handle."""
    return list(json.loads(RDMABuffer(bytearray(8), engine=owner).to_bytes()))


@pytest.mark.parametrize(
    "blob", [b"", b"nonsense", b"{}", b"[]", b"[1,2]", b"\xff\xfe", b"[" * 50000, b"null", b'"' + b"x" * 100_000 + b'"']
)
def test_a_malformed_handle_is_refused(blob: bytes) -> None:
    with pytest.raises(errors.ProtocolError, match="malformed"):
        RDMABuffer.from_bytes(blob)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (0, 2, "version 2"),
        (0, None, "version None"),
        (1, "!!", "malformed"),
        (1, 5, "malformed"),
        (3, [], "malformed"),
        (3, ["uint8", 1, [-1], [1], 0], "malformed"),
    ],
)
def test_a_handle_with_a_wrong_field_is_refused(parts: list[Any], field: int, value: Any, why: str) -> None:
    parts[field] = value
    with pytest.raises(errors.ProtocolError, match=why):
        RDMABuffer.from_bytes(json.dumps(parts).encode())


@pytest.mark.parametrize("cut", [0, 1, 20, 60, -1])
def test_a_handle_cut_short_is_refused_by_the_core(parts: list[Any], reader: Engine, cut: int) -> None:
    parts[1] = base64.b64encode(base64.b64decode(parts[1])[:cut]).decode()
    buffer = RDMABuffer.from_bytes(json.dumps(parts).encode(), engine=reader)
    with pytest.raises(errors.ProtocolError):
        buffer.read_into(bytearray(8))


def test_a_view_outside_the_region_is_refused_by_the_core(parts: list[Any], reader: Engine) -> None:
    parts[3] = ["uint8", 1, [9], [1], 0]
    buffer = RDMABuffer.from_bytes(json.dumps(parts).encode(), engine=reader)
    for use in (lambda: buffer.read_into(bytearray(9)).get(30), lambda: buffer.write_from(bytearray(9)).get(30)):
        with pytest.raises(errors.OutOfBounds):
            use()


def test_the_default_engine_serves_those_who_name_none() -> None:
    default_engine().close()
    data = torch.arange(5)
    buffer = RDMABuffer(data)
    target = torch.zeros(5, dtype=torch.int64)
    pickle.loads(pickle.dumps(buffer)).read_into(target).get(30)
    assert torch.equal(target, data)
    assert buffer.owner == default_engine().name
    default_engine().close()
    assert default_engine().is_open  # a new one
    default_engine().close()
