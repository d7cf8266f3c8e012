"""One thing that was looked at on this host."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Check"]


@dataclass(frozen=True)
class Check:
    """`required`: without it monarch_rdma does not do here what this host could do; decides the exit code."""

    group: str
    name: str
    ok: bool
    why: str
    fix: str = ""  # the command that changes it; "" where there is nothing to change
    required: bool = False
