"""Training that is in step only now and then: members train by themselves, and average what came of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ConfigError, demand_whole
from ..kernels import checksum
from .cohort import Cohort, Offering
from .contribution import wire_of
from .fragments import Fragment, fragments_of

__all__ = ["Round", "SemiSynchronous", "Stateful"]


class Stateful(Protocol):
    """A trainer, an optimiser, a data loader."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class Round:
    """An averaging that was applied. `number`: from 1. `waited`: seconds that training stood still for it. `is_healed`:
    this member had fallen behind, and has taken over the state of another one instead.
    """

    number: int
    fragment: int
    members: tuple[Any, ...]
    waited: float
    is_healed: bool = False


@dataclass
class _UnderWay:
    fragment: int
    ends: int  # the step at which it is applied
    mean: Future[Tensor | None]


class SemiSynchronous(ABC):
    """Call `step()` after each step of the inner optimiser."""

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module | Sequence[nn.Parameter]],
        cohort: Cohort,
        *,
        every: int,
        delay: int = 0,
        mix: float = 0.0,
        quantize: str | None = None,
        heals: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._fragments = fragments_of(model)
        _check(every, delay, mix, len(self._fragments))
        _check_heals(heals or {})
        if not hasattr(cohort, "average"):
            raise ConfigError(f"cohort is {cohort!r:.200}, but must be a cohort, such as FixedCohort(group)")
        if delay and not getattr(cohort, "may_overlap", True):
            raise ConfigError(f"delay is {delay}, but must be 0: {type(cohort).__name__} reads states as a round ends")
        self._interval = every // len(self._fragments)
        self._delay, self._mix = delay, mix
        self._wire = wire_of(quantize)
        self._errors = [torch.zeros(f.numel) if quantize is not None else None for f in self._fragments]
        self._cohort = cohort
        self._heals = dict(heals or {})
        self._pool = ThreadPoolExecutor(1, "monarch-rdma-averaging") if delay else None
        self._under_way: _UnderWay | None = None
        self.steps = 0  # inner steps
        self._made = 0  # by this member, since it brought in something
        self._spans = [0] * len(self._fragments)  # and since each fragment was the shared one
        cohort.serve(self._whole_state, self._load_whole_state)

    # --- what the two ways of averaging differ in

    @abstractmethod
    def _offered(self, fragment: Fragment) -> Tensor:
        """What this member brings in: flat, fp32."""

    @abstractmethod
    def _apply(self, number: int, fragment: Fragment, mean: Tensor) -> None:
        """Makes the shared parameters of the next round."""

    # --- training

    def join(self) -> bool:
        """Before the first step. True: others were training already, and this member has taken over their state."""
        has_healed = self._cohort.join()
        left = self._interval - 1 - self.steps % self._interval  # it is there when the next averaging begins
        self.steps += min(self._cohort.ahead, left)
        return has_healed

    def step(self) -> Round | None:
        """After each inner step: begins an averaging when one is due, and applies it `delay` steps later. Waits for the
        slowest member there. Returns what was applied.

        Members that are lost are left out. Raises ConfigError where members are not alike.
        """
        self.steps += 1
        self._made += 1
        self._spans = [span + 1 for span in self._spans]
        if self.steps % self._interval == 0:
            self._begin((self.steps // self._interval - 1) % len(self._fragments))
        elif self._under_way is None:
            self._cohort.attend()
        if self._under_way is not None and self.steps == self._under_way.ends:
            return self._finish(self._under_way)
        return None

    def _begin(self, number: int) -> None:
        fragment = self._fragments[number]
        contribution = self._wire.contribution(self._offered(fragment), self._errors[number])
        base = int(checksum(fragment.shared_flat()).sum()) if fragment.numel else 0
        offering = Offering(self._wire, contribution, base, self._made, self._spans[number])
        self._made = 0
        if self._pool is not None:
            mean = self._pool.submit(self._cohort.average, offering)
        else:
            mean = Future()
            begin = time.monotonic()
            mean.set_result(self._cohort.average(offering))
            self._waited = time.monotonic() - begin
        self._under_way = _UnderWay(number, self.steps + self._delay, mean)

    def _finish(self, under_way: _UnderWay) -> Round:
        begin = time.monotonic()
        mean = under_way.mean.result()
        waited = time.monotonic() - begin if self._pool is not None else self._waited
        self._under_way = None
        number = under_way.fragment
        if mean is not None:
            fragment = self._fragments[number]
            self._apply(number, fragment, mean)
            fragment.load_shared(self._mix)
            self._spans[number] = 0
        self._cohort.boundary()
        return Round(self._cohort.rounds, number, self._cohort.names, waited, mean is None)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all members between two rounds. Not that of an averaging that is under way."""
        return {"steps": self.steps, "shared": [list(map(_detached, f.shared)) for f in self._fragments]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The model's parameters become the shared ones. What quantisation has lost so far is forgotten."""
        self.steps = int(state["steps"])
        for fragment, shared in zip(self._fragments, state["shared"], strict=True):
            for parameter, value in zip(fragment.shared, shared, strict=True):
                parameter.copy_(value)
            fragment.load_shared()
        for error in self._errors:
            if error is not None:
                error.zero_()

    def _whole_state(self) -> dict[str, Any]:
        return {"shared": self.state_dict(), "own": {key: each.state_dict() for key, each in self._heals.items()}}

    def _load_whole_state(self, state: Mapping[str, Any]) -> None:
        for key, each in self._heals.items():
            each.load_state_dict(state["own"][key])
        self.load_state_dict(state["shared"])
        self._made, self._spans = 0, [0] * len(self._spans)

    def close(self) -> None:
        """Waits for an averaging that is under way, so that nobody waits for this member; then it leaves."""
        if self._under_way is not None:
            self._under_way.mean.exception()
        if self._pool is not None:
            self._pool.shutdown()
        self._cohort.close()

    def __enter__(self) -> SemiSynchronous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _detached(parameter: Tensor) -> Tensor:
    return parameter.detach()


def _check(every: int, delay: int, mix: float, fragments: int) -> None:
    demand_whole("every", every, 1)
    if every % fragments:
        raise ConfigError(f"every is {every}, but must be a multiple of the number of fragments, {fragments}")
    demand_whole("delay", delay, 0, every // fragments - 1)  # one averaging ends before the next
    if not isinstance(mix, int | float) or not 0 <= mix < 1:
        raise ConfigError(f"mix is {mix!r}, but must be from 0 to below 1: the share that is kept of local parameters")


def _check_heals(heals: Any) -> None:
    if not isinstance(heals, Mapping):
        raise ConfigError(f"heals is {heals!r:.200}, but must map names to what has a state_dict")
    for name, each in heals.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(f"heals[{name!r}] is {each!r:.200}, but must have state_dict and load_state_dict")
