"""Names of processes as Monarch's programs write them: a label, or a random number with or without one."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

from ..errors import ConfigError

__all__ = ["ProcId", "Uid"]

_DIGITS = "123456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"  # base 58
_LABEL = re.compile(r"[a-z]([A-Za-z0-9_-]{0,61}[a-z0-9])?")
_TEXT = re.compile(r"([^<>]*)(?:<([^<>]+)>)?")
_LARGEST = 2**64 - 1


@dataclass(frozen=True, init=False, repr=False)
class Uid:
    """`label` alone names a singleton; with `instance_value` (64 bits) it is one of many, and that number alone tells
    it from others. Made by the functions below.
    """

    label: str | None = field(compare=False)
    instance_value: int | None
    _name: str | None  # of a singleton: what tells it from others

    def __init__(self) -> None:
        raise TypeError("a Uid is made by Uid.instance(), Uid.anonymous() or Uid.from_string()")

    @classmethod
    def _make(cls, label: str | None, value: int | None) -> Uid:
        if label is not None and not _LABEL.fullmatch(label):
            raise ConfigError(
                f"label is {label!r}, but must be 1 to 63 letters, digits, '-' and '_', begin with a lower-case letter "
                "and end with one or a digit"
            )
        uid = cls.__new__(cls)
        name = label if value is None else None
        for attribute, found in (("label", label), ("instance_value", value), ("_name", name)):
            object.__setattr__(uid, attribute, found)
        return uid

    @classmethod
    def anonymous(cls) -> Uid:
        """A random one without a label."""
        return cls.instance()

    @classmethod
    def instance(cls, label: str | None = None) -> Uid:
        """A random one. ConfigError for a label that cannot be one."""
        return cls._make(label, secrets.randbits(64))

    @classmethod
    def instance_from_value(cls, value: int, label: str | None = None) -> Uid:
        """ConfigError where the value has not 64 bits, or the label cannot be one."""
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise ConfigError(f"value is {value!r}, but must be an integer from 0 to 2**64 - 1")
        return cls._make(label, value)

    @classmethod
    def from_string(cls, uid: str) -> Uid:
        """What str() gives, read back: "label", "label<digits>" or "<digits>". Raises ConfigError (a ValueError)."""
        match = _TEXT.fullmatch(uid)
        if match is None or not uid:
            raise ConfigError(f"invalid uid: {uid!r} is none of label, label<digits> and <digits>")
        if match[2] is None:
            return cls._make(match[1], None)
        return cls.instance_from_value(_from_base58(match[2], uid), match[1] or None)

    @property
    def is_instance(self) -> bool:
        return self.instance_value is not None

    @property
    def is_singleton(self) -> bool:
        return self.instance_value is None

    def __str__(self) -> str:
        digits = "" if self.instance_value is None else f"<{_to_base58(self.instance_value)}>"
        return (self.label or "") + digits

    def __repr__(self) -> str:
        return f"Uid({self})"

    def __reduce__(self) -> tuple[object, ...]:
        return Uid.from_string, (str(self),)


@dataclass(frozen=True)
class ProcId:
    """Of a process: a Uid."""

    uid: Uid

    def __post_init__(self) -> None:
        if not isinstance(self.uid, Uid):
            raise TypeError(f"uid is a {type(self.uid).__name__}, but must be a Uid")

    @classmethod
    def from_string(cls, proc_id: str) -> ProcId:
        """Raises ConfigError, as Uid.from_string."""
        return cls(Uid.from_string(proc_id))

    @property
    def label(self) -> str | None:
        return self.uid.label

    def __str__(self) -> str:
        return str(self.uid)


def _to_base58(value: int) -> str:
    digits = ""
    while value or not digits:
        value, digit = divmod(value, 58)
        digits = _DIGITS[digit] + digits
    return digits


def _from_base58(digits: str, uid: str) -> int:
    value = 0
    for digit in digits[:12]:  # 11 hold 64 bits
        if digit not in _DIGITS:
            raise ConfigError(f"invalid uid: {digit!r} in {uid!r} is no digit of base 58")
        value = 58 * value + _DIGITS.index(digit)
    if value > _LARGEST or len(digits) > 11:
        raise ConfigError(f"invalid uid: the number in {uid!r} has more than 64 bits")
    return value
