"""What the tests of GPU memory share: owners of device memory in other processes, and that nothing is left."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from child import Child
from fake_gpus import delay, fake, held

from monarch_rdma.rdma import Engine, RDMABuffer

STAGING = 2 << 20
WAYS = {"ipc": ("ipc", "ipc"), "staged": ("staged", "staged-shm"), "tcp": ("staged,tcp", "staged-tcp")}
_OWN = """
from fake_gpus import DeviceArray, fail, delay, held
import numpy as np
array = DeviceArray(values, device=device, how=how)
buffer = RDMABuffer(array, engine=engine)
result = buffer
"""


@contextmanager
def nothing_left() -> Iterator[None]:
    """Nothing of the runtime's is held, and no descriptor, once a test's engines are gone."""
    fake()
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    delay(0)
    gc.collect()
    assert {what: held(what) for what in ("opened", "events", "handles", "streams")} == {
        "opened": 0, "events": 0, "handles": 0, "streams": 0,
    }  # fmt: skip
    assert held("registered") <= 1  # the page of the gates stays
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def numbers(size: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, size, np.uint8)


def owned(child: Child, values: np.ndarray[Any, Any], *, device: int = 0, how: str = "fake_gpu_malloc") -> RDMABuffer:
    """Device memory of another process with these values."""
    buffer = child.run(_OWN, values=values, device=device, how=how)
    assert isinstance(buffer, RDMABuffer)
    return buffer


def here(buffer: RDMABuffer, engine: Engine) -> RDMABuffer:
    """The buffer as an engine of this process knows it."""
    return RDMABuffer.from_bytes(buffer.to_bytes(), engine=engine)
