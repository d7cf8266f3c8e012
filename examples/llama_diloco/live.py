"""What happens in a training, while it happens: a table that changes on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

from monarch_rdma.ft import Decided, Healed, Report, Stepped, Struck, Synchronised, TrainersStarted

__all__ = ["Live"]

_LINES = 6  # of what happened last
_EVERY = 5.0  # seconds between two plain lines


class Live:
    """`with Live(title, replicas, steps) as live:` and then `live.show(report)`, `live.struck(fault)`."""

    def __init__(self, title: str, replicas: int, steps: int) -> None:
        self._title, self._steps = title, steps
        self._states = {replica: "starts" for replica in range(replicas)}
        self._steps_of = dict.fromkeys(range(replicas), "")
        self._losses: dict[int, float] = {}
        self._total = 0
        self._rounds = 0
        self._happened: deque[str] = deque(maxlen=_LINES)
        self._began = time.time()
        self._due = 0.0
        self._screen: Any = None

    def __enter__(self) -> Live:
        if sys.stdout.isatty():
            try:
                from rich.live import Live as Screen
            except ImportError:
                return self
            self._screen = Screen(get_renderable=self._table, refresh_per_second=4, transient=True)
            self._screen.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._screen is not None:
            self._screen.__exit__(*error)
            self._screen = None

    def show(self, report: Report) -> None:
        match report:
            case Stepped(replica=replica, rounds=rounds, step=step, loss=loss):
                self._states[replica], self._losses[replica] = "trains", loss
                self._steps_of[replica] = f"round {rounds + 1}, step {step}"
            case Synchronised(total=total, rounds=rounds):
                self._total, self._rounds = max(total, self._total), max(rounds, self._rounds)
            case TrainersStarted(replica=replica):
                self._states[replica] = "heals"
            case Healed(replica=replica, seconds=seconds, rounds=rounds, peers=peers) if rounds:
                self._say(f"replica {replica} read its state from {peers} peers in {seconds * 1e3:.0f} ms")
            case Decided(replica=replica, what=what, reason=reason):
                self._states[replica] = "is down"
                self._say(f"replica {replica} failed, {_IS_DONE[what]}: {reason:.100}")
        self._line()

    def struck(self, struck: Struck) -> None:
        self._say(f"FAULT: {struck.kind} ({struck.target})")

    def _say(self, what: str) -> None:
        line = f"{time.time() - self._began:6.1f} s  {what}"
        self._happened.append(line)
        if self._screen is None:
            print(f"  {line}", flush=True)

    def _line(self) -> None:
        """For who has no terminal."""
        if self._screen is not None or time.time() < self._due or not self._losses:
            return
        self._due = time.time() + _EVERY
        trains = sum(state == "trains" for state in self._states.values())
        loss = sum(self._losses.values()) / len(self._losses)
        share = 100 * self._total / self._steps
        print(f"  {time.time() - self._began:6.1f} s  {share:3.0f} %, round {self._rounds}, loss {loss:.3f}, "
              f"{trains} of {len(self._states)} replicas train", flush=True)  # fmt: skip

    def _table(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table("replica", "", "where", "loss", title=self._title, title_justify="left")
        for replica, state in self._states.items():
            style = {"trains": "green", "is down": "bold red", "heals": "yellow"}.get(state, "")
            loss = f"{self._losses[replica]:.3f}" if replica in self._losses else ""
            table.add_row(str(replica), f"[{style}]{state}[/]" if style else state, self._steps_of[replica], loss)
        return Group(table, ProgressBar(total=self._steps, completed=self._total, width=50), *self._happened)


_IS_DONE = {
    "trainers": "its trainers are started again",
    "replica": "it is started again where it was",
    "allocation": "it is started again on another allocation",
    "given up": "it is given up",
}
