"""Transfers in the order of streams: they wait for what is queued before, and what is queued after waits for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
from child import Child
from fake_gpus import DeviceArray, Stream
from gpu_owners import here, numbers, owned

from monarch_rdma.errors import Cancelled, PeerLost, TransferTimeout
from monarch_rdma.rdma import Engine, RDMABuffer, Secret

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("gpus_left_clean")]


def test_a_read_waits_for_the_stream_and_the_stream_for_it(child_process: Callable[..., Child], reader: Engine) -> None:
    remote = here(owned(child_process(), numbers(5000)), reader)
    for lanes in ("ipc", "staged"):
        stream, array, after = Stream(), DeviceArray(np.zeros(5000, np.uint8)), DeviceArray(np.zeros(5000, np.uint8))
        stream.fill_later(array, 7, 1500)  # before the read: what it writes is overwritten
        began = time.monotonic()
        future = remote.read_into(array, stream=stream, lanes=lanes)
        assert time.monotonic() - began < 1.4  # nobody waited
        stream.fill_later(after, 1, 0)
        stream.synchronize()
        assert (array.get() == numbers(5000)).all()
        assert after.get().all()
        future.get()
        stream.destroy()


def test_a_write_takes_what_the_stream_computes(child_process: Callable[..., Child], reader: Engine) -> None:
    child = child_process()
    remote = here(owned(child, numbers(5000)), reader)
    for value, lanes in ((9, "ipc"), (8, "staged")):
        stream, array = Stream(), DeviceArray(np.zeros(5000, np.uint8))
        stream.fill_later(array, value, 50)
        future = remote.write_from(array, stream=stream, lanes=lanes)
        stream.fill_later(array, 3, 0)  # after the write: not seen by it
        future.get()
        assert (child.run("result = array.get()") == value).all()
        stream.synchronize()
        assert (array.get() == 3).all()
        stream.destroy()


def test_without_a_stream_the_array_s_own_is_waited_for(owner: Engine) -> None:
    stream, array = Stream(), DeviceArray(np.zeros(5000, np.uint8))
    array.stream = stream.cuda_stream
    stream.fill_later(array, 5, 50)
    buffer = RDMABuffer(array, engine=owner)  # waits: peers read what was computed
    assert (array.get() == 5).all()
    stream.fill_later(array, 6, 50)
    host = np.zeros(5000, np.uint8)
    buffer.read_into(host).get()
    buffer.write_from(array).get()
    assert (array.get() == 6).all()
    stream.destroy()


def test_host_memory_in_the_order_of_a_stream(owner: Engine, reader: Engine) -> None:
    source = numbers(1000)
    buffer = RDMABuffer(source, engine=owner)
    stream, array, host = Stream(), DeviceArray(np.zeros(10, np.uint8)), np.zeros(1000, np.uint8)
    stream.fill_later(array, 1, 50)
    future = here(buffer, reader).read_into(host, stream=stream)
    assert not host.any()
    stream.synchronize()
    assert (host == source).all()
    assert array.get().all()
    future.get()
    stream.destroy()


def test_a_stream_goes_on_after_a_failure(child_process: Callable[..., Child], reader: Engine) -> None:
    child = child_process()
    remote = here(owned(child, numbers(1000)), reader)
    stream, array = Stream(), DeviceArray(np.zeros(1000, np.uint8))
    stream.fill_later(array, 4, 100)
    future = remote.read_into(array, stream=stream)
    os.kill(child.pid, signal.SIGKILL)
    stream.synchronize()
    with pytest.raises(PeerLost):
        future.get()
    assert (array.get() == 4).all()
    stream.destroy()


def test_an_operation_that_waits_for_a_stream_can_be_ended(owner: Engine) -> None:
    buffer = RDMABuffer(numbers(100), engine=owner)
    stream, array = Stream(), DeviceArray(np.zeros(100, np.uint8))
    stream.fill_later(array, 1, 300)
    cancelled = buffer.read_into(array, stream=stream)
    late = buffer.read_into(array, stream=stream, timeout=0.05)
    cancelled.cancel()
    with pytest.raises(Cancelled):
        cancelled.get()
    with pytest.raises(TransferTimeout):
        late.get()
    stream.synchronize()
    assert (array.get() == 1).all()
    stream.destroy()


def test_a_closed_engine_lets_streams_go_on(secret: Secret) -> None:
    stream, array = Stream(), DeviceArray(np.zeros(100, np.uint8))
    with Engine(secret=secret) as engine:
        buffer = RDMABuffer(numbers(100), engine=engine)
        stream.fill_later(array, 1, 200)
        future = buffer.read_into(array, stream=stream)
    with pytest.raises(Cancelled):
        future.get()
    stream.synchronize()
    stream.destroy()


def test_a_runtime_without_waits_for_values_says_so(child_process: Callable[..., Child]) -> None:
    said = child_process().run(
        """
        import ctypes, fake_gpus, numpy as np
        old = ctypes.CDLL(str(fake_gpus.fake_gpu_folder() / "libamdhip64.so.6"))
        fake_gpus.fake = lambda: old
        array, stream = fake_gpus.DeviceArray(np.zeros(10, np.uint8)), fake_gpus.Stream()
        buffer = RDMABuffer(array, engine=engine)
        buffer.read_into(np.zeros(10, np.uint8)).get()
        try:
            buffer.read_into(array, stream=stream)
        except Exception as error:
            result = type(error).__name__, str(error)
        """
    )
    assert said[0] == "ConfigError"
    assert "has no waits for values" in said[1]
