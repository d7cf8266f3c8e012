"""What callers give, looked at before anything is done with it: ConfigError with the argument and its value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError

__all__ = ["as_addresses", "as_list", "can_reduce"]


def as_list(name: str, value: Any) -> list[Any]:
    """Of several tensors or other memory."""
    if not isinstance(value, Iterable):
        raise ConfigError(f"{name} is {value!r:.200}, but must be a list")
    return list(value)


def as_addresses(name: str, value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} is {value!r:.200}, but must be a list of engines' addresses")
    addresses = list(value)
    for i, address in enumerate(addresses):
        if not isinstance(address, str) or ":" not in address:
            raise ConfigError(f"{name}[{i}] is {address!r:.200}, but must be the address of an engine")
    return addresses


def can_reduce(dtype: str, op: str) -> bool:
    """Of those that the core knows."""
    return op in ("min", "max") if dtype == "bool" else op != "avg" or "float" in dtype
