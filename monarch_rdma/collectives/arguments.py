"""What callers give, looked at before anything is done with it: ConfigError with the argument and its value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError

__all__ = ["as_addresses", "as_list", "can_reduce", "demand_whole"]

_TAGS = 1 << 63


def demand_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """An integer from `least` to `most`; None: to the largest there is."""
    if type(value) is not int or not least <= value <= (_TAGS - 1 if most is None else most):
        limits = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} is {value!r:.200}, but must be an integer {limits}")


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
