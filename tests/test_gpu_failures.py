"""Memory of GPUs: processes that are killed, regions that are dropped, copies that fail; what is refused, by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from child import Child
from fake_gpus import DeviceArray, delay, fail
from gpu_owners import STAGING, WAYS, here, numbers, owned

from monarch_rdma.errors import AccessDenied, Cancelled, ConfigError, PeerLost, RegistrationError
from monarch_rdma.rdma import Engine, RDMAAction, RDMABuffer

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("gpus_left_clean")]


@pytest.mark.parametrize("way", WAYS)
def test_the_owner_is_killed_meanwhile(way: str, child_process: Callable[..., Child], reader: Engine) -> None:
    child = child_process()
    remote = here(owned(child, numbers(20 * STAGING)), reader)
    host = np.zeros(20 * STAGING, np.uint8)
    child.run("delay(20_000)")
    delay(20_000)
    future = remote.read_into(host, lanes=WAYS[way][0])
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(PeerLost):
        future.get()


@pytest.mark.parametrize("way", WAYS)
def test_the_region_is_dropped_meanwhile(way: str, child_process: Callable[..., Child], reader: Engine) -> None:
    child = child_process()
    remote = here(owned(child, numbers(20 * STAGING)), reader)
    array = DeviceArray(np.zeros(20 * STAGING, np.uint8))
    child.run("delay(50_000)")
    delay(50_000)
    future = remote.read_into(array, lanes=WAYS[way][0])
    remote.drop().get()  # nobody is in it any more
    child.run("array.free()")
    with pytest.raises(AccessDenied):
        future.get()
    with pytest.raises(AccessDenied):
        remote.read_into(array, lanes=WAYS[way][0]).get()


@pytest.mark.parametrize("way", WAYS)
def test_a_reader_that_is_killed_holds_no_drop_up(way: str, child_process: Callable[..., Child], owner: Engine) -> None:
    array = DeviceArray(numbers(20 * STAGING))
    buffer = RDMABuffer(array, engine=owner)
    child = child_process()
    child.run(
        """
        from fake_gpus import DeviceArray, delay
        import numpy as np
        delay(20_000)
        target = DeviceArray(np.zeros(size, np.uint8))
        future = RDMABuffer.from_bytes(handle, engine=engine).read_into(target, lanes=lanes)
        """,
        handle=buffer.to_bytes(),
        size=20 * STAGING,
        lanes=WAYS[way][0],
    )
    os.kill(child.pid, signal.SIGKILL)
    buffer.drop(timeout=20).get()
    array.free()


@pytest.mark.parametrize("way", WAYS)
def test_cancelled_meanwhile(way: str, child_process: Callable[..., Child], reader: Engine) -> None:
    child = child_process()
    remote = here(owned(child, numbers(20 * STAGING)), reader)
    array = DeviceArray(np.zeros(20 * STAGING, np.uint8))
    delay(20_000)
    future = remote.read_into(array, lanes=WAYS[way][0])
    future.cancel()
    with pytest.raises(Cancelled):
        future.get()
    before = array.get()
    delay(0)
    remote[:9].read_into(np.zeros(9, np.uint8), lanes=WAYS[way][0]).get()
    assert (array.get() == before).all()  # not touched any more


def test_a_copy_that_fails_is_told(child_process: Callable[..., Child], reader: Engine) -> None:
    child = child_process()
    remote = here(owned(child, numbers(1000)), reader)
    array = DeviceArray(np.zeros(1000, np.uint8))
    fail("MemcpyAsync", 700)
    with pytest.raises(RegistrationError, match="hipMemcpyAsync of 1000 bytes: error 700: an illegal memory access"):
        remote.read_into(array, lanes="ipc").get()
    child.run("fail('MemcpyAsync', 700)")
    with pytest.raises(RegistrationError, match="error 700"):
        remote.read_into(array, lanes="staged").get()
    remote.read_into(array).get()
    assert (array.get() == numbers(1000)).all()


def test_many_at_a_time(child_process: Callable[..., Child], reader: Engine) -> None:
    size, count = STAGING + 333, 12
    remote = here(owned(child_process(), numbers(size * count)), reader)
    arrays = [DeviceArray(np.zeros(size, np.uint8)) for _ in range(count)]
    parts = [remote[size * i : size * (i + 1)] for i in range(count)]
    ways = ["ipc", "staged", "tcp"]
    futures = [
        part.read_into(array, lanes=ways[i % 3]) for i, (part, array) in enumerate(zip(parts, arrays, strict=True))
    ]
    for future in futures:
        future.get()
    for i, array in enumerate(arrays):
        assert (array.get() == numbers(size * count)[size * i : size * (i + 1)]).all()


def test_memory_that_was_freed_is_refused(owner: Engine) -> None:
    array = DeviceArray(numbers(100))
    buffer = RDMABuffer(DeviceArray(numbers(100)), engine=owner)
    array.free()
    with pytest.raises(RegistrationError, match=r"argument address = 0x.*it was freed"):
        RDMABuffer(array, engine=owner)
    with pytest.raises(RegistrationError, match=r"argument local = 0x.*it was freed"):
        buffer.read_into(array)


def test_device_memory_is_neither_mapped_nor_counted_in(child_process: Callable[..., Child], reader: Engine,
                                                        owner: Engine) -> None:  # fmt: skip
    values = np.arange(8, dtype=np.int64)
    remote = here(owned(child_process(), values), reader)
    own = RDMABuffer(DeviceArray(values), engine=owner)
    for buffer in (remote, own):
        with pytest.raises(ConfigError, match="can't be mapped|cannot be mapped"):
            buffer.map()
        assert (np.asarray(buffer.read_view()) == values).all()
    old = np.zeros(1, np.int64)
    with pytest.raises(ConfigError, match="memory of a GPU, which has no remote atomics"):
        RDMAAction().fetch_add(remote[:1], old, 1).submit().get()


def test_arrays_that_cannot_be_moved(owner: Engine) -> None:
    class Strange:
        def __init__(self, **changes: Any) -> None:
            self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), **changes}

    for changes, why in (
        ({"typestr": ">f4"}, "'>f4'"),
        ({"typestr": "|O8"}, "cannot be moved"),
        ({"strides": (-4,)}, "negative strides"),
        ({"mask": object()}, "mask"),
        ({"data": None}, "malformed"),
    ):
        with pytest.raises(ConfigError, match=why):
            RDMABuffer(Strange(**changes), engine=owner)
    with pytest.raises(ConfigError, match="stream is 'now'"):
        RDMABuffer(numbers(4), engine=owner).read_into(numbers(4), stream="now")
    with pytest.raises(ConfigError, match="whose device is not known"):
        RDMABuffer(numbers(4), engine=owner).read_into(numbers(4), stream=0)


def test_a_process_without_a_runtime_says_so(child_process: Callable[..., Child]) -> None:
    said = child_process().run(
        """
        class Array:
            __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False)}
        try:
            RDMABuffer(Array(), engine=engine)
        except Exception as error:
            result = type(error).__name__, str(error)
        """
    )
    assert said[0] == "ConfigError"
    assert "no GPU runtime is loaded in this process" in said[1]
