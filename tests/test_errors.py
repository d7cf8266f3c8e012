"""The family of failures: complete, catchable by the builtins, and able to travel between processes."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from monarch_rdma._engine import ffi

from monarch_rdma import errors

FAMILY = {
    errors.PeerLost: (ConnectionError, OSError),
    errors.TransferTimeout: (TimeoutError,),
    errors.Cancelled: (RuntimeError,),
    errors.AccessDenied: (PermissionError,),
    errors.OutOfBounds: (ValueError, IndexError),
    errors.RegistrationError: (OSError,),
    errors.AuthenticationError: (PermissionError,),
    errors.ProtocolError: (RuntimeError,),
    errors.ResourceExhausted: (RuntimeError,),
    errors.ConfigError: (ValueError, RuntimeError),
}
ABOVE_THE_CORE = {errors.VersionChanged: (RuntimeError,), errors.JobEnded: (RuntimeError,)}


def test_every_kind_of_the_core_is_the_class_of_its_name() -> None:
    kinds = {name: number for number, name in ffi.typeof("enum mr_kind").elements.items() if name != "MR_OK"}
    for name, number in kinds.items():
        words = "".join(word.capitalize() for word in name.removeprefix("MR_").split("_"))
        assert errors.class_of_kind(number).__name__.removesuffix("Error") == words.removesuffix("Error")
    assert len(kinds) == len(FAMILY)


@pytest.mark.parametrize("kind", [0, -1, 11])
def test_a_number_that_is_no_failure_is_refused(kind: int) -> None:
    with pytest.raises(ValueError, match=str(kind)):
        errors.class_of_kind(kind)


@pytest.mark.parametrize(
    ("cls", "builtins"), (FAMILY | ABOVE_THE_CORE).items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_caught_by_what_callers_catch_anyway(
    cls: type[errors.RdmaError], builtins: tuple[type[Exception], ...]
) -> None:
    for builtin in (*builtins, errors.RdmaError, Exception):
        with pytest.raises(builtin, match="read of 8 bytes"):
            raise cls("read of 8 bytes from trainer-0: it left")


@pytest.mark.parametrize("cls", [*FAMILY, *ABOVE_THE_CORE])
def test_survives_pickling_with_its_facts(cls: type[errors.RdmaError]) -> None:
    error = cls(
        "write of 8 bytes to a: b", peer="a", operation="write", size=8, cause="b", sys_errno=12, remote_state="unknown"
    )
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == "write of 8 bytes to a: b"
    assert vars(again) == vars(error)
    if isinstance(again, OSError):
        assert again.errno == 12


def test_cancelled_cancels_no_task() -> None:
    assert not issubclass(errors.Cancelled, asyncio.CancelledError)
    assert issubclass(errors.Cancelled, Exception)
