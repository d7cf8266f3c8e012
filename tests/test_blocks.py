"""Memory that is used again: never by two at once, bounded, and given back."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest

from monarch_rdma.actor.encoding.blocks import BlockPool
from monarch_rdma.rdma.memory import memory_of

MIB = 1 << 20


def address(view: memoryview) -> int:
    return memory_of(view, "view").address


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; the test's own time limit ends a wait for ever."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def test_a_block_is_writable_whole_and_aligned() -> None:
    block = BlockPool().take(3 * MIB + 1)
    assert block.nbytes == 3 * MIB + 1
    assert not block.readonly
    assert address(block) % 4096 == 0
    block[0] = block[-1] = 7
    assert block[0] == block[-1] == 7


def test_a_freed_block_is_used_again() -> None:
    pool = BlockPool()
    block = pool.take(4 * MIB)
    first = address(block)
    del block
    assert pool.idle_bytes == 4 * MIB
    assert address(pool.take(4 * MIB)) == first


def test_a_block_in_use_is_not_given_to_another() -> None:
    pool = BlockPool()
    block = pool.take(MIB)
    part = block[5:10]
    del block
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.take(MIB)
    other[:] = b"x" * MIB
    assert bytes(part) == bytes(5)


def test_much_smaller_needs_do_not_take_large_blocks() -> None:
    pool = BlockPool()
    del (block := [pool.take(64 * MIB)])[0]
    assert not block
    assert pool.idle_bytes == 64 * MIB
    small = pool.take(MIB)
    assert pool.idle_bytes == 64 * MIB
    assert small.nbytes == MIB


def test_what_is_idle_is_bounded() -> None:
    pool = BlockPool(idle_bytes=10 * MIB)
    blocks = [pool.take(4 * MIB) for _ in range(5)]
    last = address(blocks[-1])
    while blocks:
        del blocks[0]
    assert pool.idle_bytes == 8 * MIB
    assert address(pool.take(4 * MIB)) == last


def test_a_block_larger_than_the_bound_goes_back_at_once() -> None:
    pool = BlockPool(idle_bytes=MIB)
    block = pool.take(4 * MIB)
    del block
    assert pool.idle_bytes == 0


def test_what_was_idle_goes_back() -> None:
    pool = BlockPool(idle_seconds=100)
    block = pool.take(MIB)
    del block
    now = time.monotonic()
    pool.trim(now + 50)
    assert pool.idle_bytes == MIB
    pool.trim(now + 101)
    assert pool.idle_bytes == 0


def test_it_goes_back_by_itself_again_and_again() -> None:
    pool = BlockPool(idle_seconds=0.01)
    for _ in range(3):
        block = pool.take(MIB)
        del block
        wait_for(lambda: pool.idle_bytes == 0)


def test_threads_never_share_a_block() -> None:
    pool, failures = BlockPool(), []

    def use(mark: int) -> None:
        for _ in range(200):
            block = pool.take(MIB)
            block[:8] = block[-8:] = bytes([mark]) * 8
            if bytes(block[:8]) + bytes(block[-8:]) != bytes([mark]) * 16:
                failures.append(mark)
            del block

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.idle_bytes <= 4 * MIB


def test_memory_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(MemoryError, match=str(1 << 50)):
        BlockPool().take(1 << 50)


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    pool = BlockPool(idle_seconds=0.01)
    kept = pool.take(MIB)
    kept[:4] = b"here"
    child = os.fork()
    if child == 0:
        pool.forget()
        good = bytes(kept[:4]) == b"here"
        block = pool.take(MIB)
        del block
        while pool.idle_bytes:
            time.sleep(0.005)
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
