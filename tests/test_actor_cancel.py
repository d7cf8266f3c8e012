"""Calls that are given up: by their caller, by a timeout, by the end of who would wait."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from actor_client import LIMIT, Stage, hold, hold_async, wait_until

from monarch_rdma.actor import Actor, Channel, Port, ProcMesh, concurrent_endpoint, context, endpoint, this_proc
from monarch_rdma.actor.runtime.instance import Instance
from monarch_rdma.actor.runtime.message import Frame
from monarch_rdma.errors import Cancelled, TransferTimeout


class Patient(Actor):
    def __init__(self) -> None:
        self.log: list[Any] = []

    @endpoint
    async def wait(self, started: Port[Any]) -> Any:
        return await self._wait(started)

    @concurrent_endpoint
    async def wait_aside(self, started: Port[Any]) -> Any:
        return await self._wait(started)

    async def _wait(self, started: Port[Any]) -> Any:
        try:
            return await hold_async(started)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    @endpoint
    async def wait_stubbornly(self, started: Port[Any]) -> str:
        try:
            await hold_async(started)
        except asyncio.CancelledError:
            self.log.append("cancelled, and went on")
        await asyncio.sleep(0)
        return "done"

    @endpoint
    async def note(self, what: Any) -> None:
        self.log.append(what)

    @endpoint
    async def history(self) -> list[Any]:
        return self.log

    @endpoint
    async def cancellations(self) -> int:
        """That asyncio counts for the task: task groups go wrong where some are left over. Python 3.11 begins to."""
        task = asyncio.current_task()
        return int(task.cancelling()) if hasattr(task, "cancelling") else 0

    @endpoint
    async def uses_a_timeout(self) -> str:
        """asyncio's own, which relies on how tasks count cancellations."""
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        except asyncio.TimeoutError:
            return "timed out"
        return "?"


class SyncPatient(Actor):
    def __init__(self) -> None:
        self.log: list[Any] = []

    @endpoint
    def wait_until_cancelled(self, started: Port[Any]) -> None:
        started.send(None)
        running = threading.Event()
        while not context().is_cancelled:
            running.wait(0.001)
        self.log.append("saw it")

    @endpoint
    def wait(self, started: Port[Any]) -> Any:
        return hold(started)

    @endpoint
    def note(self, what: Any) -> None:
        self.log.append(what)

    @endpoint
    def history(self) -> list[Any]:
        return self.log


@pytest.fixture
def patient(procs: ProcMesh) -> Any:
    return procs.spawn("patient", Patient).slice(gpus=0)


@pytest.fixture
def sync_patient(procs: ProcMesh) -> Any:
    return procs.spawn("sync patient", SyncPatient).slice(gpus=1)


def eventually(actor: Any, *wanted: Any) -> None:
    wait_until(
        lambda: actor.history.call_one().get(LIMIT) == list(wanted),
        lambda: f"{actor.history.call_one().get(LIMIT)} instead of {wanted}",
    )


@pytest.mark.parametrize("method", ["wait", "wait_aside"])
def test_a_cancelled_call_raises_and_cancels_the_handler(patient: Any, method: str) -> None:
    stage = Stage()
    future = getattr(patient, method).call_one(stage.port)
    stage.next()
    assert future.cancel()
    with pytest.raises(Cancelled):
        future.get(LIMIT)
    assert not future.cancel()
    eventually(patient, "cancelled")


def test_a_cancelled_message_that_waits_is_not_run(patient: Any, sync_patient: Any) -> None:
    for actor in (patient, sync_patient):
        stage = Stage()
        running, waiting, last = actor.wait.call_one(stage.port), actor.note.call_one("x"), actor.note.call_one("y")
        port = stage.next()
        waiting.cancel()
        port.send(None)
        running.get(LIMIT)
        last.get(LIMIT)
        assert actor.history.call_one().get(LIMIT) == ["y"]


def test_a_sync_handler_can_see_that_it_is_cancelled(sync_patient: Any) -> None:
    stage = Stage()
    future = sync_patient.wait_until_cancelled.call_one(stage.port)
    stage.next()
    future.cancel()
    eventually(sync_patient, "saw it")


def test_a_handler_may_go_on_although_it_is_cancelled(patient: Any) -> None:
    stage = Stage()
    future = patient.wait_stubbornly.call_one(stage.port)
    stage.next()
    future.cancel()
    eventually(patient, "cancelled, and went on")
    assert patient.uses_a_timeout.call_one().get(LIMIT) == "timed out"
    assert patient.cancellations.call_one().get(LIMIT) == 0
    with pytest.raises(Cancelled):
        future.get(LIMIT)


def test_the_handler_after_a_cancelled_one_may_use_timeouts(patient: Any) -> None:
    stage = Stage()
    future = patient.wait.call_one(stage.port)
    stage.next()
    future.cancel()
    assert patient.uses_a_timeout.call_one().get(LIMIT) == "timed out"


