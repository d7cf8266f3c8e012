"""Reinforcement learning in small: generators act with a policy, a trainer improves it, its weights are synchronised.

The trainer learns from one batch while the generators make the next one.

python examples/weight_sync.py
"""

from __future__ import annotations

import sys

import torch

from monarch_rdma.actor import Actor, ActorMesh, ValueMesh, current_rank, endpoint, this_host
from monarch_rdma.rdma import RDMABuffer, share_

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # states, actions, rewards


def make_policy() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


class Trainer(Actor):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = share_(make_policy())  # in place: the optimizer goes on changing what the generators read
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)
        self.buffers = {name: RDMABuffer(t, access="read") for name, t in self.policy.state_dict().items()}

    @endpoint
    def weights(self) -> dict[str, RDMABuffer]:
        return self.buffers

    @endpoint
    def train(self, batches: ValueMesh[Batch]) -> float:
        states, actions, rewards = (torch.cat(parts) for parts in zip(*batches.values(), strict=True))
        log_p = self.policy(states).log_softmax(1)[torch.arange(len(actions)), actions]
        self.optimizer.zero_grad()
        (-log_p * (rewards - rewards.mean())).mean().backward()
        self.optimizer.step()
        return rewards.mean().item()


class Generator(Actor):
    def __init__(self, trainer: ActorMesh[Trainer]) -> None:
        self.policy = make_policy()
        self.remote = trainer.weights.call_one().get()
        torch.manual_seed(1 + current_rank().rank)

    @endpoint
    def generate(self) -> Batch:
        mine = self.policy.state_dict()
        for read in [self.remote[name].read_into(mine[name]) for name in mine]:  # all at once, out of the trainer
            read.get()
        with torch.no_grad():
            states = torch.randn(256, 4)
            actions = torch.multinomial(self.policy(states).softmax(1), 1).squeeze(1)
        return states, actions, (actions == states.argmax(1)).float()  # 1 for naming the largest of four numbers


def main() -> int:
    host = this_host()
    with host.spawn_procs(threads=1) as one, host.spawn_procs({"generators": 2}, threads=1) as many:
        trainer = one.spawn("trainer", Trainer)
        generators = many.spawn("generators", Generator, trainer)
        rewards = []
        batches = generators.generate.call().get()
        for _ in range(100):
            training = trainer.train.call_one(batches)
            batches = generators.generate.call().get()
            rewards.append(training.get())
    print(f"the mean reward rose from {rewards[0]:.2f} to {rewards[-1]:.2f}")
    return int(rewards[-1] < 0.8)


if __name__ == "__main__":
    sys.exit(main())
