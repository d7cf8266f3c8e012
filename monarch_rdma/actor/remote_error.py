"""Exceptions that cross processes: what the caller of a remote call gets, and how it is packed for the way.

An exception travels as text always, and as itself where it can be pickled and its pickle can be loaded.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from ..errors import ProtocolError

__all__ = ["ActorError", "RemoteError", "RemoteException"]

_MAX_TEXT = 64 << 10  # characters of a traceback; what is more is cut out of its middle
_MAX_LINE = 1000  # characters of an exception's own text, where only a line is wanted
_MAX_PICKLE = 1 << 20  # bytes; a larger exception comes back as text


class ActorError(Exception):
    """A remote call failed: its exception as `exception`, what was called as `message`.

    `exception` is the remote one itself, or a RemoteException with its text where it could not be sent.
    `exception_formatted` is the traceback at the remote end; str() shows all.
    """

    def __init__(
        self, exception: BaseException, message: str = "A remote actor call has failed.", text: str = ""
    ) -> None:
        super().__init__(exception, message)
        self.exception = exception
        self.message = message
        self.exception_formatted = text or _formatted(exception)

    def __str__(self) -> str:
        return f"{self.message}\n Traceback of where the remote call failed:\n{self.exception_formatted}"

    def __repr__(self) -> str:
        return f"ActorError({_described(self.exception)}, {self.message!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (*RemoteError._of(self.exception, self.message, self.exception_formatted).to_tuple(),)


class RemoteException(Exception):
    """In place of an exception that could not be sent, or not be loaded here: its type's name and its text."""

    def __init__(self, type_name: str, text: str) -> None:
        super().__init__(type_name, text)
        self.type_name = type_name
        self.text = text

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}" if self.text else self.type_name


@dataclass(frozen=True)
class RemoteError:
    """An exception packed for the way. Made of plain values alone: `to_tuple` fits any codec."""

    message: str  # what was called
    type_name: str
    line: str  # the exception's own text
    text: str  # the traceback with its chain of causes and its notes
    pickled: bytes | None  # the exception itself

    @classmethod
    def pack(
        cls, exc: BaseException, *, actor: str, rank: object = None, endpoint: str | None = None, as_text: bool = False
    ) -> RemoteError:
        """Never raises for what is wrong with the exception. `as_text`: without the pickle, for codec="safe"."""
        called = f"{actor}.{endpoint}" if endpoint else actor
        where = f" on rank {rank}" if rank is not None else ""
        return cls._of(exc, f"Actor call {called} failed{where}.", _formatted(exc), as_text)

    @classmethod
    def _of(cls, exc: BaseException, message: str, text: str, as_text: bool = False) -> RemoteError:
        return cls(message, _type_name(exc), _line(exc), text, None if as_text else _pickled(exc))

    def unpack(self, *, as_text: bool = False) -> ActorError:
        """The error to raise. `as_text`: without loading the pickle."""
        exception = None if as_text or self.pickled is None else _unpickled(self.pickled)
        if exception is None:
            exception = RemoteException(self.type_name, self.line)
        return ActorError(exception, self.message, self.text)

    def to_tuple(self) -> tuple[str, str, str, str, bytes | None]:
        return self.message, self.type_name, self.line, self.text, self.pickled

    @classmethod
    def from_tuple(cls, value: object) -> RemoteError:
        """ProtocolError where it is not what to_tuple gave."""
        kinds = [type(field) for field in value] if isinstance(value, tuple) else []
        if kinds[:4] == [str] * 4 and kinds[4:] in ([bytes], [type(None)]):
            return cls(*value)  # type: ignore[misc]
        raise ProtocolError(f"a remote error is malformed: {value!r:.200}")


def _rebuild(*fields: Any) -> ActorError:
    return RemoteError(*fields).unpack()


def _pickled(exc: BaseException) -> bytes | None:
    """None where it cannot be pickled, for whatever reason its own code has."""
    from .encoding.pickling import in_one_stream

    try:
        data = in_one_stream(exc)
    except Exception:
        return None
    return data if len(data) <= _MAX_PICKLE else None


def _unpickled(data: bytes) -> BaseException | None:
    """None where loading raises, for whatever reason its own code has, or gives something that cannot be raised."""
    try:
        exception = pickle.loads(data)
    except Exception:
        return None
    return exception if isinstance(exception, BaseException) else None


def _formatted(exc: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
    except Exception as error:  # an exception whose attributes break the traceback module
        text = f"{_described(exc)}\n(its traceback could not be formatted: {type(error).__name__})\n"
    return _cut(text, _MAX_TEXT)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    mark = f"\n[... {len(text) - most} characters left out ...]\n"
    head = (most - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (most - len(mark) - head) :]


def _type_name(exc: BaseException) -> str:
    kind = type(exc)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _line(exc: BaseException) -> str:
    try:
        return _cut(str(exc), _MAX_LINE)
    except Exception as error:
        return f"(its text could not be made: {type(error).__name__})"


def _described(exc: BaseException) -> str:
    try:
        return _cut(repr(exc), _MAX_LINE)
    except Exception:
        return f"<{_type_name(exc)}>"
