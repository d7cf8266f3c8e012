"""What the programs that print tables share: which sections to run, going on after a failure, figures as a file."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from rows import Table

__all__ = ["table_parser", "tabulate"]

Steps = Mapping[str, Iterable[Callable[[], None]]]


def table_parser(description: str | None, sections: tuple[str, ...]) -> argparse.ArgumentParser:
    def section_list(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in sections:
                raise argparse.ArgumentTypeError(f"no section {name!r}; there are {', '.join(sections)}")
        return chosen

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and no size above 64 MiB")
    parser.add_argument("--only", type=section_list, default=sections, metavar="LIST", help=", ".join(sections))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    return parser


def tabulate(table: Table, steps: Steps, arguments: argparse.Namespace) -> int:
    """Runs the chosen sections; the process's exit code, 1 where something could not be measured."""
    started = time.monotonic()
    for name in steps:
        if name not in arguments.only:
            continue
        for step in steps[name]:
            try:
                step()
            except Exception as error:  # the other rows are still wanted; the exit code tells
                table.fail(f"{name}: {error}")
    print(f"{len(table.rows)} rows in {time.monotonic() - started:.0f} s", file=sys.stdout)
    if arguments.json:
        host = {"machine": platform.machine(), "kernel": platform.release(), "python": platform.python_version()}
        document = {"host": host, "torch": torch.__version__, "rows": [row.as_dict() for row in table.rows]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if table.failures else 0
