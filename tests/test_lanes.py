"""The conformance suite: what every lane must do alike. The owner is another process."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from child import Child, ChildError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import LANES, Lane

from monarch_rdma import errors
from monarch_rdma.rdma import Engine, RDMAAction, RDMABuffer, Secret

MiB = 1 << 20
SIZES = [0, 1, 7, 4095, 4096, 4097, MiB - 1, MiB, MiB + 1, 9 * MiB + 5]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip

# Runs in the owner: tensors kept by name, so that a test can look at them afterwards.
PRELUDE = """
import torch
torch.set_num_threads(1)
kept = {}

def place(tensor, shared):
    return rdma.share(tensor, engine=engine) if shared else tensor

def pattern(size, seed=0):
    return ((torch.arange(size, dtype=torch.int64) * 167 + seed * 31 + 13) % 251).to(torch.uint8)

def publish(name, tensor, shared, access="rw"):
    kept[name] = place(tensor, shared)
    return RDMABuffer(kept[name], access=access, engine=engine).to_bytes()
"""


def pattern(size: int, seed: int = 0) -> torch.Tensor:
    return ((torch.arange(size, dtype=torch.int64) * 167 + seed * 31 + 13) % 251).to(torch.uint8)


class Pair:
    """This process and an owner, on one lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        secret = Secret.generate()
        self.engine = Engine(secret=secret, name="reader", **lane.options)
        self.owner = Child(secret, name="owner", **lane.options)
        self.owner.run(PRELUDE)
        self.numbers = itertools.count()

    def publish(self, code: str, *, access: str = "rw", **names: Any) -> tuple[str, RDMABuffer]:
        """A buffer on the tensor that `code` evaluates to over there, and its name in `kept`."""
        name = f"t{next(self.numbers)}"
        blob = self.owner.run(
            f"result = publish(name, {code}, shared, access)",
            name=name,
            shared=self.lane.shared,
            access=access,
            **names,
        )
        return name, RDMABuffer.from_bytes(blob, engine=self.engine)

    def look(self, name: str) -> torch.Tensor:
        """The owner's tensor as it is now."""
        return self.owner.run("result = kept[name].clone()", name=name)

    def close(self) -> None:
        self.engine.close()
        self.owner.close()


