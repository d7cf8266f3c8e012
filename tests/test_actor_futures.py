"""Futures of calls: waiting in threads and in loops, once and again."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from actor_client import LIMIT, Stage, hold, hold_async

from monarch_rdma.actor import (
    Actor,
    ActorError,
    Channel,
    Future,
    HostMesh,
    Port,
    ProcMesh,
    concurrent_endpoint,
    endpoint,
    returns_future,
)


async def get_in_a_loop(worker: Any, value: Any) -> tuple[Any, list[str]]:
    """A call's answer by get(), and the warnings of that. The call ends only after a warning: get() of one that has
    ended blocks nothing, and warns of nothing."""
    started, receiver = Channel.open()
    answer = worker.wait.call_one(started)
    go_on = await receiver.recv()
    said: list[str] = []

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        said.append(str(message))
        go_on.send(value)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        return answer.get(LIMIT), said


class Worker(Actor):
    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def fail(self) -> None:
        raise LookupError("failed")

    @concurrent_endpoint
    async def wait(self, started: Port[Any]) -> Any:
        return await hold_async(started)

    @endpoint
    async def ask(self, other: Any, count: int) -> list[int]:
        return list(await asyncio.gather(*[other.echo.call_one(number) for number in range(count)]))

    @endpoint
    async def ask_blocking(self, other: Any, value: Any) -> Any:
        return await get_in_a_loop(other, value)


class SyncWorker(Actor):
    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint
    def ask(self, other: Any, value: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return other.echo.call_one(value).get(LIMIT)


@pytest.fixture(scope="module")
def workers(procs: ProcMesh) -> Any:
    return procs.spawn("workers", Worker)


@pytest.fixture
def one(workers: Any) -> Any:
    return workers.slice(gpus=0)


def test_futures_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="returned by a call"):
        Future()


def test_futures_cannot_be_sent(one: Any) -> None:
    future = one.echo.call_one(1)
    with pytest.raises(ValueError, match="Future cannot be sent"):
        pickle.dumps(future)
    assert future.get(LIMIT) == 1


# --- in threads


def test_a_result_can_be_asked_for_again(one: Any) -> None:
    future = one.echo.call_one([1])
    first = future.get(LIMIT)
    assert first == [1]
    assert future.get() is first
    assert future.result() is first
    assert future.exception() is None
    assert future.done()


def test_an_error_can_be_asked_for_again(one: Any) -> None:
    future = one.fail.call_one()
    for _ in range(3):
        with pytest.raises(ActorError, match="failed"):
            future.get(LIMIT)
    assert isinstance(future.exception(), ActorError)
    with pytest.raises(ActorError):
        future.result()


@pytest.mark.parametrize("ask", ["get", "result", "exception"])
def test_a_timeout_leaves_the_call_running(one: Any, ask: str) -> None:
    stage = Stage()
    future = one.wait.call_one(stage.port)
    with pytest.raises(TimeoutError):
        getattr(future, ask)(timeout=0.01)
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.get(timeout=0)
    stage.next().send("in time")
    assert future.get(LIMIT) == "in time"


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon"])
def test_a_timeout_that_is_none_is_refused(one: Any, timeout: Any) -> None:
    stage = Stage()
    future = one.wait.call_one(stage.port)
    with pytest.raises(ValueError, match="timeout"):
        future.get(timeout=timeout)
    stage.next().send(None)
    future.get(LIMIT)
    for ask in (future.get, future.exception):
        with pytest.raises(ValueError, match="timeout"):
            ask(timeout=timeout)


def test_many_threads_wait_for_one_future(one: Any) -> None:
    stage = Stage()
    future = one.wait.call_one(stage.port)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(future.get, LIMIT) for _ in range(8)]
        stage.next().send({"shared": True})
        values = [result.result(LIMIT) for result in waiting]
    assert all(value is values[0] for value in values)


def test_threads_call_at_the_same_time(workers: Any) -> None:
    def call(number: int) -> list[int]:
        return [sum(workers.echo.call(number * 100 + i).get(LIMIT).values()) for i in range(50)]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(call, range(6))) == [[2 * (n * 100 + i) for i in range(50)] for n in range(6)]


def test_a_thread_may_ask_for_what_another_called(one: Any) -> None:
    future = one.echo.call_one("across")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(future.get(LIMIT)))
    thread.start()
    thread.join(LIMIT)
    assert found == ["across"]


def test_a_result_that_nobody_asks_for_is_dropped(one: Any) -> None:
    future = one.echo.call_one(1)
    future.get(LIMIT)
    gone = weakref.ref(future)
    del future
    gc.collect()
    assert gone() is None


# --- in loops


def test_a_future_can_be_awaited_again(one: Any) -> None:
    async def main() -> None:
        future = one.echo.call_one([1])
        assert await future is await future
        assert await asyncio.gather(*[_awaited(future) for _ in range(5)]) == [[1]] * 5
        failing = one.fail.call_one()
        for _ in range(2):
            with pytest.raises(ActorError):
                await failing

    asyncio.run(main())


async def _awaited(future: Any) -> Any:
    return await future


def test_a_future_is_awaited_in_two_loops_and_a_thread(one: Any) -> None:
    stage = Stage()
    future = one.wait.call_one(stage.port)

    async def main() -> Any:
        return await future

    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(asyncio.run, main()), pool.submit(asyncio.run, main()), pool.submit(future.get, LIMIT)]
        stage.next().send("for all")
        assert [result.result(LIMIT) for result in results] == ["for all"] * 3
    assert asyncio.run(main()) == "for all"


def test_futures_are_gathered(one: Any) -> None:
    async def main() -> list[int]:
        return list(await asyncio.gather(*[one.echo.call_one(number) for number in range(200)]))

    assert asyncio.run(main()) == list(range(200))


def test_calls_of_an_asyncio_program_overlap(one: Any) -> None:
    async def main() -> list[Any]:
        stage = Stage()
        futures = [one.wait.call_one(stage.port) for _ in range(3)]
        ports = [await stage._receiver.recv() for _ in futures]
        for number, port in reversed(list(enumerate(ports))):
            port.send(number)
        return [await future for future in futures]

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_stream_is_awaited(workers: Any) -> None:
    async def main() -> list[int]:
        return [await future for future in workers.echo.stream(3)]

    assert asyncio.run(main()) == [3, 3]


def test_a_wait_that_times_out_leaves_the_call_running(one: Any) -> None:
    async def main() -> Any:
        stage = Stage()
        future = one.wait.call_one(stage.port)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)
        (await stage._receiver.recv()).send("later")
        return await asyncio.wait_for(future, LIMIT)

    assert asyncio.run(main()) == "later"


def test_as_asyncio_gives_the_loops_own_future(one: Any) -> None:
    async def main() -> None:
        assert await one.echo.call_one(1).as_asyncio() == 1
        with pytest.raises(ActorError):
            await one.fail.call_one().as_asyncio()
        done, pending = await asyncio.wait([one.echo.call_one(number).as_asyncio() for number in range(3)])
        assert sorted(future.result() for future in done) == [0, 1, 2]
        assert not pending

    asyncio.run(main())


@pytest.mark.parametrize("use", ["as_asyncio", "__await__"])
def test_loops_futures_need_a_loop(one: Any, use: str) -> None:
    stage = Stage()
    future = one.wait.call_one(stage.port)
    with pytest.raises((RuntimeError, ValueError)):
        next(iter(getattr(future, use)()))
    stage.next().send(None)
    future.get(LIMIT)


def test_a_loop_that_closed_meanwhile_does_not_matter(one: Any) -> None:
    stage = Stage()
    future = one.wait.call_one(stage.port)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)

    asyncio.run(give_up())
    stage.next().send("still")
    assert future.get(LIMIT) == "still"


def test_get_in_a_running_loop_warns_and_works(one: Any) -> None:
    value, said = asyncio.run(get_in_a_loop(one, 1))
    assert value == 1
    assert len(said) == 1 and "blocks the running event loop" in said[0]


# --- in actors


def test_actors_await_calls(workers: Any) -> None:
    first, second = workers.slice(gpus=0), workers.slice(gpus=1)
    assert first.ask.call_one(second, 100).get(LIMIT) == list(range(100))


def test_get_in_an_async_actor_warns_and_works(workers: Any) -> None:
    value, said = workers.slice(gpus=0).ask_blocking.call_one(workers.slice(gpus=1), "x").get(LIMIT)
    assert value == "x"
    assert len(said) == 1 and "blocks the running event loop" in said[0]


def test_get_in_a_sync_actor_is_as_it_should_be(procs: ProcMesh) -> None:
    mesh = procs.spawn("sync", SyncWorker)
    assert mesh.slice(gpus=0).ask.call_one(mesh.slice(gpus=1), "x").get(LIMIT) == "x"


def test_this_host_works_in_an_asyncio_program(client: HostMesh) -> None:
    async def main() -> list[int]:
        async with client.spawn_procs({"n": 2}) as procs:
            mesh = procs.spawn("inside", Worker)
            await mesh.initialized
            return list((await mesh.echo.call(7)).values())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(main()) == [7, 7]


def test_returns_future_makes_one_of_a_coroutine_function(one: Any) -> None:
    @returns_future
    async def doubled(x: int) -> int:
        return 2 * await one.echo.call_one(x)

    @returns_future
    async def failing() -> None:
        raise LookupError("own")

    assert doubled(4).get(LIMIT) == 8
    with pytest.raises(LookupError, match="own"):
        failing().get(LIMIT)
    with pytest.raises(TypeError, match="async function"):
        returns_future(len)
