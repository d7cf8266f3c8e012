"""Several processes of one program for tests, cheap ones: forked off one that has imported torch and nothing else does.

`forked(4, function, *arguments)` runs function(rank, *arguments) in each and returns what they return. What one raises
is raised here, with its traceback as text. They are one job: their engines share a secret.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from monarch_rdma.rdma import Secret

__all__ = ["Forked", "forked"]

LIMIT = 90.0  # seconds; reached only by a failing test
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.tensor", "monarch_rdma.sharding.state_dict"])


def _main(
    channel: Connection, secret: bytes, function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]
) -> None:
    import torch

    os.environ["MONARCH_RDMA_SECRET_FD"] = str(Secret(secret).to_fd())
    torch.set_num_threads(1)
    try:
        channel.send((True, function(rank, *arguments)))
    except BaseException:
        channel.send((False, traceback.format_exc()))


class Forked:
    """Processes that run function(rank, *arguments); they end with the block."""

    def __init__(self, count: int, function: Callable[..., Any], *arguments: Any) -> None:
        secret = bytes(Secret.generate().reveal())
        self.processes = []
        self._channels: list[Connection] = []
        for rank in range(count):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_main, args=(theirs, secret, function, rank, arguments), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._channels.append(ours)

    def kill(self, rank: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def result(self, rank: int) -> Any:
        """What the function returned; AssertionError with the traceback of what it raised, or where it was killed."""
        assert wait([self._channels[rank]], LIMIT), f"process {rank} says nothing in {LIMIT} s"
        try:
            good, value = self._channels[rank].recv()
        except EOFError:
            raise AssertionError(f"process {rank} has ended without a result") from None
        assert good, f"process {rank}:\n{value}"
        return value

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for process, channel in zip(self.processes, self._channels, strict=True):
            process.join(5)
            process.kill()
            process.join()
            process.close()
            channel.close()


def forked(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    with Forked(count, function, *arguments) as running:
        return [running.result(rank) for rank in range(count)]
