"""A process that holds memory which others read and write, and the side that asks it for some."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lines import LineProcess, answer_lines

from monarch_rdma.rdma import Engine, RDMABuffer, Secret, share

if TYPE_CHECKING:
    import torch

__all__ = ["Owned", "OwnerProcess"]


@dataclass(frozen=True)
class Owned:
    """Memory of an owner. What it holds, `numbers` tells."""

    id: int
    handle: bytes
    pid: int
    address: int


class OwnerProcess:
    """One owner. `secret`: the job's; `loop_spin`: the option of its engine."""

    def __init__(self, secret: Secret, loop_spin: float = 0.0) -> None:
        fd = secret.to_fd()
        env = {"MONARCH_RDMA_LOOP_SPIN": str(loop_spin)}
        try:
            self._process = LineProcess("owner.py", "--secret-fd", str(fd), pass_fds=(fd,), env=env)
        finally:
            os.close(fd)

    def make(self, memory: str, size: int, *, every: int = 1) -> Owned:
        """`size` bytes of "shared" or "ordinary" memory; with every=2, each second KiB of twice as many."""
        answer = self._process.ask(do="make", memory=memory, size=size, every=every)
        return Owned(answer["id"], answer["handle"].encode(), answer["pid"], answer["address"])

    def drop(self, owned: Owned) -> None:
        self._process.ask(do="drop", id=owned.id)

    def close(self) -> None:
        self._process.close()


def numbers(size: int) -> torch.Tensor:
    """What `size` bytes of an owner's memory hold, a multiple of 4: the integers 0, 1, 2, ... seen as float32."""
    import torch

    return torch.arange(size // 4, dtype=torch.int32).view(torch.float32)


class _Owner:
    def __init__(self, secret: Secret) -> None:
        self._engine = Engine(secret=secret)
        self._held: dict[int, tuple[RDMABuffer, Any]] = {}

    def __call__(self, do: str, **arguments: Any) -> Any:
        return getattr(self, do)(**arguments)

    def make(self, memory: str, size: int, every: int) -> dict[str, Any]:
        tensor = numbers(size * every)
        if memory == "shared":
            tensor = share(tensor, engine=self._engine)
        part = tensor.view(-1, every, 256)[:, 0] if every > 1 else tensor
        buffer = RDMABuffer(part, engine=self._engine)
        id = max(self._held, default=0) + 1
        self._held[id] = buffer, tensor
        return {"id": id, "handle": buffer.to_bytes().decode(), "pid": os.getpid(), "address": tensor.data_ptr()}

    def drop(self, id: int) -> None:
        buffer, _ = self._held.pop(id)
        buffer.drop().get(60)

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--secret-fd", type=int, required=True)
    secret_fd = parser.parse_args().secret_fd
    answer_lines(lambda: _Owner(Secret.from_fd(secret_fd)))
