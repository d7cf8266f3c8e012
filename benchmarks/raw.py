"""The raw same-host mechanisms, by ctypes: libc's memcpy and process_vm_readv/writev."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Copy", "Memcpy", "ProcessVm"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p
_PAGE = 4096


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


for _function in (_libc.process_vm_readv, _libc.process_vm_writev):
    _iovecs = ctypes.POINTER(_Iovec)
    _function.argtypes = [ctypes.c_int, _iovecs, ctypes.c_ulong, _iovecs, ctypes.c_ulong, ctypes.c_ulong]
    _function.restype = ctypes.c_ssize_t


class Copy(ABC):
    """A copy of `size` bytes, split by pages over `threads` threads (ctypes lets go of the GIL)."""

    name: str

    def __init__(self, size: int, threads: int) -> None:
        share = size if threads == 1 else -(-size // (threads * _PAGE)) * _PAGE
        self._parts = [(start, min(share, size - start)) for start in range(0, size, share)]
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    @abstractmethod
    def part(self, start: int, length: int) -> None: ...

    def __call__(self) -> None:
        others = [self._pool.submit(self.part, *part) for part in self._parts[1:]] if self._pool else []
        self.part(*self._parts[0])
        for other in others:
            other.result()

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()


class Memcpy(Copy):
    """libc memcpy from one address of this process to another."""

    name = "memcpy"

    def __init__(self, dst: int, src: int, size: int, threads: int = 1) -> None:
        super().__init__(size, threads)
        self._dst, self._src = dst, src

    def part(self, start: int, length: int) -> None:
        _libc.memcpy(self._dst + start, self._src + start, length)


class ProcessVm(Copy):
    """process_vm_readv (or writev) between an address of this process and one of process `pid`."""

    name = "process_vm"

    def __init__(self, pid: int, local: int, remote: int, size: int, threads: int = 1, *, write: bool = False) -> None:
        super().__init__(size, threads)
        self._pid, self._local, self._remote = pid, local, remote
        self._call = _libc.process_vm_writev if write else _libc.process_vm_readv

    def part(self, start: int, length: int) -> None:
        while length:
            local, remote = _Iovec(self._local + start, length), _Iovec(self._remote + start, length)
            moved = self._call(self._pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if moved <= 0:
                code = ctypes.get_errno()
                raise OSError(code, f"process_vm: {os.strerror(code)}")
            start, length = start + moved, length - moved
