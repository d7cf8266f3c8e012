"""Lines of workers: cut from bytes however they come, printed with their origin, folded within a window."""

from __future__ import annotations

import io
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rdma.actor.launch.logs import LineSplitter, LogPrinter, Terminal
from monarch_rdma.errors import ConfigError

# --- lines -------------------------------------------------------------------------------------------------------


@given(st.text(alphabet="aä€😀\n\r ", max_size=60), st.lists(st.integers(1, 7), max_size=40))
def test_lines_are_the_same_however_the_bytes_come(text: str, sizes: list[int]) -> None:
    data = text.encode()
    splitter = LineSplitter()
    lines = []
    for size in [*sizes, len(data)]:
        lines += splitter.feed(data[:size])
        data = data[size:]
    lines += splitter.finish()
    expected = [line.removesuffix("\r") for line in text.split("\n")]
    if not text.split("\n")[-1]:
        expected.pop()
    assert lines == expected


@given(st.binary(max_size=200), st.integers(4, 20))
def test_no_byte_is_lost_in_long_lines_and_none_is_longer_than_allowed(data: bytes, limit: int) -> None:
    splitter = LineSplitter(max_line=limit)
    lines = splitter.feed(data) + splitter.finish()
    assert all(len(line) <= limit for line in lines)
    plain = data.replace(b"\n", b"").replace(b"\r", b"").decode("ascii", "replace")
    kept = "".join(lines).replace("\r", "")
    assert [c for c in kept if c.isascii()] == [c for c in plain if c.isascii()]


def test_a_long_line_is_cut_between_characters() -> None:
    splitter = LineSplitter(max_line=5)
    assert splitter.feed("ä€😀€ä\n".encode()) == ["ä€", "😀", "€ä"]


def test_an_endless_line_does_not_grow() -> None:
    splitter = LineSplitter(max_line=10)
    lines = [line for _ in range(100) for line in splitter.feed(b"abcdefg")]
    assert sum(map(len, lines)) >= 700 - 10
    assert set(map(len, lines)) == {10}


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert LineSplitter().feed(b"a\xffb\n") == ["a\ufffdb"]


def test_finish_gives_the_last_line_once() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == ["one"]
    assert splitter.finish() == ["tw"]
    assert splitter.finish() == []


# --- printing ----------------------------------------------------------------------------------------------------


class Screen:
    """A printer, what it printed, and the time that the test lets pass."""

    def __init__(self, **options: Any) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.waiting: list[tuple[float, Callable[[], None]]] = []
        self.printer = LogPrinter(
            lambda stream, text: (self.out if stream == "stdout" else self.err).write(text),
            after=self._after,
            **options,
        )

    def _after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        self.waiting.append((seconds, call))
        return self.waiting.clear

    def window_ends(self) -> None:
        ((_, call),) = self.waiting
        self.waiting.clear()
        call()


@pytest.mark.parametrize("window", [None, 0, 0.0])
def test_without_a_window_lines_are_printed_at_once(window: float | None) -> None:
    screen = Screen(window=window)
    screen.printer.add("mesh/proc 0", "stdout", ["one", "one"])
    screen.printer.add("mesh/proc 1", "stderr", ["two"])
    assert screen.out.getvalue() == "[mesh/proc 0] one\n[mesh/proc 0] one\n"
    assert screen.err.getvalue() == "[mesh/proc 1] two\n"
    assert screen.waiting == []


def test_the_rank_can_be_left_out() -> None:
    screen = Screen(prefix_with_rank=False)
    screen.printer.add("mesh/proc 0", "stdout", ["one"])
    assert screen.out.getvalue() == "one\n"


def test_the_same_line_of_many_ranks_is_folded() -> None:
    screen = Screen(window=3.0)
    for rank in range(16):
        screen.printer.add(f"mesh/proc {rank}", "stdout", ["starting", f"rank {rank}"] if rank < 2 else ["starting"])
    assert screen.out.getvalue() == ""
    assert [seconds for seconds, _ in screen.waiting] == [3.0]
    screen.window_ends()
    assert screen.out.getvalue() == "[16 similar] starting\n[mesh/proc 0] rank 0\n[mesh/proc 1] rank 1\n"


