"""Faults for a training, from a seed: which, to whom, and when."""

from __future__ import annotations

from random import Random

from monarch_rdma.actor.chaos import Injected
from monarch_rdma.ft import Struck
from monarch_rdma.supervision.chaos import Fault

__all__ = ["KINDS", "faults", "struck_by"]

# Of processes called trainers<replica>/<rank> and replica<replica>/0, as a training names them.
KINDS = {
    "kill a trainer": ("kill", "trainers{replica}/{rank}"),
    "kill a replica": ("kill", "replica{replica}/0"),
    "stop a process": ("stop", "trainers{replica}/{rank}"),
    "abort a communicator": ("abort_group", "trainers{replica}/{rank}"),
    "cut a link": ("cut_link", "trainers{replica}/{rank}"),
}


def faults(seed: int, *, duration: float, every: float, replicas: int, trainers: int) -> list[tuple[str, Fault]]:
    """Names out of KINDS, each with its fault, `every` seconds on average. All kinds come as often."""
    chance, at, planned = Random(seed), 0.0, list[tuple[str, Fault]]()
    kinds: list[str] = []
    while (at := at + every * chance.uniform(0.6, 1.4)) < duration:
        if not kinds:
            kinds = chance.sample(list(KINDS), len(KINDS))
        name = kinds.pop()
        kind, target = KINDS[name]
        replica, rank = chance.randrange(replicas), chance.randrange(trainers)
        other = (replica + chance.randrange(1, replicas)) % replicas if replicas > 1 else replica
        seconds = chance.uniform(0.3, 1.2) if kind in ("stop", "cut_link") else 0.0
        where = target.format(replica=replica, rank=rank)
        peer = f"trainers{other}/{rank}" if kind == "cut_link" else "*"
        planned.append((name, Fault(kind, at, where, seconds=seconds, peer=peer)))
    return planned


def struck_by(name: str, injected: Injected, at: float) -> Struck | None:
    """What a history keeps of it; None where it could not be done, as the process was just not there."""
    if injected.problem:
        return None
    digits = "".join(character for character in injected.target.partition("/")[0] if character.isdigit())
    return Struck(at, int(digits), name, injected.target)