@pytest.fixture(scope="module", params=LANES, ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("size", SIZES)
def test_read_and_write_of_every_size(pair: Pair, size: int) -> None:
    name, buffer = pair.publish("pattern(size)", size=size)
    assert buffer.size() == size
    got = torch.zeros(size, dtype=torch.uint8)
    done = buffer.read_into(got)
    done.get(60)
    assert torch.equal(got, pattern(size))
    if size:
        assert done.explain().lane == pair.lane.lane
        assert done.explain().bytes == size
    fresh = pattern(size, seed=7)
    buffer.write_from(fresh).get(60)
    assert torch.equal(pair.look(name), fresh)
    buffer.drop().get(60)


def test_unaligned_ends_leave_the_neighbours_alone(pair: Pair) -> None:
    name, buffer = pair.publish("torch.zeros(100_000, dtype=torch.uint8)")
    local = pattern(100_000)
    for begin, end in [(1, 2), (3, 4096), (4095, 4097), (63, 65), (17, 99_991)]:
        buffer[begin:end].write_from(local[begin:end]).get(60)
        expected = torch.zeros(100_000, dtype=torch.uint8)
        expected[begin:end] = local[begin:end]
        assert torch.equal(pair.look(name), expected)
        got = torch.full((100_000,), 255, dtype=torch.uint8)
        buffer[begin:end].read_into(got[begin:end]).get(60)
        assert torch.equal(got[begin:end], local[begin:end])
        assert bool((got[:begin] == 255).all()) and bool((got[end:] == 255).all())
        buffer.write_from(torch.zeros(100_000, dtype=torch.uint8)).get(60)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_every_dtype_keeps_its_bits(pair: Pair, dtype: torch.dtype) -> None:
    code = "pattern(480).view(dtype) if dtype != torch.bool else (pattern(480) % 2).bool()"
    _, buffer = pair.publish(code, dtype=dtype)
    assert buffer.dtype == dtype
    got = torch.zeros(buffer.shape, dtype=dtype)
    buffer.read_into(got).get(60)
    expected = pattern(480).view(dtype) if dtype != torch.bool else (pattern(480) % 2).bool()
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    buffer.drop().get(60)


def test_five_dimensions_strided_on_both_ends(pair: Pair) -> None:
    whole = "torch.arange(3 * 4 * 5 * 6 * 7, dtype=torch.int32).reshape(3, 4, 5, 6, 7)"
    code = f"{whole}.permute(4, 2, 0, 3, 1)[::2, 1:, :, ::3]"
    name, buffer = pair.publish(code)
    whole = torch.arange(3 * 4 * 5 * 6 * 7, dtype=torch.int32).reshape(3, 4, 5, 6, 7).permute(4, 2, 0, 3, 1)
    expected = whole[::2, 1:, :, ::3]
    assert buffer.shape == tuple(expected.shape)
    target = torch.full((expected.numel() * 2,), -1, dtype=torch.int32)[::2].reshape(expected.shape)
    holder = torch.full((*expected.shape, 2), -1, dtype=torch.int32)
    buffer.read_into(holder[..., 0]).get(60)
    assert torch.equal(holder[..., 0], expected) and bool((holder[..., 1] == -1).all())
    buffer.write_from(target).get(60)
    assert torch.equal(pair.look(name), target)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_strided_copy_is_torchs_own(pair: Pair, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4), label="shape")
    order = data.draw(st.permutations(range(len(shape))), label="order")
    steps = [data.draw(st.integers(1, 3)) for _ in shape]
    starts = [data.draw(st.integers(0, 2)) for _ in shape]
    index = tuple(slice(start, start + n * step, step) for start, n, step in zip(starts, shape, steps, strict=True))
    room = [start + n * step for start, n, step in zip(starts, shape, steps, strict=True)]
    total = int(torch.tensor(room).prod())
    code = "torch.arange(total, dtype=torch.int16).reshape(room)[index].permute(order)"
    name, buffer = pair.publish(code, total=total, room=room, index=index, order=list(order))
    expected = torch.arange(total, dtype=torch.int16).reshape(room)[index].permute(list(order))
    cells = data.draw(st.integers(1, 3), label="local stride")
    holder = torch.full((*expected.shape, cells), -9, dtype=torch.int16)
    buffer.read_into(holder[..., 0]).get(60)
    assert torch.equal(holder[..., 0], expected)
    assert bool((holder[..., 1:] == -9).all())
    fresh = torch.randint(0, 99, expected.shape, dtype=torch.int16)
    buffer.write_from(fresh).get(60)
    assert torch.equal(pair.look(name), fresh)
    buffer.drop().get(60)


def test_overlapping_reads_of_one_region(pair: Pair) -> None:
    _, buffer = pair.publish("pattern(3_000_000)")
    parts = [(begin, begin + 1_200_000) for begin in range(0, 1_800_001, 300_000)]
    targets = [torch.zeros(end - begin, dtype=torch.uint8) for begin, end in parts]
    waiting = [buffer[begin:end].read_into(target) for (begin, end), target in zip(parts, targets, strict=True)]
    for done in waiting:
        done.get(60)
    expected = pattern(3_000_000)
    for (begin, end), target in zip(parts, targets, strict=True):
        assert torch.equal(target, expected[begin:end])


def test_ten_thousand_small_operations_in_flight(pair: Pair) -> None:
    count = 10_000
    name, buffer = pair.publish("torch.zeros(8 * count, dtype=torch.uint8)", count=count)
    source = pattern(8 * count)
    writes = [buffer[8 * i : 8 * i + 8].write_from(source[8 * i : 8 * i + 8]) for i in range(count)]
    for done in writes:
        done.get(60)
    assert torch.equal(pair.look(name), source)
    target = torch.zeros(8 * count, dtype=torch.uint8)
    reads = [buffer[8 * i : 8 * i + 8].read_into(target[8 * i : 8 * i + 8]) for i in range(count)]
    for done in reads:
        done.get(60)
    assert torch.equal(target, source)


def test_await_gathers_many(pair: Pair) -> None:
    _, buffer = pair.publish("pattern(4 * 1024 * 1024)")
    target = torch.zeros(buffer.size(), dtype=torch.uint8)
    piece = buffer.size() // 64

    async def read_all() -> None:
        await asyncio.gather(
            *(buffer[i : i + piece].read_into(target[i : i + piece]) for i in range(0, buffer.size(), piece))
        )

    asyncio.run(read_all())
    assert torch.equal(target, pattern(buffer.size()))


