"""The ways to call an endpoint, and what is refused at the call."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from actor_client import LIMIT, Stage, hold_async

from monarch_rdma.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    Port,
    ProcMesh,
    ValueMesh,
    as_endpoint,
    concurrent_endpoint,
    current_rank,
    endpoint,
    send,
)


class Speaker(Actor):
    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.heard: list[Any] = []

    @endpoint
    def add(self, x: int) -> int:
        return self.base + x + 10 * current_rank().rank

    @endpoint
    async def add_async(self, x: int) -> int:
        return self.base + x + 10 * current_rank().rank

    @endpoint
    def given(self, a: Any, b: Any = "b", *rest: Any, key: Any = None, **more: Any) -> Any:
        return a, b, rest, key, more

    @endpoint
    def exactly(self, a: int, *, key: int) -> tuple[int, int]:
        return a, key

    @endpoint
    def hear(self, what: Any) -> None:
        self.heard.append(what)

    @endpoint
    def all_heard(self) -> list[Any]:
        return self.heard

    @endpoint
    def unpicklable(self) -> Any:
        return threading.Lock()

    @endpoint
    async def wait(self, started: Port[Any]) -> int:
        await hold_async(started)
        return current_rank().rank

    @endpoint
    def where(self) -> tuple[int, int]:
        return os.getpid(), current_rank().rank

    @endpoint
    async def twice(self, x: int) -> int:
        return self.add(x) + await self.add_async(x)

    @endpoint
    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    def plain(self, x: int) -> int:
        return self.base + x

    async def plain_async(self, x: int) -> int:
        await asyncio.sleep(0)
        return self.base + x


class Quiet(Speaker):
    """Inherits endpoints and overrides one."""

    @endpoint
    def add(self, x: int) -> int:
        return -x


class Named(Actor):
    """Arguments of every kind reach `__init__`."""

    def __init__(self, first: str, *rest: str, last: str) -> None:
        self.names = [first, *rest, last]

    @endpoint
    def all(self) -> list[str]:
        return self.names


@pytest.fixture(scope="module")
def speakers(procs: ProcMesh) -> ActorMesh[Speaker]:
    return procs.spawn("speakers", Speaker, 100)


@pytest.fixture
def one(speakers: ActorMesh[Speaker]) -> Any:
    return speakers.slice(gpus=0)


def test_call_gives_a_value_of_each_rank(speakers: Any) -> None:
    values = speakers.add.call(1).get(LIMIT)
    assert isinstance(values, ValueMesh)
    assert values.sizes == {"gpus": 2}
    assert [(dict(point), value) for point, value in values.items()] == [({"gpus": 0}, 101), ({"gpus": 1}, 111)]


def test_call_one_gives_the_value(one: Any) -> None:
    assert one.add.call_one(1).get(LIMIT) == 101


def test_call_one_of_many_is_refused_at_the_call(speakers: Any) -> None:
    with pytest.raises(ValueError, match="call_one requires exactly 1 actor, but mesh has 2"):
        speakers.add.call_one(1)


def test_choose_calls_one_that_keeps_its_rank(speakers: Any) -> None:
    answers = {speakers.add.choose(1).get(LIMIT) for _ in range(40)}
    assert answers == {101, 111}


def test_stream_gives_results_in_the_order_of_their_arrival(speakers: Any) -> None:
    stage = Stage()
    results = speakers.wait.stream(stage.port)
    first, second = stage.next(), stage.next()
    second.send(None)
    early = next(results).get(LIMIT)
    first.send(None)
    late = next(results).get(LIMIT)
    assert sorted([early, late]) == [0, 1]
    assert next(results, None) is None


def test_stream_sends_at_the_call(speakers: Any) -> None:
    results = speakers.hear.stream("streamed")
    assert all("streamed" in heard for heard in speakers.all_heard.call().get(LIMIT).values())
    assert [future.get(LIMIT) for future in results] == [None, None]


def test_broadcast_reaches_all_and_returns_nothing(speakers: Any) -> None:
    assert speakers.hear.broadcast("broadcast") is None
    assert all(heard[-1] == "broadcast" for heard in speakers.all_heard.call().get(LIMIT).values())


def test_send_without_a_port_drops_the_answers(speakers: Any) -> None:
    assert send(speakers.hear, ("sent",), {}) is None
    assert all(heard[-1] == "sent" for heard in speakers.all_heard.call().get(LIMIT).values())
    send(speakers.hear, ("chosen",), {}, selection="choose")
    ends = [heard[-1] for heard in speakers.all_heard.call().get(LIMIT).values()]
    assert sorted(ends) == ["chosen", "sent"]


def test_send_knows_two_selections(speakers: Any) -> None:
    with pytest.raises(ValueError, match="selection.*'few'"):
        send(speakers.hear, ("x",), {}, selection="few")


def test_accumulate_folds_from_the_identity(speakers: Any) -> None:
    assert Accumulator(speakers.add, 1000, lambda a, b: a + b).accumulate(1).get(LIMIT) == 1000 + 101 + 111


def test_a_failure_ends_an_accumulation(speakers: Any) -> None:
    with pytest.raises(ActorError) as caught:
        Accumulator(speakers.apply, 0, lambda a, b: a + b).accumulate(divmod, 1, 0).get(LIMIT)
    assert isinstance(caught.value.exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("args", "kwargs", "wanted"),
    [
        ((1,), {}, (1, "b", (), None, {})),
        ((1, 2, 3, 4), {}, (1, 2, (3, 4), None, {})),
        ((), {"a": 1, "key": 2, "other": 3}, (1, "b", (), 2, {"other": 3})),
        ((None,), {"b": None}, (None, None, (), None, {})),
    ],
)
def test_arguments_arrive_as_they_were_given(one: Any, args: Any, kwargs: Any, wanted: Any) -> None:
    assert one.given.call_one(*args, **kwargs).get(LIMIT) == wanted


@pytest.mark.parametrize("adverb", ["call", "choose", "stream", "broadcast"])
@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {"key": 1}, "missing a required argument: 'a'"),
        ((1,), {}, "missing a required.*argument: 'key'"),
        ((1, 2), {"key": 1}, "too many positional arguments"),
        ((1,), {"key": 1, "nokey": 2}, "got an unexpected keyword argument 'nokey'"),
        ((1,), {"a": 1, "key": 1}, "multiple values for argument 'a'"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(
    speakers: Any, adverb: str, args: Any, kwargs: Any, problem: str
) -> None:
    with pytest.raises(TypeError, match=problem):
        getattr(speakers.exactly, adverb)(*args, **kwargs)


def test_an_argument_that_cannot_be_pickled_is_refused_and_nothing_sent(one: Any) -> None:
    before = one.all_heard.call_one().get(LIMIT)
    with pytest.raises(TypeError, match="cannot pickle"):
        one.hear.call_one(threading.Lock())
    assert one.all_heard.call_one().get(LIMIT) == before


def test_a_result_that_cannot_be_pickled_is_the_callers_error(one: Any) -> None:
    with pytest.raises(ActorError, match="cannot pickle '_thread.lock' object"):
        one.unpicklable.call_one().get(LIMIT)
    assert one.add.call_one(0).get(LIMIT) == 100


def test_sync_and_async_endpoints_live_in_one_class(speakers: Any) -> None:
    assert list(speakers.add_async.call(2).get(LIMIT).values()) == [102, 112]
    assert list(speakers.add.call(2).get(LIMIT).values()) == [102, 112]


def test_endpoints_call_each_other_as_methods(one: Any) -> None:
    assert one.twice.call_one(1).get(LIMIT) == 202


def test_endpoints_are_inherited_and_overridden(procs: ProcMesh) -> None:
    quiet = procs.spawn("quiet", Quiet, 5).slice(gpus=1)
    assert quiet.add.call_one(3).get(LIMIT) == -3
    assert quiet.add_async.call_one(3).get(LIMIT) == 8


def test_init_takes_all_kinds_of_arguments(procs: ProcMesh) -> None:
    named = procs.spawn("named", Named, "a", "b", "c", last="d")
    assert named.slice(gpus=0).all.call_one().get(LIMIT) == ["a", "b", "c", "d"]


def test_classes_and_functions_made_at_run_time_travel(procs: ProcMesh) -> None:
    offset = 7

    class Made(Actor):
        @endpoint
        def apply(self, function: Callable[[int], int], x: int) -> int:
            return function(x) + offset

    made = procs.spawn("made", Made).slice(gpus=0)
    assert made.apply.call_one(lambda x: x * offset, 3).get(LIMIT) == 28


def test_an_actor_can_be_used_as_a_plain_object() -> None:
    plain = Speaker(1)
    plain.hear("x")
    assert plain.heard == ["x"]
    assert plain.plain(1) == 2


def test_a_method_that_is_no_endpoint_says_how_to_call_it(one: Any) -> None:
    with pytest.raises(RuntimeError, match="plain is not annotated as an endpoint.*as_endpoint"):
        one.plain(1)
    with pytest.raises(AttributeError, match="plain is not annotated as an endpoint.*as_endpoint"):
        one.plain.call_one(1)


@pytest.mark.parametrize("name", ["plain", "plain_async"])
def test_as_endpoint_calls_methods_that_are_none(one: Any, name: str) -> None:
    assert as_endpoint(getattr(one, name)).call_one(1).get(LIMIT) == 101


def test_as_endpoint_of_something_else_is_refused(one: Any) -> None:
    with pytest.raises(ValueError, match="not a method of a spawned actor"):
        as_endpoint(one.add)
    with pytest.raises(ValueError, match="not a method of a spawned actor"):
        as_endpoint(len)


def test_an_unknown_endpoint_is_an_attribute_error(one: Any) -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = one.nothing


def test_an_endpoint_cannot_be_called_directly(one: Any) -> None:
    with pytest.raises(TypeError, match=r"add is an endpoint .*\.call_one"):
        one.add(1)


def test_only_actors_can_be_spawned(procs: ProcMesh) -> None:
    with pytest.raises(ValueError, match="int.*must be a subclass of Actor"):
        procs.spawn("number", int)


@pytest.mark.parametrize("name", ["slice", "stop", "extent"])
def test_an_endpoint_with_the_name_of_a_meshs_attribute_is_refused(procs: ProcMesh, name: str) -> None:
    clash = type("Clash", (Actor,), {name: endpoint(lambda self: None)})
    with pytest.raises(ValueError, match=name):
        procs.spawn("clash", clash)


def test_concurrent_endpoints_are_async() -> None:
    with pytest.raises(ValueError, match="must be `async def`"):
        concurrent_endpoint(lambda self: None)


def test_two_meshes_of_one_name_are_two(procs: ProcMesh) -> None:
    first, second = (procs.spawn("same", Speaker, base).slice(gpus=0) for base in (1, 2))
    assert [mesh.add.call_one(0).get(LIMIT) for mesh in (first, second)] == [1, 2]


def test_an_argument_may_be_changed_when_the_call_returns(one: Any) -> None:
    numbers, table = [1, 2], {"deep": [1]}
    echoed = one.echo.call_one((numbers, table))
    numbers.append(3)
    table["deep"].append(2)
    assert echoed.get(LIMIT) == ([1, 2], {"deep": [1]})


def test_a_result_is_a_copy(one: Any) -> None:
    one.all_heard.call_one().get(LIMIT).append("not heard")
    assert "not heard" not in one.all_heard.call_one().get(LIMIT)


def test_each_rank_is_in_a_process_of_its_own(speakers: Any) -> None:
    found = list(speakers.where.call().get(LIMIT).values())
    assert [rank for _, rank in found] == [0, 1]
    assert len({pid for pid, _ in found} | {os.getpid()}) == 3


@pytest.mark.parametrize("value", [None, 1 << 100, "ü" * 1000, b"\0" * 100_000, {"a": [1.5, (2, {3})]}, float("inf")])
def test_values_come_back_as_they_went(one: Any, value: Any) -> None:
    assert one.echo.call_one(value).get(LIMIT) == value


def test_a_safe_call_takes_plain_values_only(one: Any) -> None:
    safe = one.echo.options(codec="safe")
    assert safe.call_one({"a": [1, 2.5, b"x"]}).get(LIMIT) == {"a": [1, 2.5, b"x"]}
    with pytest.raises(ValueError, match=r"args\[0\].*object"):
        safe.call_one(object())
