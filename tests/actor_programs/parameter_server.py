"""Workers push gradients into and pull weights from a server's memory by one-sided transfers; the server only counts.

python parameter_server.py [package root: monarch | monarch_rdma]
"""

import importlib
import os
import sys
import warnings

import torch

warnings.filterwarnings("ignore")  # fallbacks of the transport are not this program's business
ROOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PACKAGE_ROOT", "monarch_rdma")
actor = importlib.import_module(ROOT + ".actor")
rdma = importlib.import_module(ROOT + ".rdma")
Actor, endpoint, current_rank, this_host = actor.Actor, actor.endpoint, actor.current_rank, actor.this_host
N, WORKERS, STEPS = 1 << 16, 3, 4


def raw(tensor):
    return tensor.view(torch.uint8).flatten()


class ParameterServer(Actor):
    def __init__(self, workers: int):
        self.weights = torch.arange(N, dtype=torch.float32)
        self.gradients = [torch.zeros(N) for _ in range(workers)]
        self.version = 0

    @endpoint
    async def handles(self, rank: int):
        if not hasattr(self, "weight_buffer"):
            self.weight_buffer = rdma.RDMABuffer(raw(self.weights))
            self.gradient_buffers = [rdma.RDMABuffer(raw(g)) for g in self.gradients]
        return self.weight_buffer, self.gradient_buffers[rank]

    @endpoint
    async def step(self) -> int:
        for gradient in self.gradients:
            self.weights.sub_(gradient, alpha=0.5)
        self.version += 1
        return self.version

    @endpoint
    async def total(self) -> float:
        return float(self.weights.double().sum())


class Worker(Actor):
    def __init__(self, server):
        self.server = server
        self.rank = current_rank().rank
        self.weights = torch.zeros(N)
        self.gradient = torch.zeros(N)

    @endpoint
    async def open(self) -> int:
        self.weight_buffer, self.gradient_buffer = await self.server.handles.call_one(self.rank)
        return self.weight_buffer.size()

    @endpoint
    async def work(self, step: int) -> float:
        await self.weight_buffer.read_into(raw(self.weights))
        self.gradient.fill_(float((self.rank + 1) * (step + 1)))
        await self.gradient_buffer.write_from(raw(self.gradient))
        return float(self.weights[7])


def main() -> None:
    server = this_host().spawn_procs().spawn("server", ParameterServer, WORKERS)
    workers = this_host().spawn_procs({"workers": WORKERS}).spawn("worker", Worker, server)
    print([size for size in workers.open.call().get().values()])
    for step in range(STEPS):
        print(step, workers.work.call(step).get().values(), server.step.call_one().get())
    print(server.total.call_one().get())


if __name__ == "__main__":
    main()
