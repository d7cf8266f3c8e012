"""Workers read weights from, and write gradients into, the memory of a server, whose Python takes no part in it.

python examples/parameter_server.py
"""

from __future__ import annotations

import sys

import torch

from monarch_rdma.actor import Actor, ActorMesh, current_rank, endpoint, this_host
from monarch_rdma.rdma import RDMABuffer, zeros

FEATURES, ROWS, WORKERS, STEPS = 64, 512, 3, 60


class Server(Actor):
    def __init__(self, workers: int) -> None:
        self.weights = zeros(FEATURES)  # shared memory: on one host, a read is one copy by the reader
        self.gradients = zeros(workers, FEATURES)
        self.buffers = RDMABuffer(self.weights, access="read"), RDMABuffer(self.gradients, access="write")

    @endpoint
    def handles(self) -> tuple[RDMABuffer, RDMABuffer]:
        return self.buffers  # a few hundred bytes: who may reach which memory

    @endpoint
    def step(self) -> None:
        self.weights -= 0.2 * self.gradients.mean(0)


class Worker(Actor):
    def __init__(self, server: ActorMesh[Server]) -> None:
        rank = current_rank().rank
        self.remote_weights, gradients = server.handles.call_one().get()
        self.remote_gradient = gradients[rank]  # our row; nobody is asked
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(ROWS, FEATURES, generator=generator)
        self.y = self.x @ torch.linspace(-1, 1, FEATURES)  # what the server's weights shall become
        self.weights = torch.empty(FEATURES)

    @endpoint
    def work(self) -> float:
        self.remote_weights.read_into(self.weights).get()
        error = self.x @ self.weights - self.y
        self.remote_gradient.write_from(self.x.T @ error / ROWS).get()  # returns when it is in the server's memory
        return float(error.square().mean())


def main() -> int:
    host = this_host()
    with host.spawn_procs() as one, host.spawn_procs({"workers": WORKERS}, threads=1) as many:
        server = one.spawn("server", Server, WORKERS)
        workers = many.spawn("workers", Worker, server)
        losses = []
        for _ in range(STEPS):
            losses.append(max(workers.work.call().get().values()))
            server.step.call_one().get()
    print(f"the loss fell from {losses[0]:.3f} to {losses[-1]:.6f} in {STEPS} steps of {WORKERS} workers")
    return int(losses[-1] > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
