"""What a training tells whoever watches it: plain values, sent through a port. Times are of time.time()."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Decided", "Healed", "Measured", "Report", "Stepped", "Synchronised", "TrainersStarted"]


@dataclass(frozen=True)
class Report:
    at: float
    replica: int


@dataclass(frozen=True)
class TrainersStarted(Report):
    """The replica's trainers are there. `life`: counts those of this replica."""

    life: int


@dataclass(frozen=True)
class Healed(Report):
    """State was read from peers. `seconds`: that it took. `rounds`: synchronisations that are in it. `verified`:
    of its `bytes`, those whose checksums were compared.
    """

    life: int
    rounds: int
    seconds: float
    bytes: int
    peers: int
    verified: int


@dataclass(frozen=True)
class Stepped(Report):
    """`step`: within the round, from 1."""

    life: int
    rounds: int
    step: int
    loss: float


@dataclass(frozen=True)
class Synchronised(Report):
    """`members`: replicas that took part; `contributed`: steps of each in this round. `total`: steps of all so far.
    `spans`: steps that were in what each brought in, by which it was weighed.
    """

    life: int
    rounds: int
    members: tuple[int, ...]
    contributed: tuple[int, ...]
    total: int
    seconds: float
    spans: tuple[int, ...] = ()


@dataclass(frozen=True)
class Measured(Report):
    """Something that a recipe has measured: `cohort.tell_measured(name, value)`."""

    life: int
    rounds: int
    name: str
    value: float


@dataclass(frozen=True)
class Decided(Report):
    """What is done about a failure: "trainers", "replica", "allocation" are started again, or it is "given up"."""

    what: str
    delay: float
    reason: str
