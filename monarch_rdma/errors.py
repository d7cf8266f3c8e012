"""The one family of failures. Each kind of the C++ core (enum mr_kind) is one class here.

Every class is also a subclass of the builtin that callers would catch anyway: `except TimeoutError`, `except
ValueError`, `except ConnectionError` and so on keep working. The message is a sentence that names the peer, the
operation, its size and the cause; the same facts are attributes.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AccessDenied",
    "AuthenticationError",
    "Cancelled",
    "ConfigError",
    "JobEnded",
    "OutOfBounds",
    "PeerLost",
    "ProtocolError",
    "RdmaError",
    "RegistrationError",
    "ResourceExhausted",
    "TransferTimeout",
    "VersionChanged",
    "class_of_kind",
    "demand_whole",
]


class RdmaError(Exception):
    """Base of every failure of this package.

    Attributes:
        peer: name of the process at the other end, or None.
        operation: "read", "write", "fetch_add", "drop", "connect", ..., or None.
        size: bytes the operation was about, or None.
        cause: what went wrong, in words; None where the message says it all.
        sys_errno: the errno behind it, or 0.
        remote_state: for a failed write, what is known of the remote bytes: "not_written", "written" or "unknown"
            (some, all or none of them); None for everything else.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: str | None = None,
        operation: str | None = None,
        size: int | None = None,
        cause: str | None = None,
        sys_errno: int = 0,
        remote_state: str | None = None,
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.operation = operation
        self.size = size
        self.cause = cause
        self.sys_errno = sys_errno
        self.remote_state = remote_state
        if sys_errno and isinstance(self, OSError):
            as_os_error: OSError = self
            as_os_error.errno = sys_errno

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {name: getattr(self, name) for name in _FACTS}
        return _rebuild, (type(self), str(self), facts)


_FACTS = ("peer", "operation", "size", "cause", "sys_errno", "remote_state")


def _rebuild(cls: type[RdmaError], message: str, facts: dict[str, Any]) -> RdmaError:
    return cls(message, **facts)


class PeerLost(RdmaError, ConnectionError):
    """The process at the other end died, stopped answering, or was cut off."""


class TransferTimeout(RdmaError, TimeoutError):
    """The operation's own deadline passed. It is over: its local destination is not written any more."""


class Cancelled(RdmaError, RuntimeError):
    """The operation was cancelled here, or its engine was closed. Not asyncio.CancelledError: no task is being
    cancelled.
    """


class AccessDenied(RdmaError, PermissionError):
    """The region was dropped, or the right (read, write) was never granted."""


class OutOfBounds(RdmaError, ValueError, IndexError):
    """The bytes asked for do not lie inside the region, or do not fit into the local memory."""


class RegistrationError(RdmaError, OSError):
    """Memory could not be made reachable, mapped or allocated. Says errno, limit, and the command that raises it."""


class AuthenticationError(RdmaError, PermissionError):
    """The other side is not a member of this job: the job secrets differ."""


class ProtocolError(RdmaError, RuntimeError):
    """The other side speaks another version, or sent malformed data."""


class ResourceExhausted(RdmaError, RuntimeError):
    """A limit was reached; the message says which option raises it."""


class ConfigError(RdmaError, ValueError, RuntimeError):
    """An argument or option is wrong, or the object is in no state to do this (closed, in flight, of a parent process).

    A ValueError and a RuntimeError, because Monarch raises the first for a wrong size and the second for a wrong state.
    """


class VersionChanged(RdmaError, RuntimeError):
    """What was read is of several versions, or was being written meanwhile: none of it may be used."""


class JobEnded(RdmaError, RuntimeError):
    """A scheduler's job has ended, and its hosts with it. `cause` has the scheduler's own words for why."""


# The position is the number in enum mr_kind; 0 is success.
_CLASSES: tuple[type[RdmaError], ...] = (
    PeerLost,
    TransferTimeout,
    Cancelled,
    AccessDenied,
    OutOfBounds,
    RegistrationError,
    AuthenticationError,
    ProtocolError,
    ResourceExhausted,
    ConfigError,
)


def class_of_kind(kind: int) -> type[RdmaError]:
    """The class for a failure's number in enum mr_kind (1 = MR_PEER_LOST, ...)."""
    if not 1 <= kind <= len(_CLASSES):
        raise ValueError(f"kind {kind} is not a failure of enum mr_kind")
    return _CLASSES[kind - 1]


def demand_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """ConfigError where it is no integer from `least` to `most`; None: to the largest of 64 bits."""
    if type(value) is not int or not least <= value <= ((1 << 63) - 1 if most is None else most):
        limits = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} is {value!r:.200}, but must be an integer {limits}")