def test_256_pieces_are_one_operation(pair: Pair) -> None:
    _, buffer = pair.publish("pattern(256 * 4096).reshape(256, 4096)[:, :1024]")
    got = torch.zeros(256, 1024, dtype=torch.uint8)
    buffer.read_into(got).get(60)
    assert torch.equal(got, pattern(256 * 4096).reshape(256, 4096)[:, :1024])


def test_notifications_come_after_the_bytes_and_once(pair: Pair) -> None:
    name, buffer = pair.publish("torch.zeros(2_000_000, dtype=torch.uint8)")
    owner = "owned = RDMABuffer(kept[name], engine=engine); result = owned.to_bytes()"
    buffer = RDMABuffer.from_bytes(pair.owner.run(owner, name=name), engine=pair.engine)
    pair.owner.start(
        """
        result = []
        for _ in range(20):
            value = owned.next_notification(30)
            result.append((value, bool((kept[name] == value).all())))
        """,
        name=name,
    )
    for value in range(1, 21):
        buffer.write_from(torch.full((2_000_000,), value, dtype=torch.uint8), notify=value).get(60)
    seen = pair.owner.finish()
    assert [value for value, _ in seen] == list(range(1, 21))
    assert seen[-1][1]  # no write came after the last one


def test_atomics_return_the_old_value(pair: Pair) -> None:
    name, buffer = pair.publish("torch.zeros(4, dtype=torch.int64)")
    old = torch.zeros(1, dtype=torch.int64)
    RDMAAction().fetch_add(buffer[1:2], old, 5).submit(timeout=30).get()
    assert old.item() == 0
    RDMAAction().fetch_add(buffer[1:2], old, -7).submit(timeout=30).get()
    assert old.item() == 5
    RDMAAction().compare_and_swap(buffer[1:2], old, -2, 40).submit(timeout=30).get()
    assert old.item() == -2
    RDMAAction().compare_and_swap(buffer[1:2], old, 1, 99).submit(timeout=30).get()
    assert old.item() == 40
    assert pair.look(name).tolist() == [0, 40, 0, 0]


def test_atomics_of_two_processes_add_up(pair: Pair) -> None:
    name, buffer = pair.publish("torch.zeros(1, dtype=torch.int64)")
    rounds = 2000
    pair.owner.start(
        """
        mine, old = RDMABuffer(kept[name], engine=engine), torch.zeros(1, dtype=torch.int64)
        for _ in range(rounds):
            rdma.RDMAAction().fetch_add(mine, old, 1).submit(timeout=30).get()
        """,
        name=name,
        rounds=rounds,
    )
    old = torch.zeros(1, dtype=torch.int64)
    action = RDMAAction().fetch_add(buffer, old, 1)
    for _ in range(rounds):
        action.submit(timeout=30).get()
    pair.owner.finish()
    assert pair.look(name).item() == 2 * rounds


def test_access_rights(pair: Pair) -> None:
    _, readable = pair.publish("pattern(100)", access="read")
    _, writable = pair.publish("pattern(100)", access="write")
    data = torch.zeros(100, dtype=torch.uint8)
    readable.read_into(data).get(60)
    writable.write_from(data).get(60)
    with pytest.raises(errors.AccessDenied, match="write"):
        readable.write_from(data).get(60)
    with pytest.raises(errors.AccessDenied, match="read"):
        writable.read_into(data).get(60)


def test_a_dropped_region_is_refused_at_once(pair: Pair) -> None:
    name, buffer = pair.publish("pattern(5000)")
    other = RDMABuffer.from_bytes(
        pair.owner.run("result = RDMABuffer(kept[name], engine=engine).to_bytes()", name=name), engine=pair.engine
    )
    data = torch.zeros(5000, dtype=torch.uint8)
    buffer.read_into(data).get(60)
    buffer.drop().get(60)
    with pytest.raises(errors.AccessDenied, match="dropped"):
        buffer.read_into(data).get(60)
    with pytest.raises(errors.AccessDenied, match="dropped"):
        buffer.write_from(data).get(60)
    other.read_into(data).get(60)  # dropping one handle leaves the other alone
    assert torch.equal(data, pattern(5000))


