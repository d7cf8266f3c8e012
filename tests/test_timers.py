"""Deadlines: run in their order, none after it was cancelled, and cancelled ones are not kept."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma.actor.runtime import timers
from monarch_rdma.actor.runtime.timers import Timers


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=40))
def test_what_is_due_runs_in_order_and_once(plan: list[tuple[int, bool]]) -> None:
    ran: list[int] = []
    queue = Timers(lambda: None)
    now = time.monotonic()
    made = [queue.at(now - 100 + when, lambda when=when: ran.append(when)) for when, _ in plan]  # type: ignore[misc]
    for timer, (_, is_cancelled) in zip(made, plan, strict=True):
        if is_cancelled:
            timer.cancel()
    assert queue.run_due() is None
    assert ran == sorted(when for when, is_cancelled in plan if not is_cancelled)
    assert queue.run_due() is None and len(ran) == sum(not is_cancelled for _, is_cancelled in plan)


def test_the_earliest_wakes_and_tells_how_long() -> None:
    woken: list[int] = []
    queue = Timers(lambda: woken.append(1))
    queue.at(time.monotonic() + 100, lambda: None)
    queue.at(time.monotonic() + 200, lambda: None)
    assert woken == [1]
    assert 50 < (queue.run_due() or 0) <= 100
    queue.at(time.monotonic() + 50, lambda: None)
    assert woken == [1, 1]


def test_many_cancelled_ones_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "_FEW", 16)
    queue = Timers(lambda: None)
    kept = []
    for _ in range(10_000):
        timer = queue.at(time.monotonic() + 3600, lambda: None)
        kept.append(weakref.ref(timer))
        timer.cancel()
        del timer
    gc.collect()
    assert sum(ref() is not None for ref in kept) <= 2048
