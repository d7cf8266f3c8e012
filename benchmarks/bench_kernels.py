"""Kernels on the CPU beside what memory allows: libc's memcpy, and a triad (a = b + 3 * c, by torch).

    pytest benchmarks/bench_kernels.py              under pytest-benchmark
    python benchmarks/bench_kernels.py [--mib 64] [--threads 1] [--rounds 9]    in turns, with ratios

Bytes are those that have to be read and written. Extra traffic of memory (a line is read before it is written) counts
for nobody. Figures are for looking at: nothing fails because it is slow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from raw import Memcpy
from rows import Table, rate_of
from turns import Contender, each, take_turns

from monarch_rdma import kernels

Step = Callable[[], object]


class Case(NamedTuple):
    name: str
    nbytes: int  # read and written
    step: Step
    bound: str = "memcpy"  # what memory allows, by which one of the two
    reach: float | None = None


def bounds(size: int) -> Iterator[Case]:
    a, b, c = (torch.ones(size // 4) for _ in range(3))
    yield Case("memcpy", 2 * size, Memcpy(a.data_ptr(), b.data_ptr(), size))
    yield Case("triad", 3 * size, lambda: torch.add(b, c, alpha=3, out=a))


def packing(size: int) -> Iterator[Case]:
    x, out = torch.randn(size // 4), torch.zeros(size // 4)
    half, small = out[: size // 8], torch.zeros(size // 4, dtype=torch.bfloat16)
    back = torch.zeros(size // 4)
    layers = list(x.split(size // 4 // 50))
    targets = list(back.split(size // 4 // 50))
    rows = x.view(-1, 2, 1024)
    square = x.view(2048, -1)
    yield Case("pack 50 tensors", 2 * size, lambda: kernels.pack_into(layers, out), reach=0.8)
    yield Case("unpack 50 tensors", 2 * size, lambda: kernels.unpack_into(out, targets), reach=0.8)
    yield Case("pack every other row of 4 KiB", size, lambda: kernels.pack_into([rows[:, 0]], half))
    yield Case("pack every other number", size, lambda: kernels.pack_into([x[::2]], half))
    yield Case("  torch's copy_", size, lambda: half.copy_(x[::2]))
    yield Case("pack a transposed matrix", 2 * size, lambda: kernels.pack_into([square.t()], out))
    yield Case("  torch's copy_", 2 * size, lambda: out.view(-1, 2048).copy_(square.t()))
    yield Case("pack fp32 as bf16", size * 3 // 2, lambda: kernels.pack_into(layers, small))
    yield Case("  torch's copy_", size * 3 // 2, lambda: small.copy_(x))


def reducing(size: int) -> Iterator[Case]:
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, *fp8):
        count = size // 4
        shards = [torch.randn(count).to(dtype) for _ in range(4)]
        out = torch.zeros(count).to(dtype)
        name = f"sum of 4 shards, {str(dtype).removeprefix('torch.')}"
        step = lambda shards=shards, out=out: kernels.reduce_into(shards, out)  # noqa: E731
        yield Case(name, 5 * out.nbytes, step, "triad", 0.9)


def quantising(size: int) -> Iterator[Case]:
    x, error = torch.randn(size // 4), torch.zeros(size // 4)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        q, scales = kernels.quantize(x, dtype)
        name = str(dtype).removeprefix("torch.")
        read = size + size // 4
        quantize = lambda q=q, scales=scales: kernels.quantize_into(x, q, scales)  # noqa: E731
        dequantize = lambda q=q, scales=scales: kernels.dequantize_into(q, scales, error)  # noqa: E731
        yield Case(f"quantise fp32 to {name}", read, quantize)
        yield Case(f"dequantise {name} to fp32", read, dequantize)


def checking(size: int) -> Iterator[Case]:
    x = torch.randn(size // 4)
    yield Case("checksum", size, lambda: kernels.checksum(x))


SECTIONS = (packing, reducing, quantising, checking)
SIZE = 64 << 20


@pytest.mark.parametrize("section", [bounds, *SECTIONS], ids=lambda section: section.__name__)
def test_kernels(benchmark: Any, section: Callable[[int], Iterator[Case]]) -> None:
    cases = list(section(SIZE))

    def steps() -> None:
        for case in cases:
            case.step()

    benchmark.group = "kernels, 64 MiB"
    benchmark(steps)
    if benchmark.stats:
        benchmark.extra_info["GB/s"] = round(sum(case.nbytes for case in cases) / benchmark.stats.stats.median / 1e9, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="of fp32 in a tensor [64]")
    parser.add_argument("--threads", type=int, default=1, help="memcpy has one: more are for the triad's rows [1]")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size = arguments.mib << 20
    table = Table()
    for section in SECTIONS:
        cases = [*bounds(size), *section(size)]
        contenders = [Contender(case.name, each(case.step)) for case in cases]
        take_turns(contenders, rounds=arguments.rounds, seconds=0.05)
        seconds = {case.name: one.seconds for case, one in zip(cases[:2], contenders[:2], strict=True)}
        for case, one in zip(cases[2:], contenders[2:], strict=True):
            bound = next(other for other in cases[:2] if other.name == case.bound)
            theirs = seconds[case.bound] * case.nbytes / bound.nbytes
            table.add(rate_of(case.name, case.nbytes, one.seconds, case.bound, theirs, case.reach))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
