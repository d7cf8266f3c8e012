"""RDMAAction: batches, atomics, and what may not be written twice."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from child import Child
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma import errors
from monarch_rdma.rdma import Engine, RDMAAction, RDMABuffer, Secret
from monarch_rdma.rdma.overlap import Target, Targets
from monarch_rdma.rdma.view import View


def handle(data: Any, owner: Engine, reader: Engine) -> RDMABuffer:
    return RDMABuffer.from_bytes(RDMABuffer(data, engine=owner).to_bytes(), engine=reader)


def test_reads_and_writes_in_one_submit(owner: Engine, reader: Engine) -> None:
    sources = [torch.full((1000,), float(number)) for number in range(5)]
    targets = [torch.zeros(1000) for _ in range(5)]
    sink = torch.zeros(10, 1000)
    buffer = handle(sink, owner, reader)
    action = RDMAAction()
    for source, target in zip(sources, targets, strict=True):
        assert action.read_remote(target, handle(source, owner, reader)) is action
    for row, source in enumerate(sources):
        action.write_remote(buffer[2 * row], source)
    assert len(action) == 10
    done = action.submit(timeout=30)
    assert done.get() is None
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        assert torch.equal(source, target)
        assert torch.equal(sink[2 * row], source)
        assert not sink[2 * row + 1].any()
    report = done.explain()
    assert (report.operation, report.peer, report.bytes) == ("action", "owner", 10 * 4000)
    assert report.lane.startswith("shm")


def test_submit_again_moves_what_is_there_now(owner: Engine, reader: Engine) -> None:
    source, target = torch.zeros(100_000), torch.zeros(100_000)
    action = RDMAAction().read_remote(target, handle(source, owner, reader))
    for number in range(5):
        source.fill_(number)
        action.submit().get(30)
        assert bool((target == number).all())


@pytest.mark.parametrize("lanes", ["shm", "tcp"])
@pytest.mark.parametrize("size", [8, 3_000_000])
def test_a_loop_of_submits_makes_nothing_new(
    lanes: str, size: int, secret: Secret, child_process: Callable[..., Child]
) -> None:
    child = child_process(lanes=lanes)
    fill = "numbers.fill_(value); result = None"
    blob = child.run(
        "import torch; numbers = torch.zeros(count, dtype=torch.uint8); "
        "result = RDMABuffer(numbers, engine=engine).to_bytes()",
        count=3 * size,
    )
    with Engine(secret=secret, lanes=lanes) as engine:
        buffer = RDMABuffer.from_bytes(blob, engine=engine)
        targets = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        source = torch.zeros(size, dtype=torch.uint8)
        action = RDMAAction().write_remote(buffer[2 * size :], source)
        for at, target in enumerate(targets):
            action.read_remote(target, buffer[at * size : (at + 1) * size])
        seen = set()
        for value in range(1, 12):
            child.run(fill, value=value)
            versions = [target._version for target in targets]
            source.fill_(100 + value)
            done = action.submit(timeout=20)
            if value % 3 == 0:
                asyncio.run(_wait(done))
            else:
                done.get(20)
            seen.add(id(done))
            assert all(bool((target == value).all()) for target in targets)
            assert [target._version for target in targets] != versions
            report = done.explain()
            assert report.lane.startswith(lanes) and report.bytes == 3 * size
            assert child.run("result = numbers[-1].item()") == 100 + value
        assert len(seen) == 2  # `done` keeps the last one


async def _wait(future: Any) -> None:
    await future


def test_a_future_that_somebody_keeps_is_never_started_again(owner: Engine, reader: Engine) -> None:
    source, target = torch.zeros(8), torch.zeros(8)
    action = RDMAAction().read_remote(target, handle(source, owner, reader))
    kept = [action.submit() for _ in range(5)]
    assert len({id(each) for each in kept}) == 5
    times = [each.explain().seconds for each in kept]
    for _ in range(5):
        action.submit().get(20)
    assert [each.explain().seconds for each in kept] == times


def test_a_submit_after_a_failure_and_the_other_way_round(owner: Engine, reader: Engine) -> None:
    sources = [torch.ones(8), torch.ones(8)]
    buffers = [RDMABuffer(source, engine=owner) for source in sources]
    targets = [torch.zeros(8), torch.zeros(8)]
    action = RDMAAction()
    for target, buffer in zip(targets, buffers, strict=True):
        action.read_remote(target, RDMABuffer.from_bytes(buffer.to_bytes(), engine=reader))
    for _ in range(3):
        action.submit().get(20)
    buffers[1].drop().get(20)
    for value in range(3):
        sources[0].fill_(value)
        error = action.submit().exception(20)
        assert isinstance(error, errors.AccessDenied) and error.operation == "read"
        assert bool((targets[0] == value).all())  # the others are carried out all the same
    # What is added later is carried out too, and the clashes are still known.
    third = torch.zeros(8)
    action.read_remote(third, handle(sources[0], owner, reader))
    with pytest.raises(errors.ConfigError):
        action.read_remote(third, handle(sources[0], owner, reader))
    assert isinstance(action.submit().exception(20), errors.AccessDenied)
    assert bool((third == 2).all())
    reader.close()
    with pytest.raises(errors.ConfigError, match="closed"):
        action.submit()


def test_a_submit_again_to_a_lost_peer(secret: Secret, reader: Engine, child_process: Callable[..., Child]) -> None:
    child = child_process()
    blob = child.run("data = bytearray(8); result = RDMABuffer(data, engine=engine).to_bytes()")
    action = RDMAAction().read_remote(memoryview(bytearray(8)), RDMABuffer.from_bytes(blob, engine=reader))
    for _ in range(3):
        action.submit().get(20)
    child.kill()
    for _ in range(3):
        assert isinstance(action.submit().exception(20), errors.PeerLost)


def test_submits_again_from_many_threads(owner: Engine, reader: Engine) -> None:
    source, target = torch.full((1000,), 7.0), torch.zeros(1000)
    action = RDMAAction().read_remote(target, handle(source, owner, reader))
    failures: list[BaseException | None] = []

    def loop() -> None:
        for _ in range(300):
            failures.append(action.submit(timeout=20).exception(20))

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [None] * 1200
    assert bool((target == 7).all())


def test_submits_at_the_same_time_follow_one_another(owner: Engine, reader: Engine) -> None:
    counter, old = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    action = RDMAAction().fetch_add(handle(counter, owner, reader), old, 1)

    def run() -> None:
        for _ in range(50):
            action.submit().get(30)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counter.item() == 200


def test_an_empty_action_is_done(reader: Engine) -> None:
    done = RDMAAction().submit()
    assert done.done()
    done.get()
    asyncio.run(_await(done))
    assert done.explain().bytes == 0
    assert not done.cancel()


async def _await(future: Any) -> None:
    await future


def test_await(owner: Engine, reader: Engine) -> None:
    source, target = torch.randn(1 << 20), torch.zeros(1 << 20)
    buffer, step = handle(source, owner, reader), 1 << 14
    action = RDMAAction()
    for at in range(0, len(source), step):
        action.read_remote(target[at : at + step], buffer[at : at + step])

    async def main() -> None:
        for _ in range(2):
            target.zero_()
            done = action.submit()
            await done
            await done
            assert torch.equal(source, target)

    asyncio.run(main())


def test_the_first_failure_is_raised_and_the_rest_is_done(owner: Engine, reader: Engine) -> None:
    sources = [torch.full((100,), number) for number in range(4)]
    buffers = [handle(source, owner, reader) for source in sources]
    targets = [torch.full((100,), -1) for _ in sources]
    action = RDMAAction()
    for buffer, target in zip(buffers, targets, strict=True):
        action.read_remote(target, buffer)
    buffers[1].drop().get(30)
    done = action.submit()
    error = done.exception(30)
    assert isinstance(error, errors.AccessDenied)
    assert (error.operation, error.size, error.peer) == ("read", 800, "owner")
    with pytest.raises(errors.AccessDenied):
        done.get()
    assert [target[0].item() for target in targets] == [0, -1, 2, 3]


def test_an_action_in_flight_cannot_be_changed(child_process: Callable[..., Child], secret: Secret) -> None:
    import signal

    stopped = child_process(lanes="tcp")
    blob = stopped.run("data = bytearray(1 << 20); result = RDMABuffer(data, engine=engine).to_bytes()")
    with Engine(secret=secret, lanes="tcp") as engine:
        buffer = RDMABuffer.from_bytes(blob, engine=engine)
        action = RDMAAction().read_remote(bytearray(1 << 20), buffer)
        action.submit().get(30)
        stopped.stop()
        done = action.submit()
        assert not done.done()
        with pytest.raises(RuntimeError, match="in flight"):
            action.read_remote(bytearray(8), buffer[:8])
        assert done.cancel()
        assert isinstance(done.exception(30), errors.Cancelled)
        stopped.signal(signal.SIGCONT)
        action.read_remote(bytearray(8), buffer[:8]).submit().get(30)


def test_an_own_buffer_lives_with_the_action(owner: Engine) -> None:
    target = torch.zeros(4)
    action = RDMAAction().read_remote(target, RDMABuffer(torch.ones(4), engine=owner))
    gc.collect()
    action.submit().get(30)
    assert target.tolist() == [1.0] * 4


# --- atomics


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_fetch_add_and_compare_and_swap(owner: Engine, reader: Engine, dtype: torch.dtype) -> None:
    word, old = torch.tensor([5], dtype=dtype), torch.zeros(1, dtype=dtype)
    buffer = handle(word, owner, reader)
    for operation, before, after in [
        (lambda: RDMAAction().fetch_add(buffer, old, 3), 5, 8),
        (lambda: RDMAAction().fetch_add(buffer, old, -8), 8, 0),
        (lambda: RDMAAction().compare_and_swap(buffer, old, 1, 99), 0, 0),
        (lambda: RDMAAction().compare_and_swap(buffer, old, 0, 2**63 - 1), 0, 2**63 - 1),
    ]:
        operation().submit(timeout=30).get()
        assert (old.item(), word.item()) == (before, after)
    RDMAAction().fetch_add(buffer, old, 1).submit().get()
    assert word.item() == (2**63 if dtype is torch.uint64 else -(2**63))  # wraps around


def test_atomics_are_atomic(owner: Engine, secret: Secret) -> None:
    word = torch.zeros(1, dtype=torch.int64)
    blob = RDMABuffer(word, engine=owner).to_bytes()
    seen: list[int] = []

    def count() -> None:
        with Engine(secret=secret) as engine:
            buffer, old = RDMABuffer.from_bytes(blob, engine=engine), torch.zeros(1, dtype=torch.int64)
            for _ in range(300):
                RDMAAction().fetch_add(buffer, old, 1).submit(timeout=30).get()
                seen.append(int(old.item()))

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert word.item() == 900
    assert sorted(seen) == list(range(900))  # each old value once


def test_the_old_value_is_there_however_one_waits(owner: Engine, reader: Engine) -> None:
    word = torch.zeros(1, dtype=torch.int64)
    buffer = handle(word, owner, reader)
    olds = [torch.full((1,), -1) for _ in range(3)]
    RDMAAction().fetch_add(buffer, olds[0], 1).submit().exception(30)
    asyncio.run(_await(RDMAAction().fetch_add(buffer, olds[1], 1).submit()))
    last = RDMAAction().fetch_add(buffer, olds[2], 1).submit()
    while not last.done():
        pass
    assert [old.item() for old in olds] == [0, 1, 2]
    raw = bytearray(8)
    RDMAAction().fetch_add(buffer, raw, 1).submit().get()
    assert raw == (3).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("src", "dst", "why"),
    [
        (torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), "src has dtype int32"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), r"src has .*shape \(2,\)"),
        (torch.zeros(1), torch.zeros(1, dtype=torch.int64), "src has dtype float32"),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64), "dst has dtype float64"),
        (torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), r"dst has .*shape \(2,\)"),
        (torch.zeros(1, dtype=torch.int64), bytes(8), "dst is read-only"),
        (torch.zeros(1, dtype=torch.int64), None, "dst is a NoneType"),
    ],
    ids=range(7),
)  # fmt: skip
def test_an_atomic_that_does_not_fit_is_named(owner: Engine, src: torch.Tensor, dst: Any, why: str) -> None:
    with pytest.raises(errors.ConfigError, match=why):
        RDMAAction().fetch_add(RDMABuffer(src, engine=owner), dst, 1)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 1.0, True, "1", None])
def test_an_operand_of_more_than_64_bits_is_named(owner: Engine, value: Any) -> None:
    word, old = RDMABuffer(torch.zeros(1, dtype=torch.int64), engine=owner), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(errors.ConfigError, match="add is"):
        RDMAAction().fetch_add(word, old, value)
    with pytest.raises(errors.ConfigError, match="swap is"):
        RDMAAction().compare_and_swap(word, old, 0, value)


def test_an_unaligned_atomic_is_refused(owner: Engine, reader: Engine) -> None:
    buffer = handle(torch.zeros(32, dtype=torch.uint8), owner, reader)
    with pytest.raises(errors.OutOfBounds, match="aligned"):
        RDMAAction().fetch_add(buffer[4:12], torch.zeros(1, dtype=torch.int64), 1).submit().get()


# --- what overlaps


def test_reads_to_the_same_place_are_refused(owner: Engine) -> None:
    buffer, target = RDMABuffer(torch.zeros(10), engine=owner), torch.zeros(20)
    action = RDMAAction().read_remote(target[:10], buffer)
    with pytest.raises(errors.ConfigError, match="dst of a read overlaps dst of a read"):
        action.read_remote(target[9:19], buffer)
    action.read_remote(target[10:], buffer)  # what was refused is not there
    assert len(action) == 2


def test_writes_to_the_same_place_are_refused(owner: Engine) -> None:
    buffer, other = (RDMABuffer(torch.zeros(10), engine=owner) for _ in range(2))
    action = RDMAAction().write_remote(buffer[:5], torch.zeros(5)).write_remote(other[:5], torch.zeros(5))
    with pytest.raises(errors.ConfigError, match="dst of a write overlaps dst of a write"):
        action.write_remote(buffer[4:], torch.zeros(6))
    action.write_remote(buffer[5:], torch.zeros(5))


def test_atomics_may_meet_each_other_but_no_write(owner: Engine) -> None:
    words, olds = RDMABuffer(torch.zeros(4, dtype=torch.int64), engine=owner), torch.zeros(3, dtype=torch.int64)
    action = RDMAAction().fetch_add(words[1:2], olds[:1], 1).fetch_add(words[1:2], olds[1:2], 1)
    with pytest.raises(errors.ConfigError, match="dst of a fetch_add overlaps dst of a fetch_add"):
        action.fetch_add(words[2:3], olds[:1], 1)
    with pytest.raises(errors.ConfigError, match="dst of a write overlaps src of a fetch_add"):
        action.write_remote(words, torch.zeros(4, dtype=torch.int64))
    action.compare_and_swap(words[1:2], olds[2:], 1, 2)
    action.submit().get(30)


def test_interleaved_columns_do_not_overlap(owner: Engine, reader: Engine) -> None:
    source, target = torch.arange(40.0).reshape(10, 4), torch.zeros(10, 4)
    buffer = handle(source, owner, reader)
    action = RDMAAction()
    for column in range(4):
        action.read_remote(target[:, column], buffer[:, column])
    with pytest.raises(errors.ConfigError, match="overlaps"):
        action.read_remote(target[3:4, 2], buffer[:1, 0])
    action.submit().get(30)
    assert torch.equal(source, target)


@st.composite
def targets(draw: st.DrawFn) -> Target:
    rank = draw(st.integers(0, 2))
    shape = tuple(draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank)))
    strides = tuple(draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank)))
    return Target(
        draw(st.integers(0, 20)), View("int8", 1, shape, strides, draw(st.integers(0, 9))), draw(st.booleans()), "x"
    )


def reached(target: Target) -> set[int]:
    steps = [
        range(0, count * stride, stride) for count, stride in zip(target.view.shape, target.view.strides, strict=True)
    ]
    return {target.start + sum(index) for index in itertools.product(*steps)}


@given(st.lists(targets(), max_size=8))
def test_an_overlap_is_found_exactly_where_there_is_one(candidates: list[Target]) -> None:
    added = Targets()
    kept: list[Target] = []
    for target in candidates:
        meets = [other for other in kept if reached(other) & reached(target) and not (other.atomic and target.atomic)]
        if meets:
            with pytest.raises(errors.ConfigError, match="overlaps"):
                added.check("here", target)
        else:
            added.check("here", target)
            added.add("here", target)
            kept.append(target)
        added.check("elsewhere", target)


def test_ten_thousand_operations_in_one_action(owner: Engine, reader: Engine) -> None:
    count = 10_000
    source, target = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    buffer = handle(source, owner, reader)
    action = RDMAAction()
    for at in range(count):
        action.read_remote(target[at : at + 1], buffer[at : at + 1])
    action.submit().get(60)
    assert torch.equal(source, target)


@pytest.mark.parametrize("wrong", [None, torch.zeros(2), "buffer"])
def test_what_is_no_buffer_is_named(wrong: Any) -> None:
    for add, argument in (
        (lambda: RDMAAction().read_remote(torch.zeros(2), wrong), "src"),
        (lambda: RDMAAction().write_remote(wrong, torch.zeros(2)), "dst"),
        (lambda: RDMAAction().fetch_add(wrong, torch.zeros(1), 1), "src"),
    ):
        with pytest.raises(errors.ConfigError, match=f"{argument} is a .* must be an RDMABuffer"):
            add()


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1"])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(errors.ConfigError, match="timeout is"):
        RDMAAction().submit(timeout=timeout)
