"""What else the kernel knows of how a process ended: a core file, a kill for want of memory."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

__all__ = ["hint", "oom_kills"]

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """How often the kernel has killed for want of memory, in this process's control group or anywhere on this host, as
    far as it can be read. Two of these numbers tell whether it happened in between.
    """
    return sum(int(count) for text in _texts() for count in _COUNT.findall(text))


def _texts() -> Iterator[str]:
    for path in (Path("/proc/vmstat"), *_counters()):
        try:
            yield path.read_text()
        except OSError:  # another kernel, or another version of control groups
            continue


def _counters() -> Iterator[Path]:
    """Of both versions. In a container the group's path may be that of the host, and its files at the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            places, name = [_CGROUPS / path[1:], _CGROUPS / "unified" / path[1:], _CGROUPS], "memory.events"
        elif "memory" in controllers.split(","):
            places, name = [_CGROUPS / "memory" / path[1:], _CGROUPS / "memory"], "memory.oom_control"
        else:
            continue
        found = next((place / name for place in places if (place / name).exists()), None)
        if found is not None:
            yield found


def hint(returncode: int | None, *, has_core: bool, new_oom_kills: int, was_ours: bool) -> str:
    """A sentence for people, or "". `new_oom_kills`: while it ran. `was_ours`: the library killed it."""
    if has_core:
        return f"its memory was written to a core file (pattern {_core_pattern()!r})"
    if returncode != -signal.SIGKILL or was_ours:
        return ""
    if new_oom_kills > 0:
        return (
            f"the kernel has killed for want of memory while it ran ({new_oom_kills} times by its counters): probably "
            "this process; `dmesg` says which"
        )
    return "the kernel has killed nothing for want of memory meanwhile, and monarch_rdma did not kill it: somebody did"


def _core_pattern() -> str:
    try:
        return Path("/proc/sys/kernel/core_pattern").read_text().strip()
    except OSError:
        return "unknown"
