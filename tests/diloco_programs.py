"""What members of a semi-synchronous training run in tests, and how they die in the middle of a round."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from diloco_reference import Trainer, flat
from torch import Tensor

from monarch_rdma.collectives import Group
from monarch_rdma.ft import DiLoCo, GroupCohort
from monarch_rdma.ft.exchange import GroupExchange

__all__ = ["Group", "kill_myself_in", "train"]

torch.set_num_threads(1)


def kill_myself_in(round: int, call: str, which: int, is_before: bool) -> None:
    """Before or after the which-th `call` ("all_to_all", "all_gather") of this round. A round has one all_to_all and
    three all_gathers: of what members are about, of means, and of having them.
    """
    calls: dict[str, int] = {}
    usual = getattr(GroupExchange, call)
    at = round * {"all_to_all": 1, "all_gather": 3}[call] + which

    def deadly(self: GroupExchange, tensor: Tensor) -> Tensor:
        number = calls[call] = calls.get(call, -1) + 1
        if number == at and is_before:
            os.kill(os.getpid(), signal.SIGKILL)
        result: Tensor = usual(self, tensor)
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(GroupExchange, call, deadly)


def train(group: Group, names: list[int], steps: int, kill_at: int | None = None, **options: Any) -> Any:
    """Returns the weights, and who took part in each round. `kill_at`: the step before which it kills itself."""
    trainer = Trainer(names[group.rank])
    members = []
    with DiLoCo(trainer.model, GroupCohort(group, names), **options) as diloco:
        for step in range(steps):
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step()
            if round := diloco.step():
                members.append(round.members)
    return flat(trainer.model), members