def test_stdout_and_stderr_are_not_folded_together() -> None:
    screen = Screen(window=1.0)
    screen.printer.add("a", "stdout", ["x"])
    screen.printer.add("b", "stderr", ["x"])
    screen.window_ends()
    assert (screen.out.getvalue(), screen.err.getvalue()) == ("[a] x\n", "[b] x\n")


def test_each_window_starts_with_its_first_line() -> None:
    screen = Screen(window=1.0)
    screen.printer.add("a", "stdout", ["x"])
    screen.window_ends()
    assert screen.waiting == []
    screen.printer.add("b", "stdout", ["x"])
    screen.window_ends()
    assert screen.out.getvalue() == "[a] x\n[b] x\n"


def test_flush_prints_what_waits_and_ends_the_window() -> None:
    screen = Screen(window=1.0)
    screen.printer.add("a", "stdout", ["x"])
    ((_, end_of_window),) = screen.waiting
    screen.printer.flush()
    assert (screen.out.getvalue(), screen.waiting) == ("[a] x\n", [])
    end_of_window()  # it was about to end
    assert screen.out.getvalue() == "[a] x\n"


def test_lines_that_wait_are_bounded() -> None:
    screen = Screen(window=1.0)
    screen.printer.add("a", "stdout", [str(n) for n in range(10_000)])
    assert screen.out.getvalue().count("\n") == 10_000


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"))), st.booleans())
def test_no_line_is_lost(said: list[tuple[int, str]], folded: bool) -> None:
    screen = Screen(window=1.0 if folded else None)
    for rank, line in said:
        screen.printer.add(str(rank), "stdout", [line])
    screen.printer.flush()
    counts = dict.fromkeys("abc", 0)
    for printed in screen.out.getvalue().splitlines():
        who, _, line = printed.removeprefix("[").partition("] ")
        counts[line] += int(who.removesuffix(" similar")) if who.endswith(" similar") else 1
    assert counts == {letter: [line for _, line in said].count(letter) for letter in "abc"}


def test_a_real_window_ends_by_itself() -> None:
    printed: queue.Queue[tuple[str, str]] = queue.Queue()
    LogPrinter(lambda *text: printed.put(text), 0.01).add("a", "stdout", ["x"])
    assert printed.get(timeout=20) == ("stdout", "[a] x\n")


def test_what_sys_stdout_is_at_that_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, out = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    terminal.write("stdout", "x\n")
    terminal.close()
    assert out.getvalue() == "x\n"
    monkeypatch.setattr(sys, "stdout", None)  # a program without a terminal
    silent = Terminal()
    silent.write("stdout", "y\n")
    silent.close()


def test_a_screen_that_is_gone_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, out, err = Terminal(), io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    out.close()
    terminal.write("stdout", "x\n")
    terminal.write("stderr", "y\n")
    terminal.close()
    assert err.getvalue() == "y\n"


def test_a_terminal_that_takes_nothing_holds_nobody_up_and_memory_does_not_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as screen, open(reader, "rb") as seen:
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        terminal = Terminal()
        line = "x" * (1 << 20) + "\n"
        for _ in range(100):  # none of these waits
            terminal.write("stdout", line)
        closing = threading.Thread(target=lambda: (terminal.close(), screen.close()))
        closing.start()
        lines = seen.read().splitlines()
        closing.join()
    assert 60 <= len(lines) - 1 <= 65
    assert lines[-1].decode() == f"[{100 - (len(lines) - 1)} lines left out: the terminal took nothing for so long]"


def test_a_wrong_window_is_named() -> None:
    with pytest.raises(ConfigError, match="window is -1"):
        LogPrinter(print, -1)
