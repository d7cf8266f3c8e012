"""Exceptions that cross processes: they arrive as themselves, or as text, and never break the way."""

from __future__ import annotations

import pickle
import sys
import traceback
from typing import Any

import pytest

from monarch_rdma.actor.remote_error import ActorError, RemoteError, RemoteException
from monarch_rdma.errors import PeerLost, ProtocolError


def raised(exc: BaseException) -> BaseException:
    """The exception with a traceback, as a handler's has one."""
    try:
        raise exc
    except BaseException as caught:
        return caught


def over(exc: BaseException, **options: Any) -> ActorError:
    """What a caller gets, after a way through bytes."""
    packed = RemoteError.pack(raised(exc), actor="trainer", rank=3, endpoint="step", **options)
    return RemoteError.from_tuple(pickle.loads(pickle.dumps(packed.to_tuple()))).unpack()


class TwoArguments(Exception):
    """Pickles, but cannot be loaded: its pickle has one argument."""

    def __init__(self, a: object, b: object) -> None:
        super().__init__(a)


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


class LoadsAsSomethingElse(Exception):
    def __reduce__(self) -> Any:
        return dict, ()


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class BrokenAttributes(Exception):
    @property
    def __suppress_context__(self) -> bool:
        raise RuntimeError("broken")

    @__suppress_context__.setter
    def __suppress_context__(self, _: bool) -> None:
        raise RuntimeError("broken")


class WithState(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return WithState, (self.code,)


def test_the_exception_itself_comes_back() -> None:
    error = over(KeyError("boom", 3))
    assert type(error.exception) is KeyError
    assert error.exception.args == ("boom", 3)
    assert error.message == "Actor call trainer.step failed on rank 3."
    assert repr(error) == "ActorError(KeyError('boom', 3), 'Actor call trainer.step failed on rank 3.')"


def test_its_text_names_actor_rank_and_the_remote_traceback() -> None:
    text = str(over(ValueError("bad step")))
    assert text.startswith("Actor call trainer.step failed on rank 3.\n Traceback of where the remote call failed")
    assert "in raised" in text
    assert text.rstrip().endswith("ValueError: bad step")


def test_state_and_our_own_errors_survive() -> None:
    error = over(WithState(7))
    assert isinstance(error.exception, WithState)
    assert error.exception.code == 7
    lost = over(PeerLost("node 3 is gone", peer="node3", operation="read"))
    assert isinstance(lost.exception, PeerLost)
    assert lost.exception.peer == "node3"


def test_an_exception_of_a_local_class_comes_back() -> None:
    class Local(Exception):
        pass

    assert type(over(Local("here")).exception).__name__ == "Local"


@pytest.mark.parametrize(
    ("exc", "name", "text"),
    [
        (TwoArguments("a", "b"), "TwoArguments", "a"),
        (Unpicklable("cannot go"), "Unpicklable", "cannot go"),
        (LoadsAsSomethingElse("odd"), "LoadsAsSomethingElse", "odd"),
        (ValueError("held", sys._getframe()), "ValueError", "held"),
        (ValueError("x" * 3_000_000), "ValueError", "left out"),
    ],
    ids=["unpickling raises", "pickling raises", "no exception", "unpicklable argument", "too large"],
)
def test_what_cannot_travel_comes_back_as_text(exc: Exception, name: str, text: str) -> None:
    error = over(exc)
    assert isinstance(error.exception, RemoteException)
    assert error.exception.type_name.endswith(name)
    assert text in error.exception.text
    assert text in str(error)
    assert len(str(error)) < 70_000


def test_an_exception_without_text_does_not_break_the_way() -> None:
    error = over(NoText())
    assert "NoText" in str(error)
    assert "NoText" in repr(error)


def test_an_exception_that_breaks_the_traceback_module_does_not_break_the_way() -> None:
    assert "BrokenAttributes" in str(over(BrokenAttributes("bad")))


def test_causes_contexts_and_notes_are_in_the_text() -> None:
    try:
        try:
            raise OSError("disk gone")
        except OSError as cause:
            error = ValueError("no data")
            if sys.version_info >= (3, 11):
                error.add_note("while loading shard 5")
            raise error from cause
    except ValueError as caught:
        text = str(over(caught))
    assert "OSError: disk gone" in text
    assert "direct cause" in text
    assert ("while loading shard 5" in text) == (sys.version_info >= (3, 11))


def test_a_context_that_was_suppressed_stays_so() -> None:
    error = ValueError("second")
    error.__context__, error.__suppress_context__ = OSError("first"), True
    assert "first" not in str(over(error))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_exception_groups() -> None:
    group = ExceptionGroup("several", [ValueError("a"), ExceptionGroup("inner", [KeyError("b")])])  # type: ignore[name-defined,unused-ignore]  # noqa: F821
    error = over(group)
    assert [type(member) for member in error.exception.exceptions] == [ValueError, type(group)]  # type: ignore[attr-defined]
    assert "KeyError: 'b'" in str(error)
    mixed = over(ExceptionGroup("several", [ValueError("a"), Unpicklable("b")]))  # type: ignore[name-defined,unused-ignore]  # noqa: F821
    assert isinstance(mixed.exception, RemoteException)
    assert "Unpicklable: b" in str(mixed)


def test_exceptions_that_are_no_errors() -> None:
    for exc in (KeyboardInterrupt(), SystemExit(3), GeneratorExit()):
        assert type(over(exc).exception) is type(exc)


def test_long_tracebacks_lose_their_middle() -> None:
    text = over(ValueError("begin" + "x" * 200_000 + "end")).exception_formatted
    assert len(text) <= 64 << 10
    assert text.startswith("Traceback")
    assert "characters left out" in text
    assert text.endswith("end\n")


def test_endless_recursion_stays_short() -> None:
    def deep() -> None:
        deep()

    try:
        deep()
    except RecursionError as caught:
        error = over(caught)
    assert type(error.exception) is RecursionError
    assert len(str(error)) < 70_000


def test_as_text_no_pickle_is_made_or_loaded() -> None:
    error = over(ValueError("plain"), as_text=True)
    assert isinstance(error.exception, RemoteException)
    assert str(error.exception) == "ValueError: plain"
    with_pickle = RemoteError.pack(ValueError("x"), actor="a")
    assert with_pickle.pickled is not None
    assert isinstance(with_pickle.unpack(as_text=True).exception, RemoteException)


def test_an_actor_error_can_be_pickled_and_sent_on() -> None:
    error = over(ValueError("deep"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert type(again.exception) is ValueError
    outer = over(error)
    assert isinstance(outer.exception, ActorError)
    assert type(outer.exception.exception) is ValueError
    assert "ValueError: deep" in str(outer)


def test_made_by_hand_it_has_the_exceptions_own_traceback() -> None:
    error = ActorError(raised(ValueError("here")))
    assert error.message == "A remote actor call has failed."
    assert "in raised" in str(error)
    assert "ActorError" in traceback.format_exception_only(type(error), error)[0]


def test_without_rank_and_endpoint() -> None:
    assert RemoteError.pack(ValueError(), actor="mesh").message == "Actor call mesh failed."


@pytest.mark.parametrize(
    "value",
    [None, (), ("a",) * 4, ("a",) * 5, ("a",) * 3 + (b"a", None), ["a", "a", "a", "a", None], ("a",) * 4 + (None, 1)],
)
def test_a_malformed_one_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError, match="remote error is malformed"):
        RemoteError.from_tuple(value)
