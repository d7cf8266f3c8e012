"""Exceptions of endpoints: what the caller gets, and what becomes of the actor."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest
from actor_client import LIMIT, Faults, Stage, hold

from monarch_rdma.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Port,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    context,
    current_rank,
    endpoint,
)


class WithState(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return WithState, (self.code,)


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("has a lock")
        self.lock = threading.Lock()


class Unloadable(Exception):
    """Its pickle calls `__init__` with one argument only."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class PickleFails(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("pickling this fails")


class TextFails(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Stumbler(Actor):
    @endpoint
    def fail(self, error: BaseException) -> None:
        raise error

    @endpoint
    async def fail_async(self, error: BaseException) -> None:
        raise error

    @concurrent_endpoint
    async def fail_aside(self, error: BaseException) -> None:
        await asyncio.sleep(0)
        raise error

    @endpoint
    def fail_with(self, kind: str) -> None:
        raise {"unpicklable": Unpicklable, "pickle fails": PickleFails, "text fails": TextFails}.get(
            kind, lambda: Unloadable(1, 2)
        )()

    @endpoint
    def fail_on(self, rank: int) -> int:
        if current_rank().rank == rank:
            raise LookupError(f"on {rank}")
        return current_rank().rank

    @endpoint
    def fail_because(self) -> None:
        try:
            {}["absent"]
        except KeyError as error:
            raise RuntimeError("the reason is above") from error

    @endpoint
    def fail_with_a_note(self) -> None:
        error = RuntimeError("noted")
        error.add_note("a note for people")
        raise error

    @endpoint
    def recurse(self) -> None:
        self.recurse()

    @endpoint
    def give(self, value: Any) -> Any:
        return value

    @endpoint
    def fail_after(self, started: Port[Any], text: str) -> None:
        hold(started)
        raise RuntimeError(text)

    @endpoint
    def exit(self) -> None:
        sys.exit(3)


class Sync(Actor):
    """Without async endpoints its thread has no event loop."""

    @endpoint
    def fail(self, error: BaseException) -> None:
        raise error

    @endpoint
    def give(self, value: Any) -> Any:
        return value


class Stillborn(Actor):
    def __init__(self, rank: int) -> None:
        if current_rank().rank == rank:
            raise ValueError(f"no {rank} is made")

    @endpoint
    def rank(self) -> int:
        return current_rank().rank


class Caller(Actor):
    @endpoint
    def call(self, other: Any) -> None:
        other.fail.call_one(KeyError("inner")).get(LIMIT)


@pytest.fixture(scope="module")
def stumblers(procs: ProcMesh) -> ActorMesh[Stumbler]:
    return procs.spawn("stumblers", Stumbler)


@pytest.fixture
def one(stumblers: ActorMesh[Stumbler]) -> Any:
    return stumblers.slice(gpus=1)


def error_of(future: Any) -> ActorError:
    with pytest.raises(ActorError) as caught:
        future.get(LIMIT)
    return caught.value


@pytest.mark.parametrize("method", ["fail", "fail_async", "fail_aside"])
def test_the_callers_error_has_the_exception_and_its_traceback(one: Any, method: str) -> None:
    error = error_of(getattr(one, method).call_one(KeyError("boom", 3)))
    assert repr(error.exception) == "KeyError('boom', 3)"
    assert f"Actor call stumblers.{method} failed" in error.message
    assert "Traceback" in str(error) and "in " + method in str(error) and "KeyError: ('boom', 3)" in str(error)
    assert one.give.call_one(1).get(LIMIT) == 1


def test_the_rank_that_failed_is_named(stumblers: Any) -> None:
    error = error_of(stumblers.fail_on.call(1))
    assert "on rank 1" in error.message
    assert str(error.exception) == "on 1"


def test_the_others_of_a_stream_give_their_values(stumblers: Any) -> None:
    outcomes = [future.exception(LIMIT) or future.get() for future in stumblers.fail_on.stream(0)]
    assert sorted(type(outcome) for outcome in outcomes if not isinstance(outcome, int)) == [ActorError]
    assert [outcome for outcome in outcomes if isinstance(outcome, int)] == [1]


def test_choose_raises_too(stumblers: Any) -> None:
    assert isinstance(error_of(stumblers.fail.choose(OSError(5, "chosen"))).exception, OSError)


def test_an_exception_is_of_its_own_class_with_its_state(one: Any) -> None:
    exception = error_of(one.fail.call_one(WithState(7))).exception
    assert type(exception) is WithState
    assert exception.code == 7


def test_exceptions_of_classes_made_at_run_time_come_back(one: Any) -> None:
    class Local(Exception):
        pass

    error = error_of(one.fail.call_one(Local("made here")))
    assert type(error.exception).__name__ == "Local"
    assert "made here" in str(error)


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("unpicklable", "Unpicklable", "has a lock"),
        ("pickle fails", "PickleFails", ""),
        ("unloadable", "Unloadable", "1 and 2"),
        ("text fails", "TextFails", ""),
    ],
)
def test_exceptions_that_cannot_travel_come_back_as_text(one: Any, kind: str, name: str, text: str) -> None:
    error = error_of(one.fail_with.call_one(kind))
    assert name in str(error) and text in str(error)
    assert one.give.call_one(1).get(LIMIT) == 1


def test_causes_and_notes_are_in_the_text(one: Any) -> None:
    text = str(error_of(one.fail_because.call_one()))
    assert "KeyError: 'absent'" in text and "direct cause" in text and "the reason is above" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_notes_are_in_the_text(one: Any) -> None:
    assert "a note for people" in str(error_of(one.fail_with_a_note.call_one()))


