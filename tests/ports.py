"""Ports that a test names before somebody listens there."""

from __future__ import annotations

import itertools
import os
import socket

__all__ = ["free_port", "free_ports"]

_FIRST, _COUNT = 16_000, 16_000  # below those that the kernel gives out by itself, so that they stay free
_steps = itertools.count(os.getpid() * 128 % _COUNT)  # tests beside these look elsewhere


def free_ports(count: int) -> list[int]:
    """Of 127.0.0.1. None is given twice, as somebody may still look for who was there."""
    found: list[int] = []
    for step in itertools.islice(_steps, _COUNT):
        port = _FIRST + step % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"there are no {count} free ports from {_FIRST} on")


def free_port() -> int:
    return free_ports(1)[0]
