"""`monarch-rdma top`: the processes and actors of a program, what each works on, and for how long."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

from ..actor.debugging.process_facts import ProcessFacts
from ..actor.debugging.registry import Program, choose, programs
from ..actor.debugging.survey import Process, join, survey_program
from ..errors import ConfigError

__all__ = ["run", "snapshot", "table"]

_TIMEOUT = 1.0  # seconds that a process has to answer

Row = tuple[str, ...]
COLUMNS = ("process / actor", "pid", "state", "cpu %", "memory", "mailbox", "message", "age", "tasks")


def run(*, pid: int | None, once: bool, as_json: bool, interval: float, everything: bool) -> int:
    """Shows it until interrupted, or once: where that is asked for, and where nobody watches a terminal."""
    program = choose(pid)
    join(program)
    if as_json:
        print(json.dumps(document(program, snapshot(program, Usage())), indent=2))
    elif once or not sys.stdout.isatty():
        print(plain(rows(snapshot(program, Usage()), everything)))
    else:
        _live(program, interval, everything)
    return 0


class Usage:
    """Share of one processor that each process used since it was looked at last; at first, since it started."""

    def __init__(self) -> None:
        self._last: dict[int, ProcessFacts] = {}

    def percent(self, facts: ProcessFacts) -> float:
        last, self._last[facts.pid] = self._last.get(facts.pid), facts
        used, passed = facts.cpu_seconds, facts.age
        if last is not None and last.age < facts.age:
            used, passed = used - last.cpu_seconds, passed - last.age
        return max(0.0, 100 * used / passed) if passed > 0 else 0.0


def snapshot(program: Program, usage: Usage) -> list[dict[str, Any]]:
    """The processes now. One that does not answer has `answers` false, no actors, and `problem` says why."""
    return [_describe(process, usage) for process in survey_program(program, _TIMEOUT)]


def _describe(process: Process, usage: Usage) -> dict[str, Any]:
    status = process.status or {"actors": [], "breakpoints": []}
    facts = process.facts
    waits = {at["thread"] for at in status["breakpoints"] if at["waits"]}
    return {
        "process": process.name,
        "address": process.address,
        "answers": process.status is not None,
        "problem": process.problem,
        "facts": asdict(facts) if facts is not None else None,
        "cpu_percent": usage.percent(facts) if facts is not None else None,
        "actors": [{**actor, "at_breakpoint": actor["thread"] in waits} for actor in status["actors"]],
    }


def document(program: Program, processes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"program": program.pid, "command": program.command, "time": time.time(), "processes": processes}


# --- for people


def rows(processes: list[dict[str, Any]], everything: bool) -> list[Row]:
    """One a process, and below it one an actor; the library's own actors only with `everything`."""
    found: list[Row] = []
    for process in processes:
        found.append(_process_row(process))
        for actor in process["actors"]:
            if everything or not actor["class"].startswith("monarch_rdma."):
                found.append(_actor_row(actor))
    return found


def _process_row(process: dict[str, Any]) -> Row:
    facts = process["facts"] or {}
    state = facts.get("state", "unknown")
    if not process["answers"]:
        state = f"NO ANSWER ({state})"
    cpu = f"{process['cpu_percent']:.0f}" if process["cpu_percent"] is not None else ""
    memory = _bytes(facts["rss"]) if facts else ""
    return process["process"], str(facts.get("pid", "")), state, cpu, memory, "", "", "", ""


def _actor_row(actor: dict[str, Any]) -> Row:
    name = f"  {actor['name']}[{actor['rank']}] {actor['class'].rpartition('.')[2]}"
    state = "idle"
    if actor["at_breakpoint"]:
        state = "at a breakpoint"
    elif actor["message"] or actor["concurrent"]:
        state = "works"
    age = f"{actor['age']:.1f} s" if actor["age"] is not None else ""
    return name, "", state, "", "", str(actor["mailbox"]), actor["message"] or "", age, str(actor["concurrent"] or "")


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def plain(found: list[Row]) -> str:
    """A table of text."""
    lines = [COLUMNS, *found]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def table(found: list[Row], title: str) -> Any:
    """The same for rich."""
    from rich.table import Table
    from rich.text import Text

    made = Table(*COLUMNS, title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for row in found:
        is_process = not row[0].startswith(" ")
        style = "bold red" if row[2].startswith("NO ANSWER") else "bold" if is_process else _STYLES.get(row[2], "")
        made.add_row(*map(Text, row), style=style)
    return made


_STYLES = {"idle": "dim", "at a breakpoint": "yellow", "works": "green"}


def _live(program: Program, interval: float, everything: bool) -> None:
    try:
        from rich.live import Live
    except ImportError as error:
        raise ConfigError("the live view needs rich: pip install monarch-rdma[tools]; or use --once") from error
    usage = Usage()
    title = f"program {program.pid}: {program.command:.100}   (Ctrl-C ends this view)"

    def look() -> Any:
        return table(rows(snapshot(program, usage), everything), title)

    try:
        with Live(look(), screen=True, auto_refresh=False) as live:
            while program in programs():
                time.sleep(interval)
                live.update(look(), refresh=True)
    except KeyboardInterrupt:
        return
    print(f"program {program.pid} has ended")
