"""Weights of an FSDP trainer, read by tensor-parallel generators after each step: only what each of them needs moves.

Two trainers shard the model with FSDP2 and change it in place. Two generators have half of each layer, in another way.

python examples/reshard_weights.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from monarch_rdma.actor import Actor, current_rank, endpoint, this_host
from monarch_rdma.sharding import Layout, Mesh, Reader, Shard, publish
from monarch_rdma.sharding.offer import Offer

STEPS = 20


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))


class Trainer(Actor):
    def __init__(self, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=current_rank().rank, world_size=2)
        self.model = make_model()
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.weights = publish(self.model, "policy", memory="shared")

    @endpoint
    def offer(self) -> Offer:
        return self.weights.offer

    @endpoint
    def train(self, version: int) -> float:
        torch.manual_seed(version)
        states = torch.randn(128, 64)
        loss = torch.nn.functional.mse_loss(self.model(states), states[:, :8])
        loss.backward()
        with self.weights.update(version):  # readers wait, or read again
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @endpoint
    def whole(self) -> dict[str, torch.Tensor]:
        return {name: tensor.full_tensor() for name, tensor in self.model.state_dict().items()}


class Generator(Actor):
    """Has rows of the first layer and columns of the second one."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        rank, mesh = current_rank().rank, Mesh({"tp": 2})
        layouts = {
            "0.weight": Layout((256, 64), mesh, [Shard(0)]),
            "0.bias": Layout((256,), mesh, [Shard(0)]),
            "2.weight": Layout((8, 256), mesh, [Shard(1)]),
        }
        self.part = {name: torch.zeros(layout.part(rank).shape) for name, layout in layouts.items()}
        self.part["2.bias"] = torch.zeros(8)
        self.reader = Reader(offers, self.part, layouts=layouts, rank=rank, ranks=2)

    @endpoint
    def sync(self, newer_than: int) -> tuple[int | None, int]:
        report = self.reader.fetch(newer_than=newer_than)
        return report.version, report.bytes

    @endpoint
    def weights(self) -> dict[str, torch.Tensor]:
        return self.part


def main() -> int:
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    host = this_host()
    with host.spawn_procs({"dp": 2}, threads=1) as some, host.spawn_procs({"tp": 2}, threads=1) as others:
        trainers = some.spawn("trainers", Trainer, rendezvous.port)
        generators = others.spawn("generators", Generator, trainers.offer.call().get().values())
        losses = []
        for version in range(1, STEPS + 1):
            losses.append(trainers.train.call(version).get().values()[0])
            synced = generators.sync.call(newer_than=version - 1).get().values()
        (_, moved), _ = synced
        print(f"the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}")
        total = sum(parameter.nbytes for parameter in make_model().parameters())
        print(f"generators have version {synced[0][0]}; each read {moved} of {total} bytes")
        whole = trainers.whole.call().get().values()[0]
        first, second = generators.weights.call().get().values()
        rows = torch.cat([first["0.weight"], second["0.weight"]])
        columns = torch.cat([first["2.weight"], second["2.weight"]], dim=1)
        is_same = torch.equal(rows, whole["0.weight"]) and torch.equal(columns, whole["2.weight"])
        print("and they are the trainers' weights" if is_same else "but they differ from the trainers' weights")
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
