"""What a spawn asks for about restarts, checked: data for the supervisor that the owner's process runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from ...errors import ConfigError
from ...supervision.policy import Backoff, ChildSpec, Policy, Restart, Strategy

__all__ = ["Restarts"]

_DEFAULTS = {"strategy": "one_for_one", "max_restarts": 3, "within": 5.0, "backoff": None}


@dataclass(frozen=True)
class Restarts:
    """Which ends of a child are answered by a restart, and what the supervisor does about all of its children."""

    restart: Restart
    policy: Policy

    @classmethod
    def checked(
        cls,
        restart: Restart | None,
        strategy: Strategy,
        max_restarts: int | None,
        within: float,
        backoff: Backoff | None,
    ) -> Restarts | None:
        """None without `restart`. Raises ConfigError naming the argument and its value."""
        given = {"strategy": strategy, "max_restarts": max_restarts, "within": within, "backoff": backoff}
        if restart in (None, "never"):
            for name, value in given.items():
                if value != _DEFAULTS[name]:
                    raise ConfigError(f"{name} is {value!r}, but restart is {restart!r}: nothing would be restarted")
        if restart is None:
            return None
        ChildSpec("checked", restart)
        in_order = strategy == "rest_for_one"  # later ranks depend on earlier ones; else nobody waits for a neighbour
        policy = Policy(strategy, max_restarts, within, Backoff() if backoff is None else backoff, in_order)
        return cls(restart, policy)

    def children(self, names: Iterable[Hashable]) -> list[ChildSpec]:
        """Who stops a child sees to its end within process_exit_timeout; there is nothing to kill after that."""
        return [ChildSpec(name, self.restart, math.inf) for name in names]
