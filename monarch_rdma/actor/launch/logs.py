"""What workers print: bytes of pipes into lines, lines of many ranks folded, and onto the client's screen."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable

from ...errors import ConfigError

__all__ = ["LineSplitter", "LogPrinter", "Terminal"]

_MAX_LINE = 1 << 16  # bytes; a longer line is cut into several
_MOST_WAITING = 10_000  # different lines; beyond it they do not wait for the window's end
_MOST_UNWRITTEN = 64 << 20  # characters; beyond it lines are left out


class LineSplitter:
    """Cuts a stream of bytes into lines of text; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, max_line: int = _MAX_LINE) -> None:
        self._max_line = max_line
        self._partial = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes, without their newline."""
        *whole, self._partial = (self._partial + data).split(b"\n")
        pieces = [piece for line in whole for piece in self._cut(line)]
        if len(self._partial) > self._max_line:
            *cut, self._partial = self._cut(self._partial)
            pieces += cut
        return [_text(piece) for piece in pieces]

    def finish(self) -> list[str]:
        """The last line, if it had no newline."""
        partial, self._partial = self._partial, b""
        return [_text(partial)] if partial else []

    def _cut(self, line: bytes) -> list[bytes]:
        pieces = []
        while len(line) > self._max_line:
            end = self._max_line
            while end > self._max_line - 3 and line[end] & 0xC0 == 0x80:  # not within a character
                end -= 1
            pieces.append(line[:end])
            line = line[end:]
        return [*pieces, line]


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")


def _after(seconds: float, call: Callable[[], None]) -> Callable[[], None]:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer.cancel


class LogPrinter:
    """Makes lines of workers into "[mesh/proc 3] line".

    With a window, lines wait `window` seconds from the first one, and those that are the same (of whatever rank) become
    one, "[16 similar] line", where the first of them stood. Without (0 or None), each is printed at once. No line is
    lost as long as `flush` is called at the end.

    Args:
        write: called with "stdout" or "stderr" and whole lines; must not wait.
        window: seconds, or None.
        prefix_with_rank: whether to say whose line it is.
        after: calls a function after so many seconds, unless what it returns was called before; for tests.
    """

    def __init__(
        self,
        write: Callable[[str, str], object],
        window: float | None = None,
        prefix_with_rank: bool = True,
        *,
        after: Callable[[float, Callable[[], None]], Callable[[], None]] = _after,
    ) -> None:
        if window is not None and not window >= 0:
            raise ConfigError(f"window is {window!r}, but must be at least 0 seconds, or None")
        self._window = window or 0.0
        self._prefix_with_rank = prefix_with_rank
        self._write_text = write
        self._after = after
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], list[str]] = {}  # (stream, line) -> who said it, in order of coming
        self._call_off: Callable[[], None] = lambda: None  # the end of the window

    def add(self, who: str, stream: str, lines: Iterable[str]) -> None:
        """Takes lines of the process `who`; `stream` is "stdout" or "stderr"."""
        with self._lock:
            if not self._window:
                self._write([(stream, self._prefixed(who, line)) for line in lines])
                return
            was_empty = not self._waiting
            for line in lines:
                self._waiting.setdefault((stream, line), []).append(who)
            if len(self._waiting) >= _MOST_WAITING:
                self._write_waiting()
            elif was_empty and self._waiting:
                self._call_off = self._after(self._window, self.flush)

    def flush(self) -> None:
        """Prints what waits."""
        with self._lock:
            self._write_waiting()

    def _write_waiting(self) -> None:
        self._call_off()
        waiting, self._waiting = self._waiting, {}
        self._write(
            [
                (stream, self._prefixed(who[0], line) if len(who) == 1 else f"[{len(who)} similar] {line}")
                for (stream, line), who in waiting.items()
            ]
        )

    def _prefixed(self, who: str, line: str) -> str:
        return f"[{who}] {line}" if self._prefix_with_rank else line

    def _write(self, lines: list[tuple[str, str]]) -> None:
        for stream in ("stdout", "stderr"):
            text = "".join(f"{line}\n" for name, line in lines if name == stream)
            if text:
                self._write_text(stream, text)


class Terminal:
    """Writes to what sys.stdout and sys.stderr are at that time, on a thread of its own.

    So a terminal that takes nothing (Ctrl-S, a pager) stalls the printing alone. What waits for it is bounded: beyond
    64 Mi characters lines are left out, and their number is printed.
    """

    def __init__(self) -> None:
        self._unwritten: deque[tuple[str, str]] = deque()
        self._size = 0
        self._left_out = 0  # lines
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def write(self, stream: str, text: str) -> None:
        """Whole lines, for "stdout" or "stderr". Never waits."""
        with self._changed:
            if self._size + len(text) > _MOST_UNWRITTEN and self._size:
                self._left_out += text.count("\n")
                return
            self._note_left_out()
            self._put(stream, text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch_rdma-logs", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Waits until all is written. What is written later is lost."""
        with self._changed:
            self._note_left_out()
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _put(self, stream: str, text: str) -> None:
        self._unwritten.append((stream, text))
        self._size += len(text)

    def _note_left_out(self) -> None:
        if self._left_out:
            self._put("stderr", f"[{self._left_out} lines left out: the terminal took nothing for so long]\n")
            self._left_out = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unwritten or self._is_closed)
                if not self._unwritten:
                    return
                stream, text = self._unwritten.popleft()
            target = getattr(sys, stream)
            if target is not None:
                with contextlib.suppress(OSError, ValueError):  # nobody reads any more: closed, or a broken pipe
                    target.write(text)
                    target.flush()
            with self._changed:
                self._size -= len(text)
