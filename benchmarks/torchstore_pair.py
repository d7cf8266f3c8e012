"""What bench_sharding.py's two readers do, by TorchStore: four processes put FSDP shards, two get halves of tensors.

It reads the tensors' shapes and sharded dimensions as JSON, and writes the bytes and seconds of each round. It needs
`pip install --no-deps torchstore torchmonarch` and what these need. With torchmonarch 0.7 all endpoints of
torchstore/controller.py have to be `async def`: that Monarch refuses to mix them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torchstore
from monarch.actor import Actor, current_rank, endpoint, this_host
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchstore.transport.pipe import TensorSlice

Shapes = dict[str, tuple[list[int], int | None]]


class Trainer(Actor):
    def __init__(self, port: int, shapes: Shapes) -> None:
        rank = current_rank().rank
        torch.set_num_threads(1)
        os.environ["LOCAL_RANK"] = str(rank)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        mesh = init_device_mesh("cpu", (4,))
        self.state = {
            name: DTensor.from_local(torch.ones(shape[0] // 4, *shape[1:], dtype=torch.bfloat16), mesh, [Shard(0)])
            for name, (shape, _) in shapes.items()
        }

    @endpoint
    async def put(self) -> None:
        await torchstore.put_state_dict(self.state, "model")


class Generator(Actor):
    def __init__(self, shapes: Shapes) -> None:
        rank = current_rank().rank
        torch.set_num_threads(1)
        self.parts: dict[str, tuple[torch.Tensor, Any]] = {}
        for name, (shape, dim) in shapes.items():
            local, offsets = list(shape), [0] * len(shape)
            if dim is not None:
                local[dim] //= 2
                offsets[dim] = rank * local[dim]
            part = TensorSlice(
                offsets=tuple(offsets),
                coordinates=(rank,),
                global_shape=tuple(shape),
                local_shape=tuple(local),
                mesh_shape=(2,),
            )
            self.parts[name] = torch.ones(local, dtype=torch.bfloat16), part

    @endpoint
    async def get(self) -> tuple[int, float]:
        begin = time.perf_counter()
        for name, (into, part) in self.parts.items():
            await torchstore.get(f"model/{name}", into, part)
        return sum(into.nbytes for into, _ in self.parts.values()), time.perf_counter() - begin


async def main() -> None:
    shapes: Shapes = json.load(sys.stdin)
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    await torchstore.initialize()
    trainers = this_host().spawn_procs(per_host={"dp": 4}).spawn("trainers", Trainer, rendezvous.port, shapes)
    generators = this_host().spawn_procs(per_host={"tp": 2}).spawn("generators", Generator, shapes)
    await trainers.put.call()
    total, seconds = 0, []
    for number in range(int(sys.argv[1]) + 1):
        got = [value for _, value in await generators.get.call()]
        total = sum(size for size, _ in got)
        if number:  # the first one warms up
            seconds.append(max(spent for _, spent in got))
    await torchstore.shutdown()
    print(json.dumps([total, seconds]), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
