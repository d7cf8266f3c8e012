"""Errors of calls that are all that a program does: uncaught, they end it with their sentence, not with a traceback."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from ...errors import ConfigError, RdmaError, ResourceExhausted

__all__ = ["told_in_a_sentence"]


class _LastWord(RdmaError, SystemExit):
    """What Python prints of it at the end of a program is `code` alone."""

    @property
    def code(self) -> str:  # type: ignore[override]
        """The sentence; the program's exit code is 1."""
        return f"monarch_rdma: {self}"


# Each is caught as ever.
_LAST_WORDS = {cls: type(cls.__name__, (cls, _LastWord), {}) for cls in (ConfigError, ResourceExhausted)}


@contextlib.contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """Not where somebody sits at a prompt, which would end too; nor on other threads, where nobody would hear it."""
    try:
        yield
    except (ConfigError, ResourceExhausted) as error:
        is_programs_own = threading.current_thread() is threading.main_thread() and not hasattr(sys, "ps1")
        if not is_programs_own or type(error) not in _LAST_WORDS:
            raise
        _, (_, message, facts) = error.__reduce__()
        raise _LAST_WORDS[type(error)](message, **facts) from error
