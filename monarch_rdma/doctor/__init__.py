"""`monarch-rdma doctor`: what this host can do, why not more, and the command that changes it."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict

from .check import Check

__all__ = ["Check", "examine", "run"]


def examine() -> list[Check]:
    """Looks at everything; takes about a second."""
    from . import devices, kernel, lanes, software

    found = [*software.checks(), *kernel.checks(), *devices.checks()]
    return [*lanes.checks(found), *found]


def run(*, as_json: bool = False) -> int:
    """Prints what was found. 0 where everything works that this host can offer, else 1."""
    found = examine()
    healthy = all(check.ok for check in found if check.required)
    if as_json:
        print(json.dumps({"ok": healthy, "checks": [asdict(check) for check in found]}, indent=2))
    else:
        print(table(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else 120))
        print(_verdict(found, healthy))
    return 0 if healthy else 1


def table(found: list[Check], width: int) -> str:
    """One line a check, its fix below it where it is not ok."""
    names = max(len(check.name) for check in found)
    lines: list[str] = []
    group = ""
    for check in found:
        if check.group != group:
            group = check.group
            lines.append(f"\n{group}" if lines else group)
        mark = "ok  " if check.ok else "FAIL" if check.required else "-   "
        start = f"  {mark} {check.name:{names}}  "
        lines += _wrapped(start, check.why, width)
        if check.fix and not check.ok:
            lines += _wrapped(" " * len(start) + "fix: ", check.fix, width)
    return "\n".join(lines)


def _wrapped(start: str, text: str, width: int) -> list[str]:
    room = max(40, width - len(start))
    parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [(start if number == 0 else " " * len(start)) + part for number, part in enumerate(parts)]


def _verdict(found: list[Check], healthy: bool) -> str:
    lanes = [check.name for check in found if check.group == "lanes" and check.ok]
    if healthy:
        return f"\nHealthy: {', '.join(lanes)} work here."
    broken = ", ".join(check.name for check in found if check.required and not check.ok)
    return f"\nNot healthy: {broken}. Lanes that work: {', '.join(lanes) or 'none'}."