def test_a_group_of_exceptions_comes_back_whole(one: Any) -> None:
    group = pytest.importorskip("builtins").ExceptionGroup("both", [ValueError("a"), OSError("b")])
    error = error_of(one.fail.call_one(group))
    assert [type(part) for part in error.exception.exceptions] == [ValueError, OSError]


def test_endless_recursion_is_an_ordinary_failure(one: Any) -> None:
    assert isinstance(error_of(one.recurse.call_one()).exception, RecursionError)
    assert one.give.call_one(1).get(LIMIT) == 1


def test_a_giant_exception_is_cut(one: Any) -> None:
    error = error_of(one.fail.call_one(ValueError("x" * (4 << 20))))
    assert len(str(error)) < 1 << 20


@pytest.mark.parametrize("method", ["fail", "fail_async"])
@pytest.mark.parametrize("error", [StopIteration(1), asyncio.CancelledError("own"), TimeoutError("own")])
def test_exceptions_with_a_meaning_of_their_own_are_failures_like_others(
    procs: ProcMesh, method: str, error: BaseException
) -> None:
    stumbler = procs.spawn("special", Stumbler).slice(gpus=0)
    assert getattr(stumbler, method).call_one(error).exception(LIMIT) is not None
    assert stumbler.give.call_one(1).get(LIMIT) == 1


def test_exceptions_may_be_values(one: Any) -> None:
    given = one.give.call_one(ValueError("returned")).get(LIMIT)
    assert repr(given) == "ValueError('returned')"


def test_an_error_that_passes_two_actors_keeps_both_tracebacks(procs: ProcMesh, one: Any) -> None:
    caller = procs.spawn("caller", Caller).slice(gpus=0)
    error = error_of(caller.call.call_one(one))
    assert isinstance(error.exception, ActorError)
    assert isinstance(error.exception.exception, KeyError)
    assert "Actor call caller.call failed" in str(error) and "Actor call stumblers.fail failed" in str(error)


def test_each_call_gets_its_own_error(one: Any) -> None:
    futures = [one.fail.call_one(ValueError(i)) if i % 2 else one.give.call_one(i) for i in range(20)]
    outcomes = [future.exception(LIMIT) or future.get() for future in futures]
    assert [error.exception.args[0] if i % 2 else error for i, error in enumerate(outcomes)] == list(range(20))


def test_the_first_failure_ends_a_call_although_others_still_run(stumblers: Any) -> None:
    stage = Stage()
    failing = stumblers.fail_after.call(stage.port, "early")
    first, second = stage.next(), stage.next()
    first.send(None)
    assert "early" in str(error_of(failing))
    second.send(None)
    assert list(stumblers.give.call(2).get(LIMIT).values()) == [2, 2]


# --- what ends an actor


@pytest.mark.parametrize("cls", [Stumbler, Sync])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_exceptions_that_end_programs_end_the_actor(
    procs: ProcMesh, faults: Faults, cls: Any, error: BaseException
) -> None:
    doomed = procs.spawn("doomed", cls).slice(gpus=0)
    assert doomed.fail.call_one(error).exception(LIMIT) is not None
    failure = faults.next()
    assert (failure.mesh_name, failure.kind, failure.rank) == ("doomed", "actor", 0)
    with pytest.raises(SupervisionError, match="doomed"):
        doomed.give.call_one(1).get(LIMIT)


@pytest.mark.parametrize("method", ["fail", "fail_async", "fail_aside"])
def test_a_failure_that_nobody_waits_for_ends_the_actor(procs: ProcMesh, faults: Faults, method: str) -> None:
    doomed = procs.spawn("doomed", Stumbler)
    getattr(doomed.slice(gpus=1), method).broadcast(ValueError("unheard"))
    failure = faults.next()
    assert (failure.mesh_name, failure.kind, failure.rank) == ("doomed", "actor", 1)
    assert "ValueError: unheard" in failure.report()
    with pytest.raises(SupervisionError, match="doomed"):
        doomed.give.call(1).get(LIMIT)
    assert doomed.slice(gpus=0).give.call_one(1).get(LIMIT) == 1


def test_what_waits_behind_a_fatal_message_is_refused(procs: ProcMesh, faults: Faults) -> None:
    doomed, stage = procs.spawn("doomed", Stumbler).slice(gpus=0), Stage()
    doomed.fail_after.broadcast(stage.port, "fatal")
    waiting = [doomed.give.call_one(i) for i in range(10)]
    stage.next().send(None)
    assert all(isinstance(future.exception(LIMIT), SupervisionError) for future in waiting)
    assert "fatal" in faults.next().report()


def test_an_actor_that_was_not_born_says_why(procs: ProcMesh, faults: Faults) -> None:
    stillborn = procs.spawn("stillborn", Stillborn, 1)
    with pytest.raises(ActorError, match="no 1 is made"):
        stillborn.initialized.get(LIMIT)
    assert "no 1 is made" in faults.next().report()
    with pytest.raises(SupervisionError, match="no 1 is made"):
        stillborn.rank.call().get(LIMIT)
    assert stillborn.slice(gpus=0).rank.call_one().get(LIMIT) == 0


def test_an_aborted_actor_fails_after_its_answer(procs: ProcMesh, faults: Faults) -> None:
    doomed = procs.spawn("doomed", Aborter).slice(gpus=0)
    assert doomed.abort_yourself.call_one().get(LIMIT) == "answered"
    assert "I want to" in faults.next().report()
    with pytest.raises(SupervisionError, match="I want to"):
        doomed.abort_yourself.call_one().get(LIMIT)


class Aborter(Actor):
    @endpoint
    def abort_yourself(self) -> str:
        context().actor_instance.abort("I want to")
        return "answered"
