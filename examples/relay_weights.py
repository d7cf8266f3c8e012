"""Reinforcement learning with many generators: a trainer's new weights reach all of them, and it sends them only once.

Generators pass the weights on to each other in a tree, piece by piece while they arrive.

python examples/relay_weights.py
"""

from __future__ import annotations

import sys

import torch

from monarch_rdma.actor import Actor, ValueMesh, current_rank, endpoint, this_host
from monarch_rdma.sharding import NameDirectory, NameServer, Relay, publish

GENERATORS, STEPS = 4, 60
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # states, actions, rewards


def make_policy() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))


class Trainer(Actor):
    def __init__(self, names: NameDirectory) -> None:
        torch.manual_seed(0)
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)
        self.weights = publish(self.policy, "policy", directory=names, memory="shared")

    @endpoint
    def train(self, version: int, batches: ValueMesh[Batch]) -> float:
        states, actions, rewards = (torch.cat(parts) for parts in zip(*batches.values(), strict=True))
        log_p = self.policy(states).log_softmax(1)[torch.arange(len(actions)), actions]
        self.optimizer.zero_grad()
        (-log_p * (rewards - rewards.mean())).mean().backward()
        with self.weights.update(version):
            self.optimizer.step()
        return rewards.mean().item()


class Generator(Actor):
    def __init__(self, names: NameDirectory) -> None:
        rank = current_rank().rank
        torch.manual_seed(1 + rank)
        self.policy = make_policy()
        self.relay = Relay("policy", self.policy, directory=names, rank=rank, ranks=GENERATORS, memory="shared")
        self.from_trainer = 0

    @endpoint
    def generate(self, version: int) -> Batch:
        report = self.relay.fetch(version=version)
        self.from_trainer += report.bytes if report.source is None else 0
        with torch.no_grad():
            states = torch.randn(128, 4)
            actions = torch.multinomial(self.policy(states).softmax(1), 1).squeeze(1)
        return states, actions, (actions == states.argmax(1)).float()  # 1 for naming the largest of four numbers

    @endpoint
    def bytes_from_trainer(self) -> int:
        return self.from_trainer


def main() -> int:
    host = this_host()
    with host.spawn_procs(threads=1) as one, host.spawn_procs({"n": GENERATORS}, threads=1) as many:
        with NameServer() as server:
            trainer = one.spawn("trainer", Trainer, server.directory)
            generators = many.spawn("generators", Generator, server.directory)
            batches, rewards = generators.generate.call(0).get(), []
            for version in range(1, STEPS + 1):
                training = trainer.train.call_one(version, batches)
                batches = generators.generate.call(version).get()  # waits for that version
                rewards.append(training.get())
            sent = generators.bytes_from_trainer.call().get().values()
    size = sum(parameter.nbytes for parameter in make_policy().parameters())
    print(f"the mean reward rose from {rewards[0]:.2f} to {rewards[-1]:.2f}")
    print(
        f"{GENERATORS} generators took {sum(sent) / size:.0f} x {size} bytes from the trainer for {STEPS + 1} versions"
    )
    return int(rewards[-1] < 0.8)


if __name__ == "__main__":
    sys.exit(main())
