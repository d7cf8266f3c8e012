"""Classes of the program itself travel by value, as cloudpickle has them. Where one comes back to the process that
defined it, the one there stays as it is: what comes is a copy of an earlier moment, whose methods see copies of the
globals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import cloudpickle

__all__ = ["ClassPickler"]

_at_home: WeakSet[type] = WeakSet()  # defined here, and sent to somebody
_guests: WeakSet[type] = WeakSet()  # defined elsewhere


class ClassPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not isinstance(obj, type) or not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced  # no class, or one that is found by its name
        make, arguments, state, items, pairs, update = reduced
        if obj not in _guests:
            _at_home.add(obj)
        return _class, (make, *arguments), (update, state), items, pairs, _update


# --- what streams name; they must stay importable here


def _class(make: Callable[..., type], *arguments: Any) -> type:
    """The one that is here, or a new one, still empty."""
    made = make(*arguments)
    if made not in _at_home:
        _guests.add(made)
    return made


def _update(made: type, said: tuple[Callable[[type, Any], Any], Any]) -> None:
    update, state = said
    if made not in _at_home:
        update(made, state)
