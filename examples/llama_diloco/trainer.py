"""The plain trainer: a model, AdamW, a schedule and data, one step at a time. It knows nothing of other processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .llama import Llama, LlamaConfig
from .text import Batches, Text


@dataclass(frozen=True)
class TrainerConfig:
    model: LlamaConfig = field(default_factory=LlamaConfig)
    seed: int = 0
    steps: int = 400  # of the schedule; training may go on after them
    warmup_steps: int = 20
    learning_rate: float = 2e-3
    final_learning_rate: float = 2e-4
    weight_decay: float = 0.1
    clip: float = 1.0  # the largest norm of all gradients together
    batch: int = 8  # passages a step


class Trainer:
    """One of possibly many: all of them with the same config, and each with a `shard` of its own.

    All its state is in `state_dict()`: weights, optimiser, schedule, position in the data, steps done. That of another
    shard continues here with the same weights and this shard's own passages.
    """

    def __init__(self, config: TrainerConfig | None = None, *, shard: int = 0, text: Text | None = None) -> None:
        self.config = config = config or TrainerConfig()
        text = text or Text.of_python()
        length = config.model.context
        self.model = Llama(config.model, seed=config.seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._share_of_learning_rate)
        self.batches = Batches(text.training, size=config.batch, length=length, seed=config.seed, shard=shard)
        self._held_out = Batches(text.held_out, size=16, length=length, seed=config.seed)
        self.steps = 0
        self._begin_optimizer()

    def step(self, average: Callable[[Sequence[Tensor]], None] | None = None) -> float:
        """One step on the next batch; returns its loss in nats. `average`: makes the gradients the same on all trainers
        of a replica, in place.
        """
        loss: Tensor = self.model.loss(*self.batches.next())
        self.optimizer.zero_grad()
        loss.backward()
        if average is not None:
            average([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None])
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.schedule.step()
        self.steps += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches: int = 4) -> float:
        """The loss on text that is not trained on: the same passages every time."""
        self._held_out.position = 0
        return sum(self.model.loss(*self._held_out.next()).item() for _ in range(batches)) / batches

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "batches": self.batches.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.batches.load_state_dict(state["batches"])
        self.steps = int(state["steps"])

    def _share_of_learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to the final rate, which stays."""
        config = self.config
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
        least = config.final_learning_rate / config.learning_rate
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))

    def _begin_optimizer(self) -> None:
        """AdamW makes its moments at its first step. Here they are there from the start, so that a state has the same
        tensors at all times.
        """
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
