"""What faults do to the process that they run in."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from ...errors import ConfigError, ResourceExhausted
from ...rdma.faults import put_fault
from .plan import Fault

__all__ = ["carry_out"]

_HEAD_START = 0.02  # seconds for the answer to leave the process first
_PIECE = 1 << 20


def carry_out(fault: Fault, peer_address: str = "") -> None:
    """Does it to this process, or to its connection with the process at `peer_address`. What lasts goes on after this
    returns, for `fault.seconds`.

    ConfigError where it makes no sense here; PeerLost where there is no such connection; ResourceExhausted where the
    memory is exhausted already.
    """
    _DEEDS[fault.kind](fault, peer_address)


def _aside(action: Callable[[], object]) -> None:
    threading.Thread(target=action, name="monarch_rdma-fault", daemon=True).start()


def _kill(fault: Fault, peer: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Has another process go on after some seconds, and ends before that where it does.
_WAKER = """
import os, select, signal, sys
process, seconds = os.pidfd_open(int(sys.argv[1])), float(sys.argv[2])
end = select.poll()
end.register(process, select.POLLIN)
print(flush=True)
if not end.poll(seconds * 1000):
    signal.pidfd_send_signal(process, signal.SIGCONT)
"""


def _stop(fault: Fault, peer: str) -> None:
    """A process that is stopped cannot wake itself: another one does, which is there first."""
    command = [sys.executable, "-I", "-S", "-c", _WAKER, str(os.getpid()), str(fault.seconds)]
    waker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert waker.stdout is not None, "it was asked for"
    with waker.stdout:
        is_there = waker.stdout.readline()
    if not is_there:
        raise ResourceExhausted(f"no process could be started to make this one go on (exit code {waker.wait()})")

    def stop() -> None:
        time.sleep(0.0 if fault.moment else _HEAD_START)
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()

    _aside(stop)


def _hold_gil(fault: Fault, peer: str) -> None:
    def hold() -> None:
        time.sleep(_HEAD_START)
        ctypes.PyDLL(None).poll(None, 0, int(fault.seconds * 1000))  # PyDLL does not let go of it

    _aside(hold)


def _on_link(kind: str, fault: Fault, peer: str) -> None:
    put_fault(peer, kind, fault.seconds, fault.amount or 0.0)


_is_exhausted = threading.Lock()


def _exhaust_memory(fault: Fault, peer: str) -> None:
    """The limit makes it bounded: the process takes so many bytes, and then nobody in it gets any."""
    size, seconds = int(fault.amount or 0), fault.seconds
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


def _abort_group(fault: Fault, peer: str) -> None:
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


_DEEDS: dict[str, Callable[[Fault, str], None]] = {
    "kill": _kill,
    "stop": _stop,
    "hold_gil": _hold_gil,
    "exhaust_memory": _exhaust_memory,
    "abort_group": _abort_group,
    "break_link": partial(_on_link, "break"),
    "cut_link": partial(_on_link, "cut"),
    "slow_link": partial(_on_link, "slow"),
    "corrupt_frame": partial(_on_link, "corrupt"),
}
