"""The fake GPU runtime (tests/fake_gpu) from Python: what is loaded, device memory as arrays, streams.

Device memory is arrays with `__cuda_array_interface__`; a processor that touches their bytes crashes.
"""

from __future__ import annotations

import ctypes
import fcntl
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


@cache
def fake_gpu_folder() -> Path:
    """Where its libraries are; made the first time."""
    with open(ROOT / "build/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-C", ROOT / "csrc", "--no-print-directory", "fake_gpu"], check=True, timeout=300)
    return ROOT / "build/core/fake_gpu"


@cache
def fake() -> ctypes.CDLL:
    """The runtime, in this process from now on; both libraries that ROCm has."""
    ctypes.CDLL(str(fake_gpu_folder() / "libhsa-runtime64.so.1"))
    return ctypes.CDLL(str(fake_gpu_folder() / "libamdhip64.so.7"))


def checked(code: int) -> None:
    assert code == 0, f"the fake runtime says {code}"


def fail(call: str, code: int = 801, times: int = 1) -> None:
    """The next calls of this name end with the code; `times` -1: all."""
    fake().fake_gpu_fail(call.encode(), code, times)


def delay(microseconds: int) -> None:
    """What each copy takes longer."""
    fake().fake_gpu_delay(microseconds)


def held(what: str) -> int:
    """How many "opened", "events", "handles", "registered", "streams" there are."""
    return int(fake().fake_gpu_held(what.encode()))


def wait_until_none_is(what: str, timeout: float = 30) -> None:
    """Held: of what is given back by threads, or when other processes say so."""
    deadline = time.monotonic() + timeout
    while held(what):
        assert time.monotonic() < deadline, f"{held(what)} are {what}"
        time.sleep(0.005)


class Stream:
    """A stream, as torch's are seen: `cuda_stream`, `device_index`."""

    def __init__(self) -> None:
        pointer = ctypes.c_void_p()
        checked(fake().fake_gpu_stream_create(ctypes.byref(pointer)))
        self.cuda_stream = int(pointer.value or 0)
        self.device_index = 0

    def fill_later(self, array: DeviceArray, value: int, milliseconds: int) -> None:
        """What a kernel would do that takes its time: fills the array's bytes."""
        where, size = ctypes.c_void_p(array.address), ctypes.c_size_t(array.nbytes)
        checked(fake().fake_gpu_fill_later(ctypes.c_void_p(self.cuda_stream), where, value, size, milliseconds * 1000))

    def synchronize(self) -> None:
        checked(fake().fake_gpu_stream_synchronize(ctypes.c_void_p(self.cuda_stream)))

    def destroy(self) -> None:
        checked(fake().fake_gpu_stream_destroy(ctypes.c_void_p(self.cuda_stream)))


class _Block:
    """Memory of a device, freed with the last array in it."""

    def __init__(self, size: int, device: int, how: str) -> None:
        self.size = size
        self.address = 0
        pointer = ctypes.c_void_p()
        checked(fake().fake_gpu_set_device(device))
        checked(getattr(fake(), how)(ctypes.byref(pointer), ctypes.c_size_t(size)))
        checked(fake().fake_gpu_set_device(0))
        self.address = int(pointer.value or 0)

    def free(self) -> None:
        if self.address:
            checked(fake().fake_gpu_free(ctypes.c_void_p(self.address)))
        self.address = 0

    def __del__(self) -> None:
        self.free()


class DeviceArray:
    """Memory of a device, with the values of a numpy array in it."""

    def __init__(self, values: np.ndarray[Any, Any], *, device: int = 0, how: str = "fake_gpu_malloc") -> None:
        self._block = _Block(values.nbytes, device, how)
        self.address, self.nbytes = self._block.address, values.nbytes
        self.stream = 0
        self._like = np.empty(values.shape, values.dtype)  # shape, strides and offsets, without its values
        self.put(values)

    def __getitem__(self, key: Any) -> DeviceArray:
        part = object.__new__(DeviceArray)
        part.__dict__.update(self.__dict__)
        part._like = self._like[key]
        base = self._like.__array_interface__["data"][0]
        part.address = self.address + part._like.__array_interface__["data"][0] - base
        part.nbytes = part._like.nbytes
        return part

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self._like.shape,
            "strides": self._like.strides,
            "typestr": self._like.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "stream": self.stream or None,
        }

    def put(self, values: np.ndarray[Any, Any]) -> None:
        """At once, past all streams. Of a whole array only."""
        source = np.ascontiguousarray(values)
        checked(_copy(self._block.address, source.ctypes.data, self._block.size))

    def get(self) -> np.ndarray[Any, Any]:
        """What it holds now, past all streams."""
        whole = np.empty(self._block.size, np.uint8)
        checked(_copy(whole.ctypes.data, self._block.address, self._block.size))
        offset = self.address - self._block.address
        view = np.ndarray(self._like.shape, self._like.dtype, whole, offset, self._like.strides)
        return view.copy()

    def free(self) -> None:
        self._block.free()


def copy_now(to: int, start: int, size: int) -> None:
    """At once, past all streams."""
    checked(_copy(to, start, size))


def _copy(to: int, start: int, size: int) -> int:
    return int(fake().fake_gpu_copy(ctypes.c_void_p(to), ctypes.c_void_p(start), ctypes.c_size_t(size)))
