"""What faults do to the process that they run in."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

from ...errors import ConfigError, ResourceExhausted
from ...rdma.faults import put_fault
from .plan import Fault

__all__ = ["carry_out"]

_HEAD_START = 0.02  # seconds for the answer to leave the process first
_PIECE = 1 << 20
_LINKS = {"break_link": "break", "cut_link": "cut", "slow_link": "slow", "corrupt_frame": "corrupt"}


def carry_out(fault: Fault, peer_address: str = "") -> None:
    """Does it to this process, or to its connection with the process at `peer_address`. What lasts goes on after this
    returns, for `fault.seconds`.

    ConfigError where it makes no sense here; PeerLost where there is no such connection; ResourceExhausted where the
    memory is exhausted already.
    """
    if fault.kind in _LINKS:
        put_fault(peer_address, _LINKS[fault.kind], fault.seconds, fault.amount or 0.0)
    elif fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "hold_gil":
        _aside(_hold_gil, fault.seconds)
    elif fault.kind == "exhaust_memory":
        _exhaust_memory(int(fault.amount or 0), fault.seconds)
    elif fault.kind == "abort_group":
        _abort_group()
    else:
        raise ConfigError(f"kind is {fault.kind!r}, which a process cannot do to itself")


def _aside(action: Any, *arguments: Any) -> None:
    threading.Thread(target=action, args=arguments, name="monarch_rdma-fault", daemon=True).start()


def _hold_gil(seconds: float) -> None:
    time.sleep(_HEAD_START)
    ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))  # PyDLL does not let go of it


_is_exhausted = threading.Lock()


def _exhaust_memory(size: int, seconds: float) -> None:
    """The limit makes it bounded: the process takes `size` bytes, and then nobody in it gets any."""
    if not _is_exhausted.acquire(blocking=False):
        raise ResourceExhausted("the memory of this process is exhausted already")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = _address_space()
    limit = used + size
    if before[0] != resource.RLIM_INFINITY and before[0] < limit:
        limit = before[0]
    release = threading.Event()
    started = threading.Event()

    def hold() -> None:
        taken: list[mmap.mmap] = []
        try:
            started.set()
            time.sleep(_HEAD_START)
            resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
            _take(taken, size)
            release.wait(seconds)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
            for piece in taken:
                piece.close()
            _is_exhausted.release()

    _aside(hold)
    started.wait()


def _take(taken: list[mmap.mmap], size: int) -> None:
    """Until there is none, or `size` bytes are taken; large pieces, then small ones."""
    left, piece = size, _PIECE
    while left > 0 and piece >= mmap.PAGESIZE:
        try:
            taken.append(mmap.mmap(-1, piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
            left -= piece
        except (OSError, MemoryError):
            piece //= 2


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


def _abort_group() -> None:
    """Of torch.distributed: NCCL's and RCCL's by their own call. gloo has none, so the group is destroyed: its
    connections close, and what waits in it elsewhere fails.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        raise ConfigError("this process has no process group of torch.distributed")
    if "nccl" in distributed.get_backend():
        distributed.distributed_c10d._abort_process_group()
    else:
        distributed.destroy_process_group()
