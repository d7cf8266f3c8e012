"""What a spawn asks for about restarts, checked: data for the supervisor that the owner's process runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from ...errors import ConfigError
from ...supervision.policy import Backoff, ChildSpec, Policy, Restart, Strategy

__all__ = ["Restarts"]

_DEFAULTS = {"strategy": "one_for_one", "max_restarts": 3, "within": 5.0, "backoff": None, "restart_stuck": False}


@dataclass(frozen=True)
class Restarts:
    """Which ends of a child are answered by a restart, and what the supervisor does about all of its children."""

    restart: Restart
    policy: Policy
    restart_stuck: bool = False
    stop_timeout: float = math.inf  # seconds

    @classmethod
    def checked(
        cls,
        restart: Restart | None,
        strategy: Strategy,
        max_restarts: int | None,
        within: float,
        backoff: Backoff | None,
        restart_stuck: bool = False,
        stop_timeout: float = math.inf,
    ) -> Restarts | None:
        """None without `restart`. Raises ConfigError naming the argument and its value.

        `restart_stuck`: what is reported as stuck is ended, and counts as a failure. `stop_timeout`: seconds that one
        which is asked to stop has; inf where who stops it sees to its end.
        """
        if not isinstance(restart_stuck, bool):
            raise ConfigError(f"restart_stuck is {restart_stuck!r}, but must be True or False")
        given: dict[str, object] = {
            "strategy": strategy,
            "max_restarts": max_restarts,
            "within": within,
            "backoff": backoff,
            "restart_stuck": restart_stuck,
        }
        if restart in (None, "never"):
            for name, value in given.items():
                if value != _DEFAULTS[name]:
                    raise ConfigError(f"{name} is {value!r}, but restart is {restart!r}: nothing would be restarted")
        if restart is None:
            return None
        ChildSpec("checked", restart)
        in_order = strategy == "rest_for_one"  # later ranks depend on earlier ones; else nobody waits for a neighbour
        policy = Policy(strategy, max_restarts, within, Backoff() if backoff is None else backoff, in_order)
        return cls(restart, policy, restart_stuck, stop_timeout)

    def children(self, names: Iterable[Hashable]) -> list[ChildSpec]:
        return [ChildSpec(name, self.restart, self.stop_timeout) for name in names]
