"""When a child ends: which children are stopped and started, in which order, how soon, and when it is given up.

The rules are those of Erlang/OTP's supervisors, as a machine without threads, processes or a clock of its own: it is
told events and the time, and answers with decisions for somebody else to carry out. docs/supervision.md has examples.

Whoever carries them out keeps to this:
- A `Start` is answered for each child by `Started` or by `StartFailed`, and a child that was started by exactly one
  `Ended`, however it came about. A `Stop` and a `Kill` are answered by that same `Ended` (or `StartFailed`).
- `Tick` is passed in once the time is `wake_at`. Later, more often or for nothing does no harm.
- Each start of a child is another incarnation of it. Events of an older one, and repeated ones, change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Literal, NamedTuple, TypeAlias, get_args

from ..errors import ConfigError

__all__ = [
    "Add",
    "Backoff",
    "ChildSpec",
    "Decision",
    "Ended",
    "Escalate",
    "Event",
    "Failure",
    "Finish",
    "Forget",
    "Incarnation",
    "Kill",
    "Policy",
    "Remove",
    "Restart",
    "Restarting",
    "Start",
    "StartAsked",
    "StartFailed",
    "Started",
    "Stop",
    "StopAsked",
    "Strategy",
    "Supervisor",
    "Tick",
]

Restart: TypeAlias = Literal["never", "transient", "always"]
Strategy: TypeAlias = Literal["one_for_one", "rest_for_one", "one_for_all"]


# --- policies, as data ---------------------------------------------------------------------------------------------


def _check_word(name: str, value: object, words: Sequence[str]) -> None:
    if value not in words:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, words))}, not {value!r}")


def _check_number(name: str, value: object, least: float, most: float = math.inf, *, above: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most or (above and value == least):  # type: ignore[operator]
        limits = f"{'above' if above else 'at least'} {least:g}" + (f" and at most {most:g}" if most < math.inf else "")
        raise ConfigError(f"{name} must be a number {limits}, not {value!r}")


@dataclass(frozen=True)
class Backoff:
    """How long a child that keeps failing waits for its restart: `initial`, then `factor` times longer each time.

    Attributes:
        initial: seconds before the first restart; 0 restarts at once, always.
        factor: at least 1.
        maximum: seconds; no restart waits longer.
        jitter: share of the delay, 0 to 1, of which a random part is taken off, so that children that failed together
            do not come back together.
        reset_after: seconds; a child that was up this long is healthy again, and begins with `initial` next time.

    Raises:
        ConfigError: a value outside of these.
    """

    initial: float = 0.0
    factor: float = 2.0
    maximum: float = 30.0
    jitter: float = 0.0
    reset_after: float = 60.0

    def __post_init__(self) -> None:
        _check_number("initial", self.initial, 0)
        _check_number("factor", self.factor, 1)
        _check_number("maximum", self.maximum, self.initial)
        _check_number("jitter", self.jitter, 0, 1)
        _check_number("reset_after", self.reset_after, 0, above=True)

    def longest(self, attempt: int) -> float:
        """Seconds before the restart number `attempt` (from 1) in a row, before a random part is taken off."""
        if not self.initial:
            return 0.0
        try:
            return min(self.initial * float(self.factor) ** (attempt - 1), self.maximum)
        except OverflowError:
            return self.maximum

    def longest_in_all(self, attempts: int) -> float:
        """Seconds before the first `attempts` restarts in a row, all together."""
        total, previous = 0.0, -1.0
        for attempt in range(1, attempts + 1):
            delay = self.longest(attempt)
            if delay == previous:  # they grow no more
                return total + delay * (attempts - attempt + 1)
            total, previous = total + delay, delay
        return total

    def delay(self, attempt: int, rng: Random) -> float:
        return self.longest(attempt) * (1 - self.jitter * rng.random())


@dataclass(frozen=True)
class ChildSpec:
    """One child.

    Attributes:
        child: its name, the same in all of its incarnations.
        restart: "always"; "transient": after an abnormal end alone; "never": nor with others that are restarted.
        stop_timeout: seconds from a Stop to the Kill that follows where it has not ended; 0 kills at once, inf never.

    Raises:
        ConfigError: a value outside of these.
    """

    child: Hashable
    restart: Restart = "always"
    stop_timeout: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.child, Hashable):
            raise ConfigError(f"child must be hashable, which {self.child!r} is not")
        _check_word("restart", self.restart, get_args(Restart))
        if self.stop_timeout != math.inf:
            _check_number("stop_timeout", self.stop_timeout, 0)


@dataclass(frozen=True)
class Policy:
    """What one supervisor does about all of its children.

    Attributes:
        strategy: who is restarted with a child that is: nobody ("one_for_one"), those after it in the order of starts
            ("rest_for_one"), or all ("one_for_all").
        max_restarts: more restarts than this within `within` seconds escalate; 0 allows none, None any number.
        within: seconds.
        backoff: how long restarts wait.
        in_order: children start one after another, in their order, and stop in the reverse one; False: side by side.

    Raises:
        ConfigError: a value outside of these, or delays so long that a child that does nothing but fail would never be
            given up: no `max_restarts` + 1 failures would fall into `within` seconds.
    """

    strategy: Strategy = "one_for_one"
    max_restarts: int | None = 3
    within: float = 5.0
    backoff: Backoff = field(default=Backoff())
    in_order: bool = True

    def __post_init__(self) -> None:
        _check_word("strategy", self.strategy, get_args(Strategy))
        _check_number("within", self.within, 0, above=True)
        if not isinstance(self.backoff, Backoff):
            raise ConfigError(f"backoff must be a Backoff, not {self.backoff!r}")
        if self.max_restarts is None:
            return
        if not isinstance(self.max_restarts, int) or isinstance(self.max_restarts, bool) or self.max_restarts < 0:
            raise ConfigError(f"max_restarts must be an integer of at least 0, or None, not {self.max_restarts!r}")
        delays = self.backoff.longest_in_all(self.max_restarts)
        if delays > self.within:
            raise ConfigError(
                f"max_restarts={self.max_restarts} within={self.within:g} s would never be exceeded by a child that "
                f"does nothing but fail, because its restarts alone wait for {delays:g} s: give a longer within, a "
                "shorter back-off, or max_restarts=None to restart for ever"
            )


# --- events --------------------------------------------------------------------------------------------------------


class Incarnation(NamedTuple):
    """One life of a child: its first is number 1."""

    child: Hashable
    number: int


@dataclass(frozen=True)
class StartAsked:
    """Starts the children that the supervisor was made with."""


@dataclass(frozen=True)
class StopAsked:
    """Ends all children, the last one first, and with them the supervisor's work."""

    reason: str


