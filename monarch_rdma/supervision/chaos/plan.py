"""A plan of faults: pure data, made by hand or from a seed. The same seed makes the same plan, everywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from random import Random
from typing import Any, NamedTuple

from ...errors import ConfigError
from ..events import Event

__all__ = ["FAULTS", "HOST", "Fault", "Plan"]

HOST = "host:"  # before the name of a host's agent
_LONGEST = 3600.0  # seconds


class _Kind(NamedTuple):
    about: str
    lasts: bool = False
    has_peer: bool = False
    amount: tuple[float, float, float] | None = None  # default, least, most


FAULTS = {
    "kill": _Kind("the process is killed (SIGKILL)"),
    "stop": _Kind("the process is stopped (SIGSTOP), and goes on after `seconds`", lasts=True),
    "hold_gil": _Kind("a thread holds the interpreter's lock for `seconds`", lasts=True),
    "exhaust_memory": _Kind(
        "for `seconds` the process gets no more memory: `amount` bytes are taken, and more than that are not allowed",
        lasts=True,
        amount=(64 << 20, 1 << 20, 1 << 34),
    ),
    "abort_group": _Kind("the process group of torch.distributed is aborted"),
    "break_link": _Kind("the connection to another process ends", has_peer=True),
    "cut_link": _Kind(
        "nothing gets through to another process, nor from it, for `seconds`, and nobody is told",
        lasts=True,
        has_peer=True,
    ),
    "slow_link": _Kind(
        "for `seconds` the process reads `amount` bytes a second from another one",
        lasts=True,
        has_peer=True,
        amount=(1 << 20, 1, 1 << 40),
    ),
    "corrupt_frame": _Kind(
        "the next frame from another process comes with a damaged head, in way `amount`: 0, 1 or 2",
        has_peer=True,
        amount=(0, 0, 2),
    ),
}


@dataclass(frozen=True)
class Fault:
    """What happens to whom, and when.

    `at`: seconds after the plan's start. `moment`: instead, when the process says `moment(name)`. `target`, and for
    faults of links `peer`: names of processes, such as "trainers/3"; "*" and "?" stand for anything. "host:node1:4711"
    is the agent of another host; as a target only a pattern that begins with "host:" means any. Among those that match
    when it is time, `pick` and `peer_pick`, from 0 to below 1, choose one.
    """

    kind: str
    at: float = 0.0
    target: str = "*"
    pick: float = 0.0
    seconds: float = 0.0
    amount: float | None = None
    peer: str = "*"
    peer_pick: float = 0.0
    moment: str = ""

    def __post_init__(self) -> None:
        kind = FAULTS.get(self.kind)
        if kind is None:
            raise ConfigError(f"kind is {self.kind!r}, but must be one of {', '.join(FAULTS)}")
        self._check("at", self.at, 0, math.inf)
        self._check("pick", self.pick, 0, 1)
        self._check("peer_pick", self.peer_pick, 0, 1)
        self._check("seconds", self.seconds, 0, _LONGEST)
        if kind.lasts and self.seconds <= 0:
            raise ConfigError(f"seconds is {self.seconds!r}, but {self.kind} must last some time")
        if kind.amount is None:
            if self.amount is not None:
                raise ConfigError(f"amount is {self.amount!r}, but {self.kind} has none")
        elif self.amount is None:
            object.__setattr__(self, "amount", kind.amount[0])
        else:
            self._check("amount", self.amount, *kind.amount[1:], includes_most=True)
        for name in ("target", "peer", "moment"):
            if not isinstance(getattr(self, name), str) or not (getattr(self, name) or name == "moment"):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but must be a name")

    def _check(self, name: str, value: object, least: float, most: float, includes_most: bool = False) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (least <= value < most or (includes_most and value == most)):  # type: ignore[operator]
            end = "to" if includes_most else "to below"
            raise ConfigError(f"{name} is {value!r}, but must be a number from {least:g} {end} {most:g}")

    @property
    def has_peer(self) -> bool:
        return FAULTS[self.kind].has_peer

    def choose_target(self, names: Iterable[str]) -> str | None:
        """Which of these processes it happens to; None where none matches."""
        is_host = self.target.startswith(HOST)
        return _choose(self.target, self.pick, (name for name in names if name.startswith(HOST) == is_host))

    def choose_peer(self, names: Iterable[str], target: str) -> str | None:
        return _choose(self.peer, self.peer_pick, (name for name in names if name != target))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Fault:
        """ConfigError for what is no fault."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"a fault is {given!r:.200}, but must be an object with a kind")
        known = {field.name for field in fields(cls)}
        if unknown := set(given) - known:
            raise ConfigError(f"a fault has no {min(unknown)!r}; it has {', '.join(sorted(known))}")
        if "kind" not in given:
            raise ConfigError(f"a fault has no kind: {dict(given)!r:.200}")
        return cls(**given)

    def describe(self) -> str:
        """In a line, for people."""
        when = f"at moment {self.moment!r}" if self.moment else f"after {self.at:.3f} s"
        text = f"{when}: {self.kind} {self.target}"
        text += f" and {self.peer}" if self.has_peer else ""
        text += f" for {self.seconds:g} s" if FAULTS[self.kind].lasts else ""
        return text + (f", {self.amount:g}" if self.amount is not None else "")


