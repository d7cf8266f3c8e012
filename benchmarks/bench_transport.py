"""Reads and writes from Python over each lane, beside libc memcpy and raw process_vm_readv, under pytest-benchmark.

    pytest benchmarks/ --benchmark-only

Figures are for looking at: nothing here fails because it is slow. `benchmarks/report.py` compares in turns and prints
ratios; it is the better judge on a machine that does other things too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from owner import numbers
from raw import Memcpy, ProcessVm

SIZES = {"8B": 8, "4KiB": 4 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20, "64MiB": 64 << 20}
LANES = {"shm-mapped": ("shm", "shared"), "shm-process_vm": ("shm", "ordinary"), "tcp": ("tcp", "ordinary")}
PIECES, PIECE = 256, 1024

by_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
by_lane = pytest.mark.parametrize("lane", LANES)


def run(benchmark: Any, group: str, size: int, step: Callable[[], object]) -> None:
    benchmark.group = group
    benchmark(step)
    if benchmark.stats:  # absent with --benchmark-disable
        benchmark.extra_info["GB/s"] = round(size / benchmark.stats.stats.median / 1e9, 3)


@by_lane
@by_size
def test_read(benchmark: Any, remote: Any, lane: str, size: int) -> None:
    buffer, _ = remote(*LANES[lane], size)
    dst = torch.zeros_like(numbers(size))
    run(benchmark, f"read {size}", size, lambda: buffer.read_into(dst).get())
    last = buffer.read_into(dst)
    last.get()
    assert last.explain().lane == lane
    assert torch.equal(dst.view(torch.uint8), numbers(size).view(torch.uint8))


@by_lane
@by_size
def test_write(benchmark: Any, remote: Any, lane: str, size: int) -> None:
    buffer, _ = remote(*LANES[lane], size)
    src = numbers(size).flip(0).contiguous()
    run(benchmark, f"write {size}", size, lambda: buffer.write_from(src).get())
    back = torch.zeros_like(src)
    buffer.read_into(back).get()
    assert torch.equal(back.view(torch.uint8), src.view(torch.uint8))


@by_size
@pytest.mark.parametrize("op", ["read", "write"])
def test_libc_memcpy(benchmark: Any, op: str, size: int) -> None:
    src = numbers(size)
    dst = torch.zeros_like(src)
    run(benchmark, f"{op} {size}", size, Memcpy(dst.data_ptr(), src.data_ptr(), size))


@by_size
@pytest.mark.parametrize("op", ["read", "write"])
def test_raw_process_vm(benchmark: Any, remote: Any, op: str, size: int) -> None:
    _, owned = remote("shm", "ordinary", size)
    here = numbers(size)
    copy = ProcessVm(owned.pid, here.data_ptr(), owned.address, size, write=op == "write")
    run(benchmark, f"{op} {size}", size, copy)


def test_strided_in_one_read(benchmark: Any, remote: Any) -> None:
    buffer, _ = remote("tcp", "ordinary", PIECES * PIECE, every=2)
    dst = torch.zeros(PIECES, PIECE // 4)
    run(benchmark, "256 x 1 KiB strided, tcp", PIECES * PIECE, lambda: buffer.read_into(dst).get())
    expected = numbers(2 * PIECES * PIECE).view(-1, 2, PIECE // 4)[:, 0]
    assert torch.equal(dst.view(torch.int32), expected.contiguous().view(torch.int32))


@pytest.mark.parametrize("in_flight", [False, True], ids=["one after another", "all in flight"])
def test_strided_in_single_reads(benchmark: Any, remote: Any, in_flight: bool) -> None:
    buffer, _ = remote("tcp", "ordinary", PIECES * PIECE, every=2)
    dst = torch.zeros(PIECES, PIECE // 4)
    pieces = [(buffer[i], dst[i]) for i in range(PIECES)]

    def one_after_another() -> None:
        for piece, row in pieces:
            piece.read_into(row).get()

    def all_in_flight() -> None:
        for future in [piece.read_into(row) for piece, row in pieces]:
            future.get()

    step = all_in_flight if in_flight else one_after_another
    run(benchmark, "256 x 1 KiB strided, tcp", PIECES * PIECE, step)