@dataclass(frozen=True)
class Add:
    """Another child, the last one in the order. Where it does not start it is forgotten."""

    spec: ChildSpec


@dataclass(frozen=True)
class Remove:
    """Stops a child and forgets it. Nothing happens where there is no such child (any more)."""

    child: Hashable
    reason: str


@dataclass(frozen=True)
class Started:
    incarnation: Incarnation


@dataclass(frozen=True)
class StartFailed:
    """`occasion`: see Ended."""

    incarnation: Incarnation
    reason: str
    occasion: Hashable | None = None


@dataclass(frozen=True)
class Ended:
    """`normal`: it ended by itself and as it should (it returned, or was stopped and cleaned up); not by an exception,
    a signal, or an exit code other than 0. `occasion`: what it shares with others that ended because of the same thing,
    such as a host that was lost: all of these count as one restart.
    """

    incarnation: Incarnation
    normal: bool
    reason: str
    occasion: Hashable | None = None


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = StartAsked | StopAsked | Add | Remove | Started | StartFailed | Ended | Tick


# --- decisions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Start these, side by side."""

    incarnations: tuple[Incarnation, ...]


@dataclass(frozen=True)
class Stop:
    """Ask these to end and to clean up, side by side."""

    incarnations: tuple[Incarnation, ...]
    reason: str


@dataclass(frozen=True)
class Kill:
    """End these at once."""

    incarnations: tuple[Incarnation, ...]