def test_cancelling_a_call_of_many_cancels_all_handlers(procs: ProcMesh) -> None:
    patients, stage = procs.spawn("patients", Patient), Stage()
    future = patients.wait.call(stage.port)
    stage.next()
    stage.next()
    future.cancel()
    for rank in range(2):
        eventually(patients.slice(gpus=rank), "cancelled")


def test_a_call_that_is_over_cannot_be_cancelled(patient: Any) -> None:
    future = patient.note.call_one("x")
    future.get(LIMIT)
    assert not future.cancel()
    assert future.get(LIMIT) is None


def test_cancels_that_race_with_answers_lose_nothing(patient: Any) -> None:
    """Each call ends, in one way or the other, and the actor goes on."""
    for number in range(300):
        future = patient.note.call_one(number)
        if number % 3 == 0:
            patient.history.call_one()
        cancelled = future.cancel()
        error = future.exception(LIMIT)
        assert isinstance(error, Cancelled) if cancelled else error is None
    seen = patient.history.call_one().get(LIMIT)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("cls", [Patient, SyncPatient])
def test_a_cancel_that_comes_just_as_the_message_is_taken_is_seen(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, cancelled, is_work = threading.Event(), threading.Event(), Instance._is_work

    def slowly(instance: Instance, frame: Frame) -> bool:
        if frame.method == b"note" and not taken.is_set():
            taken.set()
            cancelled.wait(LIMIT)
        return is_work(instance, frame)

    monkeypatch.setattr(Instance, "_is_work", slowly)
    actor = this_proc().spawn("here", cls)
    future = actor.note.call_one("cancelled")
    taken.wait(LIMIT)
    future.cancel()
    cancelled.set()
    assert actor.history.call_one().get(LIMIT) == []
    actor.stop().get(LIMIT)


def test_cancels_from_many_threads_end_a_call_once(patient: Any) -> None:
    stage = Stage()
    future = patient.wait.call_one(stage.port)
    stage.next()
    won: list[bool] = []
    threads = [threading.Thread(target=lambda: won.append(future.cancel())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(won) == [False] * 7 + [True]
    eventually(patient, "cancelled")


# --- timeouts of calls


@pytest.mark.parametrize("adverb", ["call_one", "call", "choose"])
def test_a_call_with_a_timeout_fails_then_and_cancels_the_handler(patient: Any, adverb: str) -> None:
    stage = Stage()
    future = getattr(patient.wait.options(timeout=4.0), adverb)(stage.port)
    stage.next()
    with pytest.raises(TransferTimeout, match=r"patient.wait: no answer within 4.0 s"):
        future.get(LIMIT)
    eventually(patient, "cancelled")


def test_a_stream_with_a_timeout_fails_for_those_that_have_not_answered(procs: ProcMesh) -> None:
    patients, stage = procs.spawn("patients", Patient), Stage()
    results = patients.wait.options(timeout=5.0).stream(stage.port)
    stage.next().send("in time")
    stage.next()
    assert next(results).get(LIMIT) == "in time"
    with pytest.raises(TransferTimeout):
        next(results).get(LIMIT)


def test_a_call_within_its_timeout_is_like_any(patient: Any) -> None:
    noting = patient.note.options(timeout=LIMIT)
    for number in range(100):
        noting.call_one(number).get(LIMIT)
    assert patient.history.call_one().get(LIMIT) == list(range(100))


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon"])
def test_a_timeout_that_is_none_is_refused(patient: Any, timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout"):
        patient.note.options(timeout=timeout)


# --- nobody waits any more


def test_letting_go_of_a_future_leaves_the_call_running(patient: Any) -> None:
    stage = Stage()
    future = patient.wait.call_one(stage.port)
    port = stage.next()
    del future
    gc.collect()
    port.send(None)
    patient.note.call_one("after").get(LIMIT)
    assert patient.history.call_one().get(LIMIT) == ["after"]


def test_cancelling_the_task_that_awaits_leaves_the_call_running(patient: Any) -> None:
    stage = Stage()

    async def main() -> None:
        future = patient.wait.call_one(stage.port)
        task = asyncio.ensure_future(_awaited(future))
        port = await stage._receiver.recv()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        port.send("went on")
        assert await future == "went on"

    asyncio.run(main())


async def _awaited(future: Any) -> Any:
    return await future


def test_an_answer_that_comes_too_late_is_dropped(patient: Any) -> None:
    """Also one that is so large that it stays with the actor until it is read."""
    port, receiver = Channel.open()
    future = patient.wait.call_one(port)
    held = receiver.recv().get(LIMIT)
    future.cancel()
    held.send(b"x" * (8 << 20))
    assert patient.note.call_one("on").get(LIMIT) is None
