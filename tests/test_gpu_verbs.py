"""Device memory on RDMA cards: dma-bufs, over a libibverbs whose cards are memory and a runtime whose devices are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from child import Child
from fake_gpus import fake_gpu_folder
from gpu_owners import numbers, owned
from test_lanes_verbs import fake_library

from monarch_rdma import config

__all__ = ["fake_library"]
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif("verbs" not in config.LANES, reason="this version has no verbs lane"),
]
_READ = """
from fake_gpus import DeviceArray, fail, held
import numpy as np
remote = RDMABuffer.from_bytes(handle, engine=engine)
target = DeviceArray(np.zeros(size, np.uint8))
host = np.zeros(size, np.uint8)
for dst in (target, host):
    future = remote.read_into(dst, lanes="verbs,staged")
    future.get()
result = future.explain(), target.get(), host
"""


Pair = tuple[Child, Child]


@pytest.fixture
def pair_with(
    fake_library: Any, child_process: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Pair]:
    """An owner and a reader on hosts with these settings of the fakes."""

    def make(*settings: str) -> Pair:
        fake_gpu_folder()
        paths = os.pathsep.join(filter(None, (str(fake_library), os.environ.get("LD_LIBRARY_PATH"))))
        monkeypatch.setenv("LD_LIBRARY_PATH", paths)
        monkeypatch.setenv("FAKE_VERBS_FABRIC", str(uuid4()))
        for setting in settings:
            monkeypatch.setenv(setting, "1")
        return child_process(), child_process()

    return make


@pytest.fixture
def pair(pair_with: Callable[..., Pair]) -> Pair:
    return pair_with()


@pytest.mark.parametrize("size", [1, 4097, (5 << 20) + 3])
def test_cards_read_and_write_device_memory(pair: Pair, size: int) -> None:
    owner, reader = pair
    handle = owned(owner, numbers(size)).to_bytes()
    explained, on_device, on_host = reader.run(_READ, handle=handle, size=size)
    assert explained.lane == "verbs"
    assert (on_device == numbers(size)).all()
    assert (on_host == numbers(size)).all()
    lane = reader.run(
        """
        target.put(values)
        future = remote.write_from(target, lanes="verbs")
        future.get()
        result = future.explain().lane
        """,
        values=numbers(size, 2),
    )
    assert lane == "verbs"
    assert (owner.run("result = array.get()") == numbers(size, 2)).all()


def test_parts_of_device_memory_at_odd_offsets(pair: Pair) -> None:
    owner, reader = pair
    owned(owner, numbers(100_000))
    handle = owner.run("result = RDMABuffer(array[5001:90_003], engine=engine).to_bytes()")
    got = reader.run(
        """
        from fake_gpus import DeviceArray
        import numpy as np
        remote = RDMABuffer.from_bytes(handle, engine=engine)
        target = DeviceArray(np.zeros(100_000, np.uint8))
        remote[77:70_077].read_into(target[4097:74_097], lanes="verbs").get()
        result = target.get()
        """,
        handle=handle,
    )
    assert (got[4097:74_097] == numbers(100_000)[5078:75_078]).all()
    assert not got[:4097].any()
    assert not got[74_097:].any()


def test_the_other_export_is_tried_and_then_staging(pair: Pair) -> None:
    owner, reader = pair
    size = 3 << 20
    handle = owned(owner, numbers(size)).to_bytes()
    owner.run("fail('MemGetHandleForAddressRange', 801, -1)")
    explained, on_device, _ = reader.run(_READ, handle=handle, size=size)
    assert explained.lane == "verbs"  # by HSA
    assert (on_device == numbers(size)).all()
    fresh = owner.run(
        "fail('hsa_amd_portable_export_dmabuf', 4096, -1); other = RDMABuffer(array, engine=engine); "
        "result = other.to_bytes()"
    )
    explained, on_device, _ = reader.run(_READ, handle=fresh, size=size)
    assert explained.lane.startswith("staged-")
    assert "hsa_amd_portable_export_dmabuf: status 4096" in explained.skipped
    assert "ibv_reg_mr" in explained.skipped
    assert (on_device == numbers(size)).all()


@pytest.mark.parametrize("without", ["the kernel", "the driver of the GPU"])
def test_without_dma_bufs_the_memory_is_registered_by_its_address(pair_with: Callable[..., Pair], without: str) -> None:
    """By the peer memory module of the GPU's driver."""
    kernel = ["FAKE_VERBS_NO_DMABUF"] if without == "the kernel" else []
    owner, reader = pair_with("FAKE_VERBS_PEER_MEMORY", *kernel)
    if not kernel:
        for child in (owner, reader):
            child.run(
                "from fake_gpus import fail; fail('MemGetHandleForAddressRange', 801, -1); "
                "fail('hsa_amd_portable_export_dmabuf', 4096, -1)"
            )
    size = (1 << 20) + 5
    handle = owned(owner, numbers(size)).to_bytes()
    explained, on_device, on_host = reader.run(_READ, handle=handle, size=size)
    assert (explained.lane, explained.skipped) == ("verbs", "")
    assert (on_device == numbers(size)).all()
    assert (on_host == numbers(size)).all()
    reader.run("target.put(values); remote.write_from(target, lanes='verbs').get()", values=numbers(size, 2))
    assert (owner.run("result = array.get()") == numbers(size, 2)).all()


def test_memory_that_cards_cannot_know_is_told_with_both_reasons(pair_with: Callable[..., Pair]) -> None:
    owner, reader = pair_with("FAKE_VERBS_NO_DMABUF")
    handle = owner.run("buffer = RDMABuffer(bytearray(9000), engine=engine); result = buffer.to_bytes()")
    kind, number, text = reader.run(
        """
        from fake_gpus import DeviceArray
        import numpy as np
        target = DeviceArray(np.zeros(9000, np.uint8))
        remote = RDMABuffer.from_bytes(handle, engine=engine)
        error = remote.read_into(target, lanes="verbs", strict=True).exception(60)
        result = type(error).__name__, error.sys_errno, str(error)
        """,
        handle=handle,
    )
    assert (kind, number) == ("RegistrationError", errno.EFAULT)
    assert "ibv_reg_dmabuf_mr of 9000 bytes of device memory" in text and os.strerror(errno.EOPNOTSUPP) in text
    assert "ibv_reg_mr of 9000 bytes" in text and os.strerror(errno.EFAULT) in text
    assert "peer memory module" in text
    lane, skipped = reader.run(
        """
        future = remote.read_into(target, lanes="verbs,staged")
        future.get(60)
        result = future.explain().lane, future.explain().skipped
        """
    )
    assert lane.startswith("staged-")
    assert "ibv_reg_dmabuf_mr of 9000" in skipped and "ibv_reg_mr of 9000" in skipped
    handle = owned(owner, numbers(9000)).to_bytes()  # and where it is the owner's memory
    explained, on_device, on_host = reader.run(_READ, handle=handle, size=9000)
    assert explained.lane.startswith("staged-")
    assert "ibv_reg_mr of 9000" in explained.skipped and "the owner's" in explained.skipped
    assert (on_device == numbers(9000)).all() and (on_host == numbers(9000)).all()


def test_a_drop_takes_device_memory_from_the_cards(pair: Pair) -> None:
    owner, reader = pair
    handle = owned(owner, numbers(5000)).to_bytes()
    reader.run(_READ, handle=handle, size=5000)
    owner.run("buffer.drop().get(); array.free()")
    refused = reader.run(
        """
        try:
            remote.read_into(target, lanes="verbs").get()
        except Exception as error:
            result = type(error).__name__
        """
    )
    assert refused == "AccessDenied"
