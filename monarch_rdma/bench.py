"""`monarch-rdma bench`: the stand-alone benchmark of the core, each lane beside the raw mechanism it is built on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

__all__ = ["DEFAULTS", "binary", "command", "run"]

# Each lane at its own sizes, in turns with the raw mechanism it is built on: about half a minute.
DEFAULTS = ["--local", "--baseline", "--sizes", "8,4K,64K,1M,16M,64M", "--seconds", "0.2", "--rounds", "5"]


def binary() -> Path:
    """Where the benchmark program belongs; it need not be there."""
    return Path(__file__).resolve().parent / "bin" / "transport_bench"


def command(arguments: list[str]) -> list[str]:
    """What is run. No arguments means DEFAULTS; an argument list without a role measures on this host."""
    roles = {"--local", "--listen", "--connect", "--help"}
    if not any(argument.partition("=")[0] in roles for argument in arguments):
        named = {argument.partition("=")[0] for argument in arguments}
        arguments = [*arguments, *_defaults_without(named)]
    return [str(binary()), *arguments]


def _defaults_without(named: set[str]) -> list[str]:
    """The defaults that do not contradict what was asked for."""
    contradicted = set(named)
    if "--strided" in named:
        contradicted.add("--sizes")
    if "--iters" in named:
        contradicted.add("--seconds")
    if named & {"--idle", "--memory"}:
        contradicted |= {"--sizes", "--baseline", "--seconds", "--rounds"}
    kept: list[str] = []
    keep = True
    for word in DEFAULTS:
        if word.startswith("--"):
            keep = word not in contradicted
        if keep:
            kept.append(word)
    return kept


def run(arguments: list[str]) -> int:
    """Becomes the benchmark program, so that signals and exit code are its own; returns only where there is none."""
    if "--collectives" in arguments:
        rest = [each for each in arguments if each != "--collectives"]
        os.execv(sys.executable, [sys.executable, "-m", "monarch_rdma.collectives.measure", *rest])
    program = command(arguments)
    if not os.access(program[0], os.X_OK):
        print(f"monarch-rdma bench: {program[0]} is missing; `make build` makes it", file=sys.stderr)
        return 1
    sys.stdout.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the program would inherit that
    os.execv(program[0], program)