@dataclass(frozen=True)
class Failure:
    child: Hashable
    reason: str
    at: float
    occasion: Hashable | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Restarting:
    """For the log: what comes next. `children` will start, in this order, after `delay` seconds at the earliest; those
    that still run are stopped first, in the reverse order. `attempt`: of the child that failed, in a row.
    """

    failure: Failure
    children: tuple[Hashable, ...]
    attempt: int
    delay: float


@dataclass(frozen=True)
class Forget:
    """This child is none of the supervisor's any more."""

    child: Hashable
    reason: str


@dataclass(frozen=True)
class Escalate:
    """The last decision: all children have ended, and it is for the owner now. `failures`: the ones that count."""

    reason: str
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class Finish:
    """The last decision: all children have ended, as StopAsked wanted."""

    reason: str


Decision: TypeAlias = Start | Stop | Kill | Restarting | Forget | Escalate | Finish


# --- the machine ---------------------------------------------------------------------------------------------------


class _State(Enum):
    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    KILLED = "killed"


class _Child:
    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.state = _State.DOWN
        self.number = 0  # of its newest incarnation
        self.up_since = 0.0
        self.kill_at = math.inf  # while it is STOPPING
        self.attempts = 0  # restarts in a row
        self.is_removed = False

    @property
    def name(self) -> Hashable:
        return self.spec.child

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.name, self.number)

    @property
    def runs(self) -> bool:
        return self.state in (_State.STARTING, _State.UP)


class _Round:
    """Children that are stopped, where they run, and started together. Each child is in one round at most."""

    def __init__(self, purpose: Literal["start", "add", "restart"], children: list[_Child], due: float) -> None:
        self.purpose = purpose
        self.children = children  # in the order of starts
        self.due = due
        self.is_starting = purpose != "restart"
        self.left = list(children) if self.is_starting else []  # to be started

    def release(self, children: Iterable[_Child]) -> None:
        gone = set(children)
        self.children = [child for child in self.children if child not in gone]
        self.left = [child for child in self.left if child not in gone]

    def is_due(self, now: float) -> bool:
        return self.is_starting or (self.is_down and now >= self.due)

    @property
    def is_down(self) -> bool:
        return all(child.state == _State.DOWN for child in self.children)

    @property
    def is_done(self) -> bool:
        return self.is_starting and not self.left and all(child.state != _State.STARTING for child in self.children)


