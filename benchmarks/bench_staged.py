"""Staged transfers of GPU memory: how well copies by the devices and the wire between them overlap.

    pytest benchmarks/bench_staged.py             under pytest-benchmark
    python benchmarks/bench_staged.py [--mib 64] [--copy-us 1000] [--rounds 5]    in turns, with ratios

There is no GPU in it: the runtime is the tests' fake one, whose copies take so many microseconds more for each part of
2 MiB, asleep, as a device's copy takes its time without a processor. Two processes, a device each. What is shown is the
pipeline alone: the time of a transfer beside that of one copy of as many bytes between a device and slots in host
memory, which is its slowest stage, and beside all its stages one after the other, which it would take without overlap.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rows import Table, time_of
from turns import Contender, each, take_turns

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from child import Child
from fake_gpus import DeviceArray, Stream, checked, delay, fake

from monarch_rdma.rdma import Engine, RDMABuffer, Secret

PART, SLOTS = 2 << 20, 4  # bytes of a part of a staged transfer; of how many are in host memory at a time
_OWN = """
from fake_gpus import DeviceArray, delay
import numpy as np
delay(copy_us)
on_device, on_host = DeviceArray(np.ones(size, np.uint8)), np.ones(size, np.uint8)
result = RDMABuffer(on_device, engine=engine), RDMABuffer(on_host, engine=engine)
"""
Steps = dict[str, Callable[[], object]]


@contextmanager
def steps(size: int, copy_us: int) -> Iterator[Steps]:
    """What is timed, by name."""
    runtime, secret = fake(), Secret.generate()
    delay(copy_us)
    with Engine(secret=secret) as engine, Child(secret) as child:
        handles = child.run(_OWN, size=size, copy_us=copy_us)
        device, host = (RDMABuffer.from_bytes(each.to_bytes(), engine=engine) for each in handles)
        to_device, to_host = DeviceArray(np.zeros(size, np.uint8)), np.zeros(size, np.uint8)
        stream = Stream()

        slots = np.zeros(SLOTS * PART, np.uint8)

        def one_copy() -> None:
            for at in range(0, size, PART):
                to, start = slots.ctypes.data + at % len(slots), to_device.address + at
                arguments = (ctypes.c_void_p(to), ctypes.c_void_p(start), ctypes.c_size_t(min(PART, size - at)), 2)
                checked(runtime.hipMemcpyAsync(*arguments, ctypes.c_void_p(stream.cuda_stream)))
            stream.synchronize()

        def read(source: RDMABuffer, target: Any, lanes: str) -> Callable[[], object]:
            return lambda: source.read_into(target, lanes=lanes).get()

        yield {
            "one copy": one_copy,
            "wire, shm": read(host, to_host, "shm"),
            "wire, tcp": read(host, to_host, "tcp"),
            "device to host, shm": read(device, to_host, "staged,shm"),
            "device to device, shm": read(device, to_device, "staged,shm"),
            "device to device, tcp": read(device, to_device, "staged,tcp"),
        }
        assert (to_device.get() == 1).all() and (to_host == 1).all()
        stream.destroy()
        to_device.free()
    delay(0)


def test_staged(benchmark: Any) -> None:
    size = 32 << 20
    with steps(size, 500) as timed:
        benchmark.group = "staged, 32 MiB"
        for step in list(timed.values())[:-1]:
            step()
        benchmark(timed["device to device, tcp"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="in a transfer [64]")
    parser.add_argument("--copy-us", type=int, default=1000, help="that a device's copy of 2 MiB takes longer [1000]")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    table = Table()
    with steps(arguments.mib << 20, arguments.copy_us) as timed:
        contenders = {name: Contender(name, each(step)) for name, step in timed.items()}
        take_turns(list(contenders.values()), rounds=arguments.rounds, seconds=0.1)
        took = {name: contender.seconds for name, contender in contenders.items()}
    for name, copies, reach in (
        ("device to host, shm", 1, 1.3),
        ("device to device, shm", 2, 1.5),
        ("device to device, tcp", 2, 1.5),
    ):
        wire = took[f"wire, {name.rpartition(' ')[2]}"]
        table.add(time_of(name, took[name], "one copy", took["one copy"], reach))
        table.add(time_of(name, took[name], "its stages one by one", copies * took["one copy"] + wire))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
