"""`monarch-rdma stacks`: what every actor, and every other thread, of a program is doing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ..actor.debugging import py_spy
from ..actor.debugging.registry import choose
from ..actor.debugging.survey import Answer, Process, agent_of, ask_all, host_agent_of, join, survey_program

__all__ = ["run"]

_TIMEOUT = 2.0  # seconds that a process has to answer by itself
_PY_SPY_TIMEOUT = 30.0
_ACTOR_THREAD = re.compile(r"(?P<actor>.+)\[(?P<rank>[0-9]+)\]")
_INSTANCE = "monarch_rdma/actor/runtime/instance.py"  # calls the endpoints
_WORKER = "monarch_rdma/actor/hosting/worker.py"  # its main thread waits for the end
_NOT_THE_USERS = re.compile(r"/monarch_rdma/|/lib/python3\.[0-9]+/(?!site-packages|dist-packages)|^<frozen ")


def run(*, pid: int | None, as_json: bool, everything: bool) -> int:
    """Prints the stacks of all processes of the program; exit code 1 where some could not be had."""
    program = choose(pid)
    join(program)
    reports = gather(survey_program(program, _TIMEOUT))
    if as_json:
        print(json.dumps({"program": program.pid, "command": program.command, "processes": reports}, indent=2))
    else:
        print(f"program {program.pid}: {program.command}")
        for report in reports:
            print("\n".join(lines_of(report, everything)))
    return 1 if any(report["problem"] for report in reports) else 0


def gather(processes: list[Process]) -> list[dict[str, Any]]:
    """One report a process: `how` its threads were found, `threads` and `tasks`, each with its actor."""
    from_outside = ask_all([_by_py_spy(process) for process in processes])
    from_inside = ask_all([_by_itself(process) for process in processes])
    return [_report(*each) for each in zip(processes, from_outside, from_inside, strict=True)]


def _by_py_spy(process: Process) -> Callable[[], Any]:
    facts = process.facts
    if facts is None:
        return lambda: None
    if not process.host:  # of this host, and its agent does not answer
        return lambda: py_spy.dump(facts.pid)
    return lambda: host_agent_of(process.host).dump.options(timeout=_PY_SPY_TIMEOUT).call_one(facts.pid).get()


def _by_itself(process: Process) -> Callable[[], Any]:
    if process.status is None:
        return lambda: None
    return lambda: agent_of(process.address).stacks.options(timeout=_TIMEOUT).call_one().get()


def _report(process: Process, outside: Answer, inside: Answer) -> dict[str, Any]:
    actors = {actor["thread"]: actor for actor in process.status["actors"]} if process.status is not None else {}
    at = {found["thread"] for found in process.status["breakpoints"]} if process.status is not None else set()
    own = inside.value or {"threads": [], "tasks": []}
    problem = ""
    if outside.value:
        threads, how = outside.value, "by py-spy"
    elif inside.value:
        threads, how = own["threads"], f"by the process itself ({outside.problem or 'its host does not answer'})"
    else:
        threads, how = [], "not at all"
        problem = (
            f"it does not answer ({inside.problem or process.problem}), and {outside.problem or 'its host neither'}"
        )
    return {
        "process": process.name,
        "pid": process.facts.pid if process.facts is not None else None,
        "state": process.facts.state if process.facts is not None else None,
        "how": how,
        "problem": problem,
        "threads": [{**_named(thread, actors), "at_breakpoint": thread["thread"] in at} for thread in threads],
        "tasks": [_named(task, actors) for task in own["tasks"]],
    }


def _named(thread: dict[str, Any], actors: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """With the actor whose thread it is, its rank and the endpoint at hand. Where the process does not answer, these
    are guessed from the thread's name and frames.
    """
    actor = actors.get(thread["thread"])
    if actor is not None:
        named = {"actor": actor["name"], "rank": actor["rank"], "class": actor["class"]}
        return {**named, "endpoint": actor["message"], "age": actor["age"], **thread}
    match = _ACTOR_THREAD.fullmatch(thread["name"] or "")
    named = {"actor": match["actor"] if match else None, "rank": int(match["rank"]) if match else None, "class": None}
    return {**named, "endpoint": _endpoint_in(thread["frames"]), "age": None, **thread}


def _endpoint_in(frames: list[dict[str, Any]]) -> str | None:
    calls = [index for index, frame in enumerate(frames[:-1]) if frame["file"].endswith(_INSTANCE)]
    if not calls or not frames[calls[-1]]["function"].endswith(("_invoke", "_run_async")):
        return None
    return str(frames[calls[-1] + 1]["function"]).rpartition(".")[2]


# --- for people


def lines_of(report: dict[str, Any], everything: bool) -> list[str]:
    """A process: actors and threads that run users' code, or all; frames in the order of a traceback."""
    state = f", {report['state']}" if report["state"] in ("stopped", "dead", "traced") else ""
    lines = [f"\nprocess {report['process']} (pid {report['pid']}{state}), {report['how']}"]
    if report["problem"]:
        return [*lines, f"  {report['problem']}"]
    with_tasks = {task["thread"] for task in report["tasks"] if task["endpoint"]}
    for thread in report["threads"]:
        frames = thread["frames"] if everything else _users_part(thread["frames"])
        if frames:
            lines += [f"  {_title(thread)}", *map(_line, frames)]
        elif _is_of_users_actor(thread) and thread["thread"] not in with_tasks:
            lines.append(f"  {_title(thread)}: waits for messages")
    for task in report["tasks"]:
        frames = task["frames"] if everything else _users_part(task["frames"])
        if frames:
            lines += [f"  {_title(task)}, awaits in task {task['name']}", *map(_line, frames)]
    return lines


def _is_of_users_actor(thread: dict[str, Any]) -> bool:
    return thread["class"] is not None and not thread["class"].startswith("monarch_rdma.")


def _users_part(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the outermost frame of users' code on, up to where it went into pdb; empty where there is none."""
    if any(frame["file"].endswith(_WORKER) and frame["function"].endswith("serve") for frame in frames):
        return []
    first = next((i for i, frame in enumerate(frames) if not _NOT_THE_USERS.search(frame["file"])), len(frames))
    pdb = next((i for i, frame in enumerate(frames) if frame["file"].endswith("/bdb.py")), len(frames))
    return frames[first:pdb]


def _title(thread: dict[str, Any]) -> str:
    if thread["actor"] is None:
        title = f"thread {thread['name'] or thread['thread']}"
    else:
        title = f"{thread['actor']}[{thread['rank']}]"
    if thread["endpoint"]:
        title += f" in {thread['endpoint']}"
        title += f" for {thread['age']:.1f} s" if thread["age"] is not None else ""
    title += " at a breakpoint" if thread.get("at_breakpoint") else ""
    return title + (", holds the GIL" if thread.get("has_gil") else "")


def _line(frame: dict[str, Any]) -> str:
    return f"      {frame['function']} ({frame['file']}:{frame['line']})"