class Supervisor:
    """Decides for the children of one owner. Not thread-safe.

    `rng` is where the jitter of delays comes from: a seeded one makes all decisions repeatable.

    Raises:
        ConfigError: two children of the same name.
    """

    def __init__(self, policy: Policy, children: Sequence[ChildSpec] = (), *, rng: Random) -> None:
        self.policy = policy
        self._rng = rng
        self._children: dict[Hashable, _Child] = {}  # in the order of starts
        self._rounds: list[_Round] = []
        self._failures: list[Failure] = []  # that needed a restart, within the last `within` seconds
        self._last: Escalate | Finish | None = None  # to be said when all have ended
        self._has_started = False
        self._is_over = False
        self._now = -math.inf
        self._decisions: list[Decision] = []
        for spec in children:
            self._register(spec)

    @property
    def wake_at(self) -> float | None:
        """When a Tick would change something, on the clock of `handle`'s `now`; None while nothing is awaited."""
        times = [child.kill_at for child in self._children.values() if child.state == _State.STOPPING]
        times += [round.due for round in self._rounds if not round.is_starting and round.is_down]
        earliest = min(times, default=math.inf)
        return None if earliest == math.inf else earliest

    @property
    def is_ending(self) -> bool:
        """Whether everything is being stopped, or has been, for good."""
        return self._last is not None

    @property
    def is_over(self) -> bool:
        """Whether the last decision, Escalate or Finish, was given. No other one follows."""
        return self._is_over

    @property
    def children(self) -> dict[Hashable, str]:
        """Each child, in the order of starts, with its state: "down", "starting", "up", "stopping" or "killed"."""
        return {name: child.state.value for name, child in self._children.items()}

    def handle(self, event: Event, now: float) -> list[Decision]:
        """What follows from `event`, to be carried out in this order. `now`: seconds on a clock that never goes back.

        Raises:
            ConfigError: an Add of a child that there is already, or after the end; something that is no event.
        """
        self._now = max(self._now, now)
        match event:
            case Started(incarnation):
                self._on_started(incarnation)
            case Ended(incarnation, normal, reason, occasion):
                self._on_ended(incarnation, normal, reason, occasion)
            case StartFailed(incarnation, reason, occasion):
                self._on_ended(incarnation, False, f"it did not start: {reason}", occasion)
            case StartAsked():
                self._on_start_asked()
            case StopAsked(reason):
                self._end(Finish(reason))
            case Add(spec):
                self._on_add(spec)
            case Remove(child, reason):
                self._on_remove(child, reason)
            case Tick():
                pass
            case _:
                raise ConfigError(f"event {event!r} is none that a supervisor knows")
        self._progress()
        self._kill_overdue()
        decisions, self._decisions = self._decisions, []
        return decisions

    # --- events

    def _register(self, spec: ChildSpec) -> _Child:
        if spec.child in self._children:
            raise ConfigError(f"there is a child {spec.child!r} already")
        child = self._children[spec.child] = _Child(spec)
        return child

    def _on_start_asked(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._rounds.append(_Round("start", list(self._children.values()), self._now))

    def _on_add(self, spec: ChildSpec) -> None:
        if self._last is not None:
            raise ConfigError(f"child {spec.child!r} cannot be added: the supervisor is ending ({self._last.reason})")
        child = self._register(spec)
        if self._has_started:
            self._rounds.append(_Round("add", [child], self._now))

    def _on_remove(self, name: Hashable, reason: str) -> None:
        child = self._children.get(name)
        if child is None or self._last is not None:
            return
        self._release([child])
        child.is_removed = True
        if child.runs:
            self._stop([child], reason)
        elif child.state == _State.DOWN:
            self._forget(child, reason)

    def _on_started(self, incarnation: Incarnation) -> None:
        child = self._children.get(incarnation.child)
        if child is not None and child.incarnation == incarnation and child.state == _State.STARTING:
            child.state = _State.UP
            child.up_since = self._now

    def _on_ended(self, incarnation: Incarnation, normal: bool, reason: str, occasion: Hashable | None) -> None:
        child = self._children.get(incarnation.child)
        if child is None or child.incarnation != incarnation or child.state == _State.DOWN:
            return
        round = self._round_of(child)
        is_expected = self._last is not None or (round is not None and not round.is_starting)
        was_up = child.state == _State.UP
        child.state = _State.DOWN
        if child.is_removed:
            self._forget(child, reason)
        elif is_expected:
            return  # it goes on with the others that are being stopped
        elif not was_up and round is not None and round.purpose == "start":
            failure = Failure(child.name, reason, self._now, occasion)
            self._end(Escalate(f"child {child.name!r}: {reason}", (failure,)))
        elif not was_up and round is not None and round.purpose == "add":
            self._forget(child, reason)
        elif not was_up or child.spec.restart == "always" or (child.spec.restart == "transient" and not normal):
            self._fail(child, Failure(child.name, reason, self._now, occasion), was_up)
        elif child.spec.restart == "never":
            self._forget(child, reason)

    # --- restarts

    def _fail(self, child: _Child, failure: Failure, was_up: bool) -> None:
        """The child needs a restart: with whom, when, or is it one too many?"""
        if self._exceeds_limit(failure):
            return
        backoff = self.policy.backoff
        if was_up and self._now - child.up_since >= backoff.reset_after:
            child.attempts = 0
        child.attempts += 1
        delay = backoff.delay(child.attempts, self._rng)
        group = self._group_of(child)
        for round in self._rounds:
            if not round.is_starting and set(round.children) & set(group):
                delay = max(delay, round.due - self._now)
        self._release(group)
        self._rounds.append(_Round("restart", group, self._now + delay))
        names = tuple(other.name for other in group if other.spec.restart != "never")
        self._decisions.append(Restarting(failure, names, child.attempts, delay))

    def _exceeds_limit(self, failure: Failure) -> bool:
        limit = self.policy.max_restarts
        if limit is None:
            return False
        since = self._now - self.policy.within
        self._failures = [earlier for earlier in self._failures if earlier.at >= since] + [failure]
        shared = {earlier.occasion for earlier in self._failures if earlier.occasion is not None}
        number = len(shared) + sum(earlier.occasion is None for earlier in self._failures)
        if number <= limit:
            return False
        count = f"{number} restart{'s' if number > 1 else ''}"
        reason = (
            f"{count} within {self.policy.within:g} s would be more than max_restarts={limit}; the last failure was of "
            f"child {failure.child!r}: {failure.reason}"
        )
        self._end(Escalate(reason, tuple(self._failures)))
        return True

    def _group_of(self, child: _Child) -> list[_Child]:
        """Who is restarted with it, itself included, in the order of starts."""
        if self.policy.strategy == "one_for_one":
            return [child]
        everybody = [other for other in self._children.values() if not other.is_removed]
        return everybody if self.policy.strategy == "one_for_all" else everybody[everybody.index(child) :]

    def _round_of(self, child: _Child) -> _Round | None:
        return next((round for round in self._rounds if child in round.children), None)

    def _release(self, children: Sequence[_Child]) -> None:
        for round in self._rounds:
            round.release(children)
        self._rounds = [round for round in self._rounds if round.children]

    # --- what can be done now

    def _progress(self) -> None:
        if self._is_over:
            return
        if self._last is not None:
            self._progress_end(self._last)
            return
        for position, round in enumerate(self._rounds):
            if round.purpose != "add" or not any(map(self._goes_first, self._rounds[:position])):
                self._progress_round(round)
        self._rounds = [round for round in self._rounds if round.children and not round.is_done]

    def _goes_first(self, round: _Round) -> bool:
        """Whether children that are added later wait for it, as they may depend on those in it."""
        return not round.is_done and (round.purpose != "restart" or self.policy.strategy != "one_for_one")

    def _progress_end(self, last: Escalate | Finish) -> None:
        self._stop_next(list(self._children.values()), last.reason)
        if all(child.state == _State.DOWN for child in self._children.values()):
            self._is_over = True
            self._decisions.append(last)

    def _progress_round(self, round: _Round) -> None:
        if not round.is_starting:
            self._stop_next(round.children, "it is restarted together with another child that failed")
        if not round.is_due(self._now):
            return
        if not round.is_starting:
            self._begin_starting(round)
        if not self.policy.in_order:
            self._start(round.left)
            round.left = []
        elif round.left and all(child.state != _State.STARTING for child in round.children):
            self._start([round.left.pop(0)])

    def _begin_starting(self, round: _Round) -> None:
        round.is_starting = True
        for child in round.children:
            if child.spec.restart == "never":
                self._forget(child, "it is never restarted, and was stopped together with another child that failed")
        round.children = [child for child in round.children if child.spec.restart != "never"]
        round.left = list(round.children)

    def _start(self, children: Sequence[_Child]) -> None:
        for child in children:
            child.number += 1
            child.state = _State.STARTING
        if children:
            self._decisions.append(Start(tuple(child.incarnation for child in children)))

    def _stop_next(self, children: Sequence[_Child], reason: str) -> None:
        """The last one that has not ended; side by side: all of them."""
        alive = [child for child in reversed(children) if child.state != _State.DOWN]
        if self.policy.in_order:
            alive = alive[:1]
        self._stop([child for child in alive if child.runs], reason)

    def _stop(self, children: Sequence[_Child], reason: str) -> None:
        for child in children:
            child.state = _State.STOPPING
            child.kill_at = self._now + child.spec.stop_timeout
        told = tuple(child.incarnation for child in children if child.spec.stop_timeout > 0)
        if told:
            self._decisions.append(Stop(told, reason))

    def _kill_overdue(self) -> None:
        overdue = [
            child for child in self._children.values() if child.state == _State.STOPPING and self._now >= child.kill_at
        ]
        for child in overdue:
            child.state = _State.KILLED
        if overdue:
            self._decisions.append(Kill(tuple(child.incarnation for child in reversed(overdue))))

    def _forget(self, child: _Child, reason: str) -> None:
        del self._children[child.name]
        self._decisions.append(Forget(child.name, reason))

    def _end(self, last: Escalate | Finish) -> None:
        """Everything is stopped, and then `last` is said. The first reason counts."""
        if self._last is None:
            self._last = last
            self._rounds = []