def _choose(pattern: str, pick: float, names: Iterable[str]) -> str | None:
    matching = sorted(name for name in names if fnmatchcase(name, pattern))
    return matching[int(pick * len(matching))] if matching else None


@dataclass(frozen=True)
class Plan:
    """Faults in the order of their times. `seed`: what it was made from, or None."""

    faults: tuple[Fault, ...]
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", tuple(sorted(self.faults, key=lambda fault: fault.at)))

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        duration: float,
        rate: float = 1.0,
        kinds: Sequence[str] | Mapping[str, float] = ("kill",),
        target: str = "*",
        peer: str = "*",
        seconds: tuple[float, float] = (0.1, 1.0),
    ) -> Plan:
        """Faults at random times within `duration` seconds, `rate` a second on average, each independent of the others.

        `kinds`: which, all as often; a mapping says how often each, in relation to the others. `seconds`: the least and
        the most that those last which last. A longer plan of the same seed begins with the shorter one.
        """
        weights = dict(kinds) if isinstance(kinds, Mapping) else dict.fromkeys(kinds, 1.0)
        if not weights or not all(isinstance(weight, int | float) and weight > 0 for weight in weights.values()):
            raise ConfigError(f"kinds is {kinds!r}, but must name kinds of faults, with numbers above 0")
        if not 0 < rate < math.inf or not 0 <= duration < math.inf:
            raise ConfigError(f"rate is {rate!r} and duration {duration!r}, but must be numbers above 0")
        lasting = {kind for kind in weights if _known(kind).lasts}
        least, most = seconds
        rng, at, faults = Random(seed), 0.0, list[Fault]()
        while True:
            at += rng.expovariate(rate)
            (kind,) = rng.choices(list(weights), list(weights.values()))
            pick, peer_pick, long, way = (rng.random() for _ in range(4))
            if at >= duration:
                return cls(tuple(faults), seed)
            lasts = least + long * (most - least) if kind in lasting else 0.0
            amount = float(int(way * 3)) if kind == "corrupt_frame" else None
            faults.append(Fault(kind, at, target, pick, lasts, amount, peer, peer_pick))

    @classmethod
    def of_events(cls, events: Iterable[Event]) -> Plan:
        """What was injected, as a log of events tells: to do the same again, to the same processes."""
        events = list(events)
        failed = {event.cause for event in events if event.kind == "fault.failed"}
        injected = [event for event in events if event.kind == "fault.injected" and event.id not in failed]
        faults = []
        for event in injected:
            fault = Fault.from_dict(event.fields["fault"])
            faults.append(
                replace(fault, target=event.fields["target"], pick=0.0, peer=event.fields["peer"] or "*", peer_pick=0.0)
            )
        return cls(tuple(faults))

    def to_json(self) -> str:
        return json.dumps({"seed": self.seed, "faults": [asdict(fault) for fault in self.faults]}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """ConfigError where it is no plan."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"a plan is not JSON: {error}") from error
        if not isinstance(given, dict) or not isinstance(given.get("faults"), list):
            raise ConfigError('a plan must be an object with a list "faults"')
        return cls(tuple(map(Fault.from_dict, given["faults"])), given.get("seed"))


def _known(kind: str) -> _Kind:
    if kind not in FAULTS:
        raise ConfigError(f"kind is {kind!r}, but must be one of {', '.join(FAULTS)}")
    return FAULTS[kind]
