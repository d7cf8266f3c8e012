"""torch.distributed's gloo between two processes: rank 0 answers questions, rank 1 is started by it."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from lines import LineProcess, answer_lines

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


class Rank:
    """One of the two processes. Both hold one tensor of the size asked for last."""

    def __init__(self, rank: int, port: int) -> None:
        self._rank = rank
        self._tensor = torch.empty(0, dtype=torch.uint8)
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
        self._other = None
        if rank == 0:
            self._other = LineProcess("gloo_pair.py", "--rank", "1", "--port", str(store.port), env=LOOPBACK)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    def close(self) -> None:
        if self._other:
            self._other.close()
        dist.destroy_process_group()

    def __call__(self, size: int, count: int) -> list[float]:
        """Sends the tensor to and fro. Returns the seconds of each way: half a round trip."""
        if self._tensor.numel() != size:
            self._tensor = torch.full((size,), 7 - self._rank, dtype=torch.uint8)
        if self._other:
            self._other.send(size=size, count=count)
        samples = []
        for _ in range(count):
            started = time.perf_counter()
            if self._rank == 0:
                dist.send(self._tensor, 1)
                dist.recv(self._tensor, 1)
            else:
                dist.recv(self._tensor, 0)
                dist.send(self._tensor, 0)
            samples.append((time.perf_counter() - started) / 2)
        if self._other:
            self._other.receive()
        if not bool((self._tensor == 7).all()):
            raise RuntimeError("gloo delivered wrong bytes")
        return samples


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    answer_lines(lambda: Rank(arguments.rank, arguments.port))
