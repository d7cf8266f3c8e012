"""What is done aside for other processes: in order for each, whatever the others do, on threads that go again."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
from actor_client import LIMIT, wait_until

from monarch_rdma.actor.runtime import errands as module
from monarch_rdma.actor.runtime.errands import Errands


@pytest.fixture
def errands() -> Iterator[Errands]:
    made = Errands()
    yield made
    made.close()
    wait_until(lambda: not num_threads(), "threads are left")


def num_threads() -> int:
    return sum(thread.name == "monarch_rdma-errands" for thread in threading.enumerate())


def test_those_of_one_line_are_done_in_order(errands: Errands) -> None:
    done: queue.Queue[int] = queue.Queue()
    for number in range(1000):
        errands.run("a", lambda number=number: done.put(number))
    assert [done.get(timeout=LIMIT) for _ in range(1000)] == list(range(1000))


def test_a_line_that_is_held_up_holds_up_no_other(errands: Errands) -> None:
    go, done = threading.Event(), queue.Queue[str]()
    for line in "abc":
        errands.run(line, lambda: go.wait(LIMIT))
        errands.run(line, lambda line=line: done.put(line))
    errands.run("d", lambda: done.put("d"))
    assert done.get(timeout=LIMIT) == "d"
    assert "a" in errands and done.empty()
    go.set()
    assert {done.get(timeout=LIMIT) for _ in range(3)} == set("abc")
    wait_until(lambda: "a" not in errands, "the line is done, but counts as busy")


def test_an_error_ends_nothing_else(errands: Errands, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    errands.run("a", lambda: 1 // 0)
    errands.run("a", done.set)
    assert done.wait(LIMIT)
    assert "ZeroDivisionError" in caplog.text


def test_idle_threads_are_used_again_and_go(errands: Errands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINGER", 0.05)
    who: queue.Queue[threading.Thread] = queue.Queue()
    for number in range(20):
        errands.run(number, lambda: who.put(threading.current_thread()))
        who.get(timeout=LIMIT)
        wait_until(lambda number=number: number not in errands, "it is not done")
    wait_until(lambda: not num_threads(), "idle threads stay")
    errands.run("again", lambda: who.put(threading.current_thread()))
    assert who.get(timeout=LIMIT).name == "monarch_rdma-errands"


def test_many_threads_give_errands_at_the_same_time(errands: Errands) -> None:
    done: dict[int, list[int]] = {line: [] for line in range(4)}
    left = threading.Semaphore(0)

    def note(line: int, number: int) -> None:
        done[line].append(number)
        left.release()

    def give(who: int) -> None:
        for number in range(500):
            errands.run(who % 4, lambda number=number: note(who % 4, who * 1000 + number))

    threads = [threading.Thread(target=give, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(8 * 500):
        assert left.acquire(timeout=LIMIT)
    assert all(len(numbers) == 1000 == len(set(numbers)) for numbers in done.values())


def test_what_was_given_before_the_close_is_done_and_nothing_later() -> None:
    errands, done, go = Errands(), queue.Queue[int](), threading.Event()
    errands.run("a", lambda: go.wait(LIMIT))
    errands.run("a", lambda: done.put(1))
    errands.close()
    errands.run("a", lambda: done.put(2))
    errands.run("b", lambda: done.put(3))
    go.set()
    assert done.get(timeout=LIMIT) == 1
    wait_until(lambda: not num_threads(), "threads are left")
    assert done.empty()
