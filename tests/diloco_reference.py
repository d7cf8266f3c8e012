"""Semi-synchronous training worked out by one process in plain torch, and the small training that tests do with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from monarch_rdma.collectives import Group
from monarch_rdma.rdma import Engine, Secret


class Trainer:
    """A few layers, AdamW, and random data that is a function of the shard and the step."""

    def __init__(self, shard: int) -> None:
        self.model = nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, 2))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(std=0.3, generator=generator)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.shard = shard
        self.steps = 0

    def step(self) -> None:
        data = torch.randn(16, 5, generator=torch.Generator().manual_seed(1000 * self.shard + self.steps))
        loss = (self.model(data) - data[:, :2].sin()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]

    def fragments(self) -> list[nn.Module]:
        return [module for module in self.model if isinstance(module, nn.Linear)]


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def parameters_of(fragment: nn.Module | Sequence[nn.Module]) -> list[nn.Parameter]:
    return list(fragment.parameters())


Mean = Callable[[list[Tensor]], Tensor]


def mean(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total / len(tensors)


class Reference:
    """All members in one process. `present` says who takes part in a round, by its number from 0."""

    def __init__(
        self,
        trainers: dict[int, Trainer],
        fragments: Callable[[Trainer], list[nn.Module]],
        *,
        every: int,
        delay: int = 0,
        mix: float = 0.0,
        quantize: Callable[[Tensor, Tensor], Tensor] | None = None,
        is_local_sgd: bool = False,
    ) -> None:
        self.trainers = trainers
        self.fragments = fragments
        first = next(iter(trainers.values()))
        self.shared = [[nn.Parameter(p.detach().clone()) for p in each.parameters()] for each in fragments(first)]
        self.outer = [torch.optim.SGD(each, lr=0.7, momentum=0.9, nesterov=True) for each in self.shared]
        self.interval, self.delay, self.mix = every // len(self.shared), delay, mix
        self.quantize, self.is_local_sgd = quantize, is_local_sgd
        self.lost: dict[tuple[int, int], list[Tensor]] = {}
        self.rounds = 0
        self.steps = 0
        self.pending: tuple[int, int, list[Tensor]] | None = None

    def run(self, steps: int, present: Callable[[int], Sequence[int]] | None = None) -> None:
        for _ in range(steps):
            self.steps += 1
            for trainer in self.trainers.values():
                trainer.step()
            if self.steps % self.interval == 0:
                names = sorted(self.trainers if present is None else present(self.rounds))
                number = (self.steps // self.interval - 1) % len(self.shared)
                self.pending = self.steps + self.delay, number, self._means(number, names)
                self.rounds += 1
            if self.pending is not None and self.pending[0] == self.steps:
                self._apply(self.pending[1], self.pending[2])

    def _means(self, number: int, names: Sequence[int]) -> list[Tensor]:
        given = []
        for name in names:
            local = [p.detach().clone() for p in self.fragments(self.trainers[name])[number].parameters()]
            shared = [p.detach() for p in self.shared[number]]
            given.append(local if self.is_local_sgd else [s - p for s, p in zip(shared, local, strict=True)])
        if self.quantize is None:
            return [mean([each[i] for each in given]) for i in range(len(given[0]))]
        received = []
        for name, tensors in zip(names, given, strict=True):
            whole = torch.cat([tensor.flatten() for tensor in tensors])
            lost = self.lost.setdefault((name, number), [torch.zeros_like(whole)])
            received.append(self.quantize(whole, lost[0]))
        whole = mean(received).to(torch.bfloat16).float()
        return [t.view_as(like) for t, like in zip(whole.split([t.numel() for t in given[0]]), given[0], strict=True)]

    def _apply(self, number: int, means: list[Tensor]) -> None:
        for parameter, value in zip(self.shared[number], means, strict=True):
            if self.is_local_sgd:
                parameter.data.copy_(value)
            parameter.grad = value
        if not self.is_local_sgd:
            self.outer[number].step()
        for trainer in self.trainers.values():
            local = self.fragments(trainer)[number].parameters()
            for parameter, shared in zip(local, self.shared[number], strict=True):
                kept = parameter.data * self.mix
                parameter.data = torch.add(kept, shared.data, alpha=1 - self.mix) if self.mix else shared.data.clone()


def in_threads(count: int, run: Callable[[int, Group], Any], *, order: Sequence[int] | None = None) -> list[Any]:
    """run(member, group) for members 0 to count-1, each with an engine of its own. `order`: which rank each has."""
    secret = Secret.generate()
    order = range(count) if order is None else order
    engines = [Engine(secret=secret, name=f"member{member}") for member in range(count)]
    addresses = [engines[order.index(rank)].address for rank in range(count)]

    def member(number: int) -> Any:
        torch.set_num_threads(1)  # of this thread
        return run(number, Group.form(addresses, engine=engines[number], timeout=60))

    try:
        with ThreadPoolExecutor(count) as pool:
            return [future.result(100) for future in [pool.submit(member, number) for number in range(count)]]
    finally:
        for engine in engines:
            engine.close()
