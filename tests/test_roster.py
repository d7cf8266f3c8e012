"""Where members are, as one process knows it: compared with a model, whatever order and however often news come."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma.actor.failure import SupervisionError, encode_failure
from monarch_rdma.actor.runtime import message
from monarch_rdma.actor.runtime.message import Frame
from monarch_rdma.actor.runtime.roster import GONE, RESTARTING, UP, KeeperId, Place, Roster

KEEPER = KeeperId("mrdma://keeper", 17)
SIZE = 3
LATER = 10.0  # seconds, for what takes milliseconds


class FakeProc:
    """What a roster needs of its process."""

    address = "mrdma://here"

    def __init__(self) -> None:
        self.superseded: list[str] = []
        self.expected: set[str] = set()
        self.posted: list[bytes] = []
        self.forgotten = False
        self.timers = self
        self.actions: list[Any] = []

    def register(self, receiver: Any) -> int:
        return 99

    def forget(self, number: int) -> bool:
        self.forgotten = True
        return True

    def post(self, address: str, head: bytes, body: bytes = b"", timeout: float | None = None) -> None:
        self.posted.append(head)

    def expect(self, number: int, address: str) -> None:
        self.expected.add(address)

    def fulfil(self, number: int, address: str) -> None:
        self.expected.discard(address)

    def supersede(self, address: str) -> None:
        self.superseded.append(address)

    def at(self, when: float, action: Any) -> None:
        self.actions.append(action)

    def route(self, address: str, number: int) -> tuple[str, int]:
        return address, number


def a_roster() -> tuple[Roster, Any]:
    proc: Any = FakeProc()
    return Roster(proc, KEEPER, "mesh", [f"mrdma://{rank}/1" for rank in range(SIZE)]), proc


def news(*places: Place, is_last: bool = False, why: str = "") -> Frame:
    body = pickle.dumps(([tuple(place) for place in places], is_last, why))
    return Frame(message.SEND, 0, 0, 99, 0, 0, b"", b"", memoryview(body), KEEPER.address)


def first() -> list[Place]:
    return [Place(rank, 0, UP, 1, f"mrdma://{rank}/1", "") for rank in range(SIZE)]


@st.composite
def histories(draw: Any) -> list[Place]:
    """What a keeper says one after the other."""
    now, said = first(), []
    for rank in draw(st.lists(st.integers(0, SIZE - 1), max_size=20)):
        place = now[rank]
        if place.state == UP:
            state = draw(st.sampled_from([RESTARTING, GONE]))
            place = place._replace(change=place.change + 1, state=state, why="it was killed")
        else:
            number = place.incarnation + 1
            place = Place(rank, place.change + 1, UP, number, f"mrdma://{rank}/{number}", "")
        now[rank] = place
        said.append(place)
    return said


@given(histories(), st.randoms(use_true_random=False))
def test_the_latest_word_counts_in_whatever_order_it_comes(history: list[Place], random: Any) -> None:
    roster, proc = a_roster()
    roster.on_frame(news(*first()))
    heard = history + [place for place in history if random.random() < 0.5]  # some twice
    random.shuffle(heard)
    for place in heard:
        generation = roster.generation
        before = roster.place(place.rank)
        roster.on_frame(news(place))
        assert (roster.generation != generation) == (place.change > before.change)
    expected = first()
    for place in history:
        expected[place.rank] = place
    assert roster.places == expected
    living = {place.address for place in expected}
    assert not living & set(proc.superseded)  # whoever is there now is heard
    routes, are_up = roster.routes(range(SIZE), 5, 0.0)
    assert are_up == all(place.state == UP for place in expected)
    for route, place in zip(routes, expected, strict=True):
        if place.state == UP:
            assert route == (place.address, 5)
        else:
            assert isinstance(route.error, SupervisionError) and place.state in str(route.error)


def test_nothing_is_known_before_the_keeper_has_spoken() -> None:
    roster, proc = a_roster()
    roster.follow()
    assert len(proc.posted) == 1
    _, are_up = roster.routes([0], 5, time.monotonic())
    assert not are_up
    threading.Timer(0.05, roster.on_frame, [news(*first())]).start()
    routes, are_up = roster.routes([0], 5, time.monotonic() + LATER)
    assert are_up and routes == [("mrdma://0/1", 5)]
    assert not proc.expected  # the keeper is watched only while somebody waits


def test_a_process_that_is_lost_from_here_is_waited_for_until_the_keeper_has_had_its_time() -> None:
    roster, proc = a_roster()
    roster.on_frame(news(*first()))
    roster.on_process_lost("mrdma://1/1")
    assert len(proc.posted) == 1 and len(proc.actions) == 1  # it asks anew
    assert not roster.routes([1], 5, 0.0)[1] and roster.routes([0, 2], 5, 0.0)[1]
    roster.on_frame(news(*first()))  # the keeper sees nothing wrong, yet
    assert not roster.routes([1], 5, 0.0)[1]
    proc.actions.pop()()
    assert roster.routes([1], 5, 0.0)[1]


def test_news_end_the_doubt() -> None:
    roster, proc = a_roster()
    roster.on_frame(news(*first()))
    roster.on_process_lost("mrdma://1/1")
    roster.on_frame(news(Place(1, 2, UP, 2, "mrdma://1/2", "")))
    assert roster.routes([1], 5, 0.0) == ([("mrdma://1/2", 5)], True)
    assert proc.superseded == ["mrdma://1/1"]
    roster.on_process_lost("mrdma://1/1")  # late, of the old one
    assert roster.routes([1], 5, 0.0)[1]


@pytest.mark.parametrize("end", ["lost", "refused", "last"])
def test_without_a_keeper_nobody_waits(end: str) -> None:
    roster, proc = a_roster()
    roster.on_frame(news(*first()))
    roster.on_frame(news(Place(1, 1, RESTARTING, 1, "mrdma://1/1", "it was killed")))
    ends = {
        "lost": lambda: roster.on_lost(KEEPER.address, SupervisionError("killed")),
        "refused": lambda: roster.on_frame(failed("it has ended")),
        "last": lambda: roster.on_frame(news(is_last=True, why="it was stopped")),
    }
    threading.Timer(0.05, ends[end]).start()
    (route,), are_up = roster.routes([1], 5, time.monotonic() + LATER)
    assert not are_up and "gone" in str(route.error)
    assert proc.forgotten
    assert roster.routes([0], 5, 0.0)[1]  # that one may still be there


def test_a_keeper_that_was_only_lost_from_here_is_asked_again() -> None:
    roster, proc = a_roster()
    roster.on_frame(news(*first()))
    roster.on_frame(news(Place(1, 3, RESTARTING, 1, "mrdma://1/1", "it was killed")))
    roster.on_keeper_back()  # it was never lost
    assert not proc.posted
    roster.on_lost(KEEPER.address, SupervisionError("the connection broke"))
    assert roster.place(1).state == GONE
    roster.on_keeper_back()
    assert len(proc.posted) == 1 and not roster.routes([0], 5, 0.0)[1]  # nothing is known before it has spoken
    now = [Place(0, 0, UP, 1, "mrdma://0/1", ""), Place(1, 4, UP, 2, "mrdma://1/2", ""), first()[2]]
    roster.on_frame(news(*now))
    assert roster.routes([0, 1], 5, 0.0) == ([("mrdma://0/1", 5), ("mrdma://1/2", 5)], True)
    roster.on_frame(news(is_last=True, why="it was stopped"))
    roster.on_keeper_back()
    assert roster.is_closed and len(proc.posted) == 1


def test_listeners_hear_of_news_until_they_do_not_want_to() -> None:
    roster, _ = a_roster()
    heard: list[int] = []

    def listen() -> None:
        heard.append(roster.generation)

    roster.listen(listen)
    roster.on_frame(news(Place(1, 1, GONE, 1, "mrdma://1/1", "killed")))
    roster.unlisten(listen)
    roster.on_frame(news(Place(2, 1, GONE, 1, "mrdma://2/1", "killed")))
    assert len(heard) == 1


def failed(why: str) -> Frame:
    body = encode_failure(SupervisionError(why)).body
    return Frame(message.SEND, message.FAILED, 0, 99, 0, 0, b"", b"", memoryview(body), KEEPER.address)
