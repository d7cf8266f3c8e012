"""Memory of GPUs, on a fake runtime: between host and device, between devices, within a process, between processes of
one host, and through host memory over every host lane.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from child import Child
from fake_gpus import DeviceArray, copy_now, fail, held, wait_until_none_is
from gpu_owners import STAGING, WAYS, here, numbers, owned

from monarch_rdma.errors import AccessDenied, ConfigError
from monarch_rdma.rdma import Engine, RDMAAction, RDMABuffer

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("gpus_left_clean")]
SIZES = [1, 3, 4097, STAGING - 1, STAGING + 5, 5 * STAGING + 1]


@pytest.mark.parametrize("way", WAYS)
def test_every_size_both_ways(way: str, child_process: Callable[..., Child], reader: Engine) -> None:
    lanes, lane = WAYS[way]
    child = child_process()
    for size in SIZES:
        values, other = numbers(size), numbers(size, 2)
        remote = here(owned(child, values), reader)
        on_device, on_host = DeviceArray(np.zeros(size, np.uint8)), np.zeros(size, np.uint8)
        for dst in (on_device, on_host):
            future = remote.read_into(dst, lanes=lanes)
            future.get()
            assert future.explain().lane == lane
        assert (on_device.get() == values).all()
        assert (on_host == values).all()
        on_device.put(other)
        remote.write_from(on_device, lanes=lanes).get()
        assert (child.run("result = array.get()") == other).all()
        remote.write_from(on_host, lanes=lanes).get()
        assert (child.run("result = array.get()") == values).all()
        remote.drop().get()
        child.run("array.free()")
        on_device.free()


def test_host_memory_of_others_into_devices_and_back(child_process: Callable[..., Child], reader: Engine) -> None:
    size = 3 * STAGING + 7
    child = child_process()
    remote = child.run("array = values.copy(); buffer = RDMABuffer(array, engine=engine); result = buffer",
                       values=numbers(size))  # fmt: skip
    remote = here(remote, reader)
    array = DeviceArray(np.zeros(size, np.uint8))
    future = remote.read_into(array)
    future.get()
    assert future.explain().lane == "staged-shm"
    assert future.explain().chunks == 4
    assert (array.get() == numbers(size)).all()
    array.put(numbers(size, 2))
    remote.write_from(array, lanes="tcp").get()
    assert (child.run("result = array") == numbers(size, 2)).all()
    array.free()


def test_within_one_process(owner: Engine, reader: Engine) -> None:
    size = 100_001
    array, other = DeviceArray(numbers(size)), DeviceArray(np.zeros(size, np.uint8), device=1)
    buffer = RDMABuffer(array, engine=owner)
    for remote, lane in ((buffer, "local"), (here(buffer, reader), "ipc")):
        host = np.zeros(size, np.uint8)
        future = remote.read_into(host)
        future.get()
        assert future.explain().lane == lane
        remote.read_into(other).get()
        assert (host == numbers(size)).all()
        assert (other.get() == numbers(size)).all()
        other.put(numbers(size, 3))
        remote.write_from(other).get()
        assert (array.get() == numbers(size, 3)).all()
        array.put(numbers(size))
    host_buffer = RDMABuffer(host, engine=owner)
    future = host_buffer.read_into(other)
    future.get()
    assert future.explain().lane == "local"
    assert (other.get() == host).all()
    buffer.drop().get()


def test_no_bytes_are_no_matter(owner: Engine) -> None:
    array = DeviceArray(numbers(16))
    remote = RDMABuffer(array, engine=owner)[4:4]
    remote.read_into(array[:0]).get()
    assert (array.get() == numbers(16)).all()


@pytest.mark.parametrize("way", WAYS)
def test_strided_parts(way: str, child_process: Callable[..., Child], reader: Engine) -> None:
    lanes = WAYS[way][0]
    values = numbers(64 * 130 * 97).reshape(64, 130, 97)
    remote = here(owned(child_process(), values), reader)
    target = DeviceArray(np.zeros((80, 130, 100), np.uint8))
    rows = remote[3:61:2, 5:125, 10:90]
    rows.read_into(target[:29, :120, 20:100], lanes=lanes).get()
    assert (target.get()[:29, :120, 20:100] == values[3:61:2, 5:125, 10:90]).all()
    assert not target.get()[:, :, :20].any()
    assert not target.get()[29:].any()
    on_host = np.zeros((29, 120, 200), np.uint8)
    rows.read_into(on_host[:, :, 1:161:2], lanes=lanes).get()
    assert (on_host[:, :, 1:161:2] == values[3:61:2, 5:125, 10:90]).all()
    assert not on_host[:, :, ::2].any()


def test_large_strided_parts_go_in_pieces(child_process: Callable[..., Child], reader: Engine) -> None:
    values = numbers(3000 * 2500).reshape(3000, 2500)
    remote = here(owned(child_process(), values), reader)[:, 100:2400]
    target = DeviceArray(np.zeros((3000, 2300), np.uint8))
    future = remote.read_into(target, lanes="staged")
    future.get()
    assert future.explain().chunks > 3
    assert (target.get() == values[:, 100:2400]).all()
    column = DeviceArray(np.zeros(3000, np.uint8))
    remote[:, 7].read_into(column, lanes="ipc").get()
    assert (column.get() == values[:, 107]).all()


# ---- Why not better ----


def test_it_says_why_it_was_staged(child_process: Callable[..., Child], reader: Engine) -> None:
    child = child_process()
    remote = here(owned(child, numbers(1000)), reader)
    fail("IpcOpenMemHandle", 801)
    host = np.zeros(1000, np.uint8)
    future = remote.read_into(host)
    future.get()
    assert future.explain().lane == "staged-shm"
    assert "ipc: hipIpcOpenMemHandle of 4096 bytes of device memory: error 801" in future.explain().skipped
    assert (host == numbers(1000)).all()
    with pytest.raises(ConfigError, match="strict.*ipc: hipIpcOpenMemHandle"):
        remote.read_into(host, strict=True).get()


def test_an_owner_that_exports_nothing(child_process: Callable[..., Child], reader: Engine) -> None:
    child = child_process()
    remote = here(owned(child, numbers(1000)), reader)
    child.run("fail('IpcGetMemHandle', 1, -1)")
    future = remote.read_into(np.zeros(1000, np.uint8))
    future.get()
    assert "ipc: the owner can't export it: hipIpcGetMemHandle" in future.explain().skipped


def test_a_device_that_is_hidden_here(child_process: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    owner = child_process()
    buffer = owned(owner, numbers(1000), device=1)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    other = child_process()
    explained = other.run(
        """
        import fake_gpus, numpy as np
        fake_gpus.fake()
        future = RDMABuffer.from_bytes(handle, engine=engine).read_into(np.zeros(1000, np.uint8))
        future.get()
        result = future.explain()
        """,
        handle=buffer.to_bytes(),
    )
    assert explained.lane == "staged-shm"
    assert "the owner's device 0000:c1:00.0 is not visible" in explained.skipped


def test_devices_that_do_not_reach_each_other(child_process: Callable[..., Child], reader: Engine,
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    remote = here(owned(child_process(), numbers(1000), device=1), reader)
    monkeypatch.setenv("FAKE_GPU_NO_PEERS", "1")
    array = DeviceArray(np.zeros(1000, np.uint8))
    future = remote.read_into(array)
    future.get()
    assert "device 0 can't reach memory of device 1 (0000:c1:00.0)" in future.explain().skipped
    assert (array.get() == numbers(1000)).all()


def test_a_process_without_a_runtime_reads_device_memory(child_process: Callable[..., Child]) -> None:
    buffer = owned(child_process(), numbers(5 * STAGING))
    explained, good = child_process().run(
        """
        import numpy as np
        host = np.zeros(len(values), np.uint8)
        future = RDMABuffer.from_bytes(handle, engine=engine).read_into(host)
        future.get()
        result = future.explain(), bool((host == values).all())
        """,
        handle=buffer.to_bytes(),
        values=numbers(5 * STAGING),
    )
    assert good
    assert explained.lane == "staged-shm"
    assert "no GPU runtime is loaded" in explained.skipped


def test_expandable_segments_are_opened_by_descriptors(child_process: Callable[..., Child], reader: Engine) -> None:
    size = 3 * STAGING + 100
    child = child_process()
    buffer = here(owned(child, numbers(size), how="fake_gpu_malloc_expandable"), reader)
    part = buffer[STAGING - 50 : 2 * STAGING + 50]
    host = np.zeros(STAGING + 100, np.uint8)
    future = part.read_into(host)
    future.get()
    assert future.explain().lane == "ipc"
    assert (host == numbers(size)[STAGING - 50 : 2 * STAGING + 50]).all()
    assert held("opened") == 4
    buffer.drop().get()
    assert held("opened") == held("handles") == 0


def test_a_handle_is_opened_once_and_closed_with_its_regions(
    child_process: Callable[..., Child], reader: Engine
) -> None:
    child = child_process()
    first = here(owned(child, numbers(1000)), reader)
    second = here(child.run("second = RDMABuffer(array[10:90], engine=engine); result = second"), reader)
    host = np.zeros(80, np.uint8)
    first[10:90].read_into(host, lanes="ipc").get()
    second.read_into(host, lanes="ipc").get()
    assert (host == numbers(1000)[10:90]).all()
    assert held("opened") == 1
    first.drop().get()
    assert held("opened") == 1
    second.drop().get()
    assert held("opened") == 0


# ---- Opened for kernels ----


@pytest.mark.parametrize("how", ["fake_gpu_malloc", "fake_gpu_malloc_expandable"])
def test_memory_that_is_opened_for_kernels(how: str, child_process: Callable[..., Child], reader: Engine) -> None:
    """It is reached as long as it is open, and the owner's drop waits for that."""
    size = STAGING + 100
    remote = here(owned(child_process(), numbers(size), how=how), reader)
    mapping, again = remote.map_on_device(1), remote[7:].map_on_device()
    there = np.zeros(size, np.uint8)
    copy_now(there.ctypes.data, mapping.address, size)
    assert (there == numbers(size)).all()
    copy_now(there.ctypes.data, again.address, 10)
    assert (there[:10] == numbers(size)[7:17]).all()
    copy_now(mapping.address + 5, numbers(20, 3).ctypes.data, 20)
    assert held("opened") == (2 if how == "fake_gpu_malloc" else 4)  # for either device, which are opened one by one
    host = np.zeros(20, np.uint8)
    remote[5:25].read_into(host).get()
    assert (host == numbers(20, 3)).all()
    dropping = remote.drop()
    with pytest.raises(TimeoutError):
        dropping.get(timeout=0.3)
    mapping.close()
    mapping.close()
    again.close()
    dropping.get(timeout=20)
    with pytest.raises(AccessDenied):
        remote.map_on_device()
    assert held("opened") == 0


