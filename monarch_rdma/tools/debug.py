"""`monarch-rdma debug`: finds what waits at a breakpoint in a program, and talks to pdb there."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence

from ..actor.debugging.breakpoint_client import Attachment, Waiting, find_waiting
from ..actor.debugging.registry import Program, choose, programs
from ..actor.debugging.survey import ask_all, join
from ..errors import ConfigError
from . import debug_commands as commands

__all__ = ["run"]

_PROMPT = "debug> "
_CAST_TIMEOUT = 5.0  # seconds that pdb has for one line


def run(*, pid: int | None, as_json: bool) -> int:
    """A console, until `quit` or the end of its input; or what waits, as JSON."""
    program = choose(pid)
    join(program)
    if as_json:
        print(json.dumps([each.facts for each in find_waiting(program.address)], indent=2))
        return 0
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() a history
    print(f"program {program.pid}: {program.command}\nhelp lists the commands")
    return Console(program).run()


class Console:
    """Reads commands and does them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._address = program.address

    def run(self) -> int:
        self._list()
        while True:
            line = _input(_PROMPT)
            if line is None:
                return 0
            if self._program not in programs():
                print(f"program {self._program.pid} has ended")
                return 0
            try:
                if line.strip() and not self._do(commands.parse(line)):
                    return 0
            except ConfigError as error:
                print(error)

    def _do(self, command: commands.Command) -> bool:
        """False where it was the last one."""
        match command:
            case commands.List():
                self._list()
            case commands.Help():
                print(commands.HELP)
            case commands.Attach():
                self._attach(command)
            case commands.Cast():
                chosen = [w for w in self._waiting() if w.actor == command.actor]
                self._tell([w for w in chosen if command.ranks.has(w.rank, w.coords)], command.line)
            case commands.Continue():
                self._tell(self._waiting(), "clear", "continue")
        return not isinstance(command, commands.Quit)

    def _waiting(self) -> list[Waiting]:
        return find_waiting(self._address)

    def _list(self) -> None:
        found = self._waiting()
        if not found:
            print("nothing waits at a breakpoint")
            return
        lines: list[tuple[str, ...]] = [("actor", "rank", "coordinates", "process", "pid", "function", "place", "")]
        lines += [_cells(each) for each in found]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())

    def _attach(self, command: commands.Attach) -> None:
        chosen = [w for w in self._waiting() if (w.actor, w.rank) == (command.actor, command.rank)]
        chosen = [w for w in chosen if command.pid in (None, w.pid)]
        if not chosen:
            raise ConfigError(f"{command.actor} {command.rank} does not wait at a breakpoint")
        if len({w.pid for w in chosen}) > 1:
            pids = ", ".join(str(w.pid) for w in chosen)
            raise ConfigError(f"{command.actor} {command.rank} waits in processes {pids}: name one of them behind it")
        with Attachment(chosen[0]) as attached:
            _talk(attached)

    def _tell(self, chosen: Sequence[Waiting], *lines: str) -> None:
        """Enters lines everywhere at the same time; prints what pdb answers, equal answers once."""
        if not chosen:
            raise ConfigError("none of them waits at a breakpoint")
        answers = ask_all([_entering(each, lines) for each in chosen])
        by_text: dict[str, list[str]] = {}
        for each, answer in zip(chosen, answers, strict=True):
            text = answer.problem or _without_prompt(answer.value)
            by_text.setdefault(text, []).append(f"{each.actor} {each.rank}")
        for text, names in by_text.items():
            print(f"[{', '.join(names)}]")
            print("\n".join(f"  {line}" for line in text.splitlines()))


def _entering(waiting: Waiting, lines: Sequence[str]) -> Callable[[], str]:
    def enter() -> str:
        deadline = time.monotonic() + _CAST_TIMEOUT
        text = ""
        with Attachment(waiting) as attached:
            for line in lines:
                attached.enter(line)
                try:
                    text = attached.next_text(max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    return f"no answer within {_CAST_TIMEOUT:g} s: it runs on"
                if attached.is_over:
                    break
        return text

    return enter


def _talk(attached: Attachment) -> None:
    """The terminal is pdb's, until the session is over or left."""
    waiting = attached.waiting
    print(f"attached to {waiting.actor} {waiting.rank} in {waiting.process} (detach or Ctrl-D leaves it waiting)")
    text = attached.text
    try:
        while True:
            if not attached.waits:
                text += attached.next_text(None)
            if attached.is_over:
                print(text, end="")
                return
            head, _, prompt = text.rpartition("\n")
            if head:
                print(head)
            line = _input(prompt)
            if line is None or line.strip() == "detach":
                break
            attached.enter(line)
            text = ""
    except KeyboardInterrupt:
        print()
    print(f"detached from {waiting.actor} {waiting.rank}")


def _input(prompt: str) -> str | None:
    """None at the end of the input."""
    try:
        return input(prompt)
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None


def _without_prompt(text: str) -> str:
    return text.rpartition("\n")[0] if not text.endswith("\n") else text.rstrip("\n")


def _cells(waiting: Waiting) -> tuple[str, ...]:
    coords = ",".join(f"{name}={at}" for name, at in waiting.coords.items())
    facts = waiting.facts
    note = f"attached: {facts['attached']}" if facts["attached"] else "its call was given up" * facts["cancelled"]
    place = f"{facts['file']}:{facts['line']}"
    return (
        waiting.actor,
        str(waiting.rank),
        coords,
        waiting.process,
        str(waiting.pid),
        str(facts["function"]),
        place,
        note,
    )
