"""What workers print reaches the client: with its source, folded, or not at all."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
from actor_client import LIMIT, wait_until

from monarch_rdma import config
from monarch_rdma.actor import Actor, ActorMesh, HostMesh, ProcMesh, current_rank, endpoint


class Talker(Actor):
    @endpoint
    def say(self, text: str, with_rank: bool = False) -> None:
        print(f"{text} {current_rank().rank}" if with_rank else text, flush=True)

    @endpoint
    def write(self, data: bytes) -> None:
        os.write(2, data)  # not through Python's own streams


@pytest.fixture(scope="module")
def talking(client: HostMesh) -> ProcMesh:
    return client.spawn_procs({"g": 3}, name="talking")


@pytest.fixture
def talkers(talking: ProcMesh) -> Iterator[ActorMesh[Talker]]:
    yield talking.spawn("talkers", Talker)
    talking.logging_option(True, 0.2).get(timeout=LIMIT)


class Shown:
    """What came out so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        """Waits until the line is there."""
        wait_until(lambda: line in self._look(), lambda: f"{line!r} is not among {self.lines}")

    def _look(self) -> list[str]:
        out = self._capsys.readouterr()
        self.lines.extend((out.out + out.err).splitlines())
        return self.lines


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    return Shown(capsys)


def test_each_line_says_whose_it_is(talkers: ActorMesh[Talker], shown: Shown) -> None:
    talkers.say.call("rank", with_rank=True).get(timeout=LIMIT)
    for rank in range(3):
        shown(f"[talking/{rank}] rank {rank}")


def test_identical_lines_of_many_are_one(talking: ProcMesh, talkers: ActorMesh[Talker], shown: Shown) -> None:
    for window in (0.5, 3.0, 15.0):  # three lines may take longer to come, where others use the processors
        talking.logging_option(True, window).get(timeout=LIMIT)
        talkers.say.call(f"the same {window}").get(timeout=LIMIT)
        talkers.slice(g=0).say.call(f"another {window}").get(timeout=LIMIT)
        shown(f"[talking/0] another {window}")
        if f"[3 similar] the same {window}" in shown.lines:
            return
    raise AssertionError(f"they are not folded: {shown.lines}")


def test_another_option_shows_what_waits(talking: ProcMesh, talkers: ActorMesh[Talker], shown: Shown) -> None:
    talking.logging_option(True, 600.0).get(timeout=LIMIT)
    talkers.slice(g=0).say.call("before").get(timeout=LIMIT)
    talking.logging_option(True, None).get(timeout=LIMIT)
    shown("[talking/0] before")


def test_what_is_written_below_python_arrives_too(talkers: ActorMesh[Talker], shown: Shown) -> None:
    talkers.slice(g=1).write.call(b"from below\n").get(timeout=LIMIT)
    shown("[talking/1] from below")


def test_processes_can_be_kept_from_the_client(talking: ProcMesh, talkers: ActorMesh[Talker], shown: Shown) -> None:
    talking.slice(g=slice(0, 2)).logging_option(stream_to_client=False).get(timeout=LIMIT)
    talkers.say.call("hidden", with_rank=True).get(timeout=LIMIT)
    shown("[talking/2] hidden 2")
    assert [line for line in shown.lines if "hidden" in line] == ["[talking/2] hidden 2"]


def test_lines_without_their_source(client: HostMesh, shown: Shown) -> None:
    with config.configured(log_prefix=False):
        procs = client.spawn_procs(name="plain")
        procs.logging_option(True, None).get(timeout=LIMIT)
        procs.spawn("talker", Talker).say.call("bare").get(timeout=LIMIT)
        shown("bare")
        procs.stop().get(timeout=LIMIT)


class StuckTerminal:
    """Takes nothing until it may."""

    def __init__(self) -> None:
        self.asked, self.may, self.text = threading.Event(), threading.Event(), ""

    def write(self, text: str) -> None:
        self.asked.set()
        assert self.may.wait(LIMIT)
        self.text += text

    def flush(self) -> None:
        """Everything is seen at once."""


def test_a_terminal_that_takes_nothing_stalls_the_printing_alone(
    talking: ProcMesh, talkers: ActorMesh[Talker], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = StuckTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    talking.logging_option(True, None).get(timeout=LIMIT)
    talkers.say.call("first").get(timeout=LIMIT)
    assert terminal.asked.wait(LIMIT)
    for number in range(3):
        talkers.say.call(f"more {number}").get(timeout=LIMIT)
        talkers.slice(g=0).say.call("and more").get(timeout=LIMIT)
    talking.logging_option(True, None).get(timeout=LIMIT)
    terminal.may.set()
    wait_until(lambda: terminal.text.count("\n") == 3 + 3 * 4, lambda: f"only this is shown: {terminal.text}")
