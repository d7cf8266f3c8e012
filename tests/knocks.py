"""What a program says of other tests' jobs, which run beside it."""

from __future__ import annotations

import re

__all__ = ["without_knocks"]

_WHY = r".*\bof another job\b.*|.*ended the connection during the TLS handshake.*"  # who of both has noticed it first
_KNOCK = re.compile(rf".*refused a connection from 127\.0\.0\.1: (?:{_WHY})\(told once.*\)\n?")


def without_knocks(said: str) -> str:
    """Without its lines about connections of other jobs on this host: a process of another test looks for one of its
    own that has ended, at a port that the kernel has given to this program meanwhile.
    """
    return "".join(line for line in said.splitlines(keepends=True) if not _KNOCK.fullmatch(line))
