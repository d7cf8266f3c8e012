"""A reinforcement-learning-shaped loop: generators produce, a buffer collects, a trainer learns, weights are fetched.

The client is an asyncio program.

    python generator_trainer.py [package root: monarch | monarch_rdma]
"""

import asyncio
import importlib
import os
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
ROOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PACKAGE_ROOT", "monarch_rdma")
actor = importlib.import_module(ROOT + ".actor")
rdma = importlib.import_module(ROOT + ".rdma")
Actor, endpoint, current_rank, this_host = actor.Actor, actor.endpoint, actor.current_rank, actor.this_host


def raw(tensor):
    return tensor.view(torch.uint8).flatten()


class ReplayBuffer(Actor):
    def __init__(self):
        self.items, self.arrived = [], asyncio.Event()

    @actor.concurrent_endpoint
    async def take(self, n: int) -> list:
        while len(self.items) < n:
            self.arrived.clear()
            await self.arrived.wait()
        taken, self.items = self.items[:n], self.items[n:]
        return taken

    @endpoint
    async def put(self, item) -> None:
        self.items.append(item)
        self.arrived.set()


class Trainer(Actor):
    def __init__(self, buffer, batch: int):
        torch.manual_seed(0)
        self.buffer, self.batch = buffer, batch
        self.model = torch.nn.Linear(8, 1, bias=False)
        self.model.weight.data.fill_(0.25)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.version = 0

    @endpoint
    async def weights(self):
        if not hasattr(self, "handle"):
            self.handle = rdma.RDMABuffer(raw(self.model.weight.data))
        return self.version, self.handle

    @endpoint
    async def train(self) -> float:
        batch = sorted(await self.buffer.take.call_one(self.batch), key=lambda item: item[0])
        x = torch.stack([item[1] for item in batch])
        loss = (self.model(x).squeeze(1) - x.sum(1)).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.version += 1
        return loss.item()


class Generator(Actor):
    def __init__(self, buffer, trainer):
        self.buffer, self.trainer, self.weight = buffer, trainer, torch.zeros(1, 8)
        self.version = -1

    @endpoint
    async def sync(self) -> tuple:
        self.version, handle = await self.trainer.weights.call_one()
        await handle.read_into(raw(self.weight))
        return self.version, round(float(self.weight.sum()), 4)

    @endpoint
    async def generate(self, step: int) -> int:
        rank = current_rank().rank
        x = torch.linspace(-1, 1, 8) * (rank + 1) + step * 0.1
        await self.buffer.put.call_one((rank, x))
        return self.version


async def main() -> None:
    host = this_host()
    buffer = host.spawn_procs().spawn("buffer", ReplayBuffer)
    trainer = host.spawn_procs().spawn("trainer", Trainer, buffer, 2)
    generators = host.spawn_procs({"g": 2}).spawn("generators", Generator, buffer, trainer)
    print((await generators.sync.call()).values())
    for step in range(5):
        training = trainer.train.call_one()
        versions = await generators.generate.call(step)
        loss = await training
        synced = await generators.sync.call()
        print(step, list(versions.values()), round(loss, 4), list(synced.values()))
    both = await asyncio.gather(*[generators.slice(g=i).sync.call_one() for i in range(2)])
    print(both[0] == both[1])


if __name__ == "__main__":
    asyncio.run(main())