def test_drop_in_the_middle_of_transfers_gives_right_bytes_or_the_error(pair: Pair) -> None:
    size = 24 * MiB
    for round_number in range(5):
        name = f"drop{round_number}"
        blob = pair.owner.run(
            """
            kept[name] = place(pattern(size), shared)
            owned = RDMABuffer(kept[name], engine=engine)
            result = owned.to_bytes()
            """,
            name=name,
            size=size,
            shared=pair.lane.shared,
        )
        buffer = RDMABuffer.from_bytes(blob, engine=pair.engine)
        targets = [torch.zeros(size, dtype=torch.uint8) for _ in range(3)]
        waiting = [buffer.read_into(target) for target in targets]
        pair.owner.run("owned.drop().get(30); kept.pop(name).fill_(255)", name=name)
        for done, target in zip(waiting, targets, strict=True):
            error = done.exception(60)
            if error is None:
                assert torch.equal(target, pattern(size))
            else:
                assert isinstance(error, errors.AccessDenied)


def test_cancelled_reads_never_touch_the_destination_again(pair: Pair) -> None:
    size = 24 * MiB
    _, buffer = pair.publish("pattern(size)", size=size)
    for _ in range(5):
        target = torch.zeros(size, dtype=torch.uint8)
        done = buffer.read_into(target)
        done.cancel()
        error = done.exception(60)
        assert error is None or isinstance(error, errors.Cancelled)
        target.fill_(7)
        # A later transfer over the same path: whatever was still under way has arrived by then.
        buffer.read_into(torch.zeros(size, dtype=torch.uint8)).get(60)
        assert bool((target == 7).all())


def test_a_timeout_of_zero_ends_at_once(pair: Pair) -> None:
    _, buffer = pair.publish("pattern(32 * 1024 * 1024)")
    error = buffer.read_into(torch.zeros(buffer.size(), dtype=torch.uint8), timeout=0).exception(60)
    assert error is None or isinstance(error, errors.TransferTimeout)


def test_a_view_outside_the_region_is_refused_before_a_byte_moves(pair: Pair) -> None:
    _, buffer = pair.publish("pattern(100)")
    with pytest.raises((errors.OutOfBounds, errors.ConfigError)):
        buffer.read_into(torch.zeros(99, dtype=torch.uint8)).get(60)
    with pytest.raises((errors.OutOfBounds, errors.ConfigError)):
        buffer.write_from(torch.zeros(101, dtype=torch.uint8)).get(60)


def test_a_guessed_key_is_refused(pair: Pair) -> None:
    import base64
    import json

    _, buffer = pair.publish("pattern(64)")
    version, descriptor, is_tensor, view = json.loads(buffer.to_bytes())
    raw = bytearray(base64.b64decode(descriptor))
    forged = 0
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 0x40
        blob = json.dumps([version, base64.b64encode(changed).decode(), is_tensor, view]).encode()
        target = torch.zeros(64, dtype=torch.uint8)
        try:
            RDMABuffer.from_bytes(blob, engine=pair.engine).read_into(target, timeout=30).get()
        except errors.RdmaError:
            forged += 1
            assert not target.any()
        else:
            # A bit that nothing depends on (the owner's name, an address that the lane does not use) changes nothing.
            assert torch.equal(target, pattern(64))
    assert forged > 24  # id, key, incarnation at the least


def test_a_region_made_from_another_after_drop_does_not_answer_for_it(pair: Pair) -> None:
    _, first = pair.publish("pattern(4096)")
    first.read_into(torch.zeros(4096, dtype=torch.uint8)).get(60)
    first.drop().get(60)
    _, second = pair.publish("pattern(4096, 9)")  # takes the same board slot
    with pytest.raises(errors.AccessDenied):
        first.read_into(torch.zeros(4096, dtype=torch.uint8)).get(60)
    got = torch.zeros(4096, dtype=torch.uint8)
    second.read_into(got).get(60)
    assert torch.equal(got, pattern(4096, 9))


