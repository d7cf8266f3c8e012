"""python tests/rdma_vm [options] COMMAND: runs COMMAND (a line of bash, in this checkout) in the machine (--help)."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rdma_vm.image import ROOT, Unavailable, prepare
from rdma_vm.machine import Command, Machine, MachineError, empty_folder, two_machines

_EXAMPLE = """\
examples:
  python tests/rdma_vm ibv_devinfo
  python tests/rdma_vm 'python -m pytest tests/rdma_vm/guest -k devices --junitxml=/results/devices.xml'
  python tests/rdma_vm --two 'ib_read_bw -d rxe0 -F' 'ib_read_bw -d rxe0 -F 10.9.0.1'
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/rdma_vm", epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Runs commands in a virtual machine with two Soft-RoCE devices, or in two that are linked.",
    )  # fmt: skip
    parser.add_argument(
        "command", nargs="*", help="lines of bash: one, or with --two one a machine; none: only prepare"
    )
    parser.add_argument("--two", action="store_true", help="two machines; the second command starts after the first")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of the whole (300)")
    parser.add_argument("--results", type=Path, default=ROOT / "build/rdma_vm/command", help="what is /results inside")
    options = parser.parse_args()
    if options.command and len(options.command) != (2 if options.two else 1):
        parser.error(f"--two needs two commands, otherwise one; {len(options.command)} given")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        image = prepare(lambda line: print(line, file=sys.stderr))
        if not options.command:
            return 0
        results = empty_folder(options.results.resolve())
        with contextlib.ExitStack() as stack:
            machines: tuple[Machine, ...]
            if options.two:
                machines = stack.enter_context(two_machines(image, results, limit=options.seconds))
            else:
                machines = (stack.enter_context(Machine(image, results, limit=options.seconds)),)
            started = [machine.start(line) for machine, line in zip(machines, options.command, strict=True)]
            return max([_follow(command, options.seconds) for command in started])
    except (Unavailable, MachineError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _follow(command: Command, seconds: float) -> int:
    """Prints what the command writes, until its end."""
    shown = 0
    deadline = time.monotonic() + seconds
    while True:
        ended = command.ended(0.2)
        output = command.output()
        sys.stdout.write(output[shown:])
        sys.stdout.flush()
        shown = len(output)
        if ended is not None:
            return ended.code
        if time.monotonic() > deadline:
            raise TimeoutError(f"{command.command!r} took over {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
