"""What goes on in this process: its actors, and the Python stacks of its threads and of tasks that wait.

Everything is told in plain dicts and lists, as `monarch-rdma top --json` and `stacks --json` print them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

from ... import config
from ..runtime.instance import Instance
from ..runtime.proc import Proc, current_proc
from . import breakpoints

__all__ = ["known_hosts", "stacks", "status"]


def status() -> dict[str, Any]:
    """Of each actor: mailbox depth, the message at hand and its age in seconds. `hosts`: agents that are known here."""
    proc, now = current_proc(), time.monotonic()
    return {
        "process": proc.name,
        "pid": os.getpid(),
        "address": proc.address,
        "hosts": known_hosts(proc),
        "event_log": str(config.get("event_log")),
        "actors": [actor.describe(now) for actor in _actors()],
        "breakpoints": breakpoints.waiting(),
    }


def known_hosts(proc: Proc) -> list[str]:
    """Agents that a process knows."""
    hosts = set() if proc.hosts is None else set(proc.hosts._chosen())
    return sorted(hosts | proc.host_watch.agents)


def stacks() -> dict[str, Any]:
    """The threads of this process, seen from inside, and the tasks that wait on actors' event loops. Frames are in the
    order of a traceback: the innermost last.
    """
    return {"threads": _threads(), "tasks": [task for actor in _actors() for task in _tasks(actor)]}


def _actors() -> list[Instance]:
    return [receiver for receiver in list(current_proc().receivers.values()) if isinstance(receiver, Instance)]


def _threads() -> list[dict[str, Any]]:
    known = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        thread = known.get(ident)
        found.append(
            {
                "thread": thread.native_id if thread is not None else None,
                "name": thread.name if thread is not None else None,
                "has_gil": ident == threading.get_ident(),
                "frames": _frames(frame),
            }
        )
    return found


def _frames(frame: FrameType | None) -> list[dict[str, Any]]:
    frames = []
    while frame is not None:
        frames.append(_describe(frame))
        frame = frame.f_back
    return frames[::-1]


def _describe(frame: FrameType) -> dict[str, Any]:
    return {"function": frame.f_code.co_name, "file": frame.f_code.co_filename, "line": frame.f_lineno}


def _tasks(actor: Instance) -> list[dict[str, Any]]:
    """Tasks of the actor's loop that wait for something: no thread has their frames."""
    thread = actor.describe(0.0)["thread"]
    return [
        {"thread": thread, "name": task.get_name(), "endpoint": method, "frames": frames}
        for task, method in actor.tasks()
        if (frames := _awaited(task.get_coro()))
    ]


def _awaited(coroutine: Any) -> list[dict[str, Any]]:
    """From a suspended coroutine to the innermost one that it awaits; empty where it runs."""
    frames: list[dict[str, Any]] = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None or getattr(coroutine, "cr_running", False):
            break
        frames.append(_describe(frame))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return frames