def test_more_than_4_gib_of_sparse_memory(pair: Pair) -> None:
    size = (4 << 30) + 12345
    blob = pair.owner.run(
        """
        import mmap
        if shared:
            huge = rdma.zeros(size, dtype=torch.uint8, engine=engine)
        else:
            huge = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        for at in range(0, size, 1 << 28):
            huge[at] = at >> 28
        huge[-1] = 77
        result = RDMABuffer(huge, engine=engine).to_bytes()
        """,
        size=size,
        shared=pair.lane.shared,
    )
    import mmap

    hole = mmap.mmap(-1, 64 * MiB)
    target = torch.frombuffer(hole, dtype=torch.uint8)
    buffer = RDMABuffer.from_bytes(blob, engine=pair.engine)
    try:
        for begin in (0, 1 << 31, (1 << 32) - 32 * MiB, size - 64 * MiB):
            buffer[begin : begin + 64 * MiB].read_into(target).get(120)
            for at in range(-(-begin // (1 << 28)) * (1 << 28), min(begin + 64 * MiB, size), 1 << 28):
                assert target[at - begin] == at >> 28
        assert target[-1] == 77
        if pair.lane.id in ("shm-mapped", "shm-process_vm", "tcp"):
            whole = mmap.mmap(-1, size)
            everything = torch.frombuffer(whole, dtype=torch.uint8)
            buffer.read_into(everything, timeout=240).get()
            assert all(everything[at] == at >> 28 for at in range(0, size, 1 << 28)) and everything[-1] == 77
            del everything
    finally:
        buffer.drop().get(60)
        pair.owner.run("del huge")


def test_64_peers(pair: Pair) -> None:
    """Sixty-four engines beside this one; their owner's process holds them all."""
    addresses = pair.owner.run(
        """
        many = [Engine(secret=secret, name=f"owner-{i}", **options) for i in range(64)]
        held = [rdma.share(pattern(10_000, i), engine=e) if shared else pattern(10_000, i) for i, e in enumerate(many)]
        result = [RDMABuffer(t, engine=e).to_bytes() for t, e in zip(held, many)]
        """,
        options=pair.lane.options,
        shared=pair.lane.shared,
    )
    buffers = [RDMABuffer.from_bytes(blob, engine=pair.engine) for blob in addresses]
    targets = [torch.zeros(10_000, dtype=torch.uint8) for _ in buffers]
    waiting = [b.read_into(t) for b, t in zip(buffers, targets, strict=True)]
    for done in waiting:
        done.get(60)
    for i, target in enumerate(targets):
        assert torch.equal(target, pattern(10_000, i))
    pair.owner.run("[e.close() for e in many]; del held, many")
    for buffer, target in zip(buffers, targets, strict=True):
        with pytest.raises((errors.PeerLost, errors.AccessDenied)):
            buffer.read_into(target, timeout=30).get()


def test_the_owner_needs_no_python(pair: Pair) -> None:
    """The owner's interpreter is held by one long call that does not give up the GIL."""
    _, buffer = pair.publish("pattern(3_000_000)")
    warm = torch.zeros(3_000_000, dtype=torch.uint8)
    buffer.read_into(warm).get(60)
    pair.owner.start(
        """
        import ctypes
        held = ctypes.PyDLL(None)
        ready, go = os.pipe(), os.pipe()
        """
    )
    pair.owner.finish()
    pair.owner.start("held.usleep(3_000_000)")  # PyDLL keeps the GIL
    for _ in range(10):
        got = torch.zeros(3_000_000, dtype=torch.uint8)
        buffer.read_into(got, timeout=2.5).get()
        assert torch.equal(got, pattern(3_000_000))
    pair.owner.finish()


def test_local_buffers_are_copied_in_place() -> None:
    with Engine() as engine:
        source, target = pattern(100_001), torch.zeros(100_001, dtype=torch.uint8)
        buffer = RDMABuffer(source, engine=engine)
        done = buffer.read_into(target)
        done.get(30)
        assert torch.equal(source, target) and done.explain().lane == "local"
        buffer.write_from(torch.zeros_like(target)).get(30)
        assert not source.any()
        buffer.drop().get(30)
        with pytest.raises(errors.AccessDenied):
            buffer.read_into(target).get(30)


def test_child_reports_errors() -> None:
    with Child(Secret.generate()) as child, pytest.raises(ChildError, match="ZeroDivisionError"):
        child.run("1 / 0")
    assert os.path.exists("/proc/self")