def test_what_cannot_be_opened_for_kernels(child_process: Callable[..., Child], owner: Engine, reader: Engine,
                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    child = child_process()
    array = DeviceArray(numbers(100))
    with pytest.raises(ConfigError, match="for memory of another process"):
        RDMABuffer(array, engine=owner).map_on_device()
    on_host = child.run("host = values.copy(); result = RDMABuffer(host, engine=engine)", values=numbers(100))
    with pytest.raises(ConfigError, match="is memory of the host, not of a device"):
        here(on_host, reader).map_on_device()
    remote = here(owned(child, numbers(100), device=1), reader)
    only_read = here(child.run("part = RDMABuffer(array, access='read', engine=engine); result = part"), reader)
    with pytest.raises(AccessDenied, match="does not grant it"):
        only_read.map_on_device()
    monkeypatch.setenv("FAKE_GPU_NO_PEERS", "1")
    with pytest.raises(ConfigError, match="ipc: device 0 can't reach memory of device 1"):
        remote.map_on_device(0)


def test_opened_memory_outlives_its_owner(child_process: Callable[..., Child], reader: Engine) -> None:
    """No kernel that still uses it falls into a hole."""
    child = child_process()
    mapping = here(owned(child, numbers(100)), reader).map_on_device()
    child.kill()
    there = np.zeros(100, np.uint8)
    copy_now(there.ctypes.data, mapping.address, 100)
    assert (there == numbers(100)).all()
    mapping.close()
    wait_until_none_is("opened")


def test_actions_move_device_memory(child_process: Callable[..., Child], reader: Engine) -> None:
    remote = here(owned(child_process(), numbers(1000)), reader)
    array = DeviceArray(np.zeros(1000, np.uint8))
    action = RDMAAction().read_remote(array, remote)
    for _ in range(2):
        array.put(np.zeros(1000, np.uint8))
        action.submit().get()
        assert (array.get() == numbers(1000)).all()
