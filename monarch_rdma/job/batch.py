"""`python -m monarch_rdma.job.batch STATE COMMAND`: runs a job's client inside the job (batch mode)."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from .. import config
from ..actor.launch.placement import environment
from ..errors import RdmaError
from .trait import job_load

__all__ = ["main"]

_PATIENCE = 60.0  # seconds for the state file: the job may begin before whoever has asked for it has written it
_PAUSE = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code, 128 and more for a signal."""
    parser = argparse.ArgumentParser(prog="python -m monarch_rdma.job.batch", description=__doc__)
    parser.add_argument("--kill", action="store_true", help="end the job afterwards")
    parser.add_argument("state", metavar="STATE", help="the job's state file")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + _PATIENCE
    while not os.path.exists(arguments.state):
        if time.monotonic() > deadline:
            print(f"monarch_rdma.job.batch: there is no {arguments.state}", file=sys.stderr)
            return 1
        time.sleep(_PAUSE)
    try:
        return _run(arguments.command, arguments.state)
    except OSError as error:
        print(f"monarch_rdma.job.batch: the client cannot be run: {error}", file=sys.stderr)
        return 127
    finally:
        if arguments.kill:
            try:
                job_load(arguments.state).kill()
            except RdmaError as error:
                print(f"monarch_rdma.job.batch: the job could not be ended: {error}", file=sys.stderr)


def _run(command: list[str], state: str) -> int:
    variables = environment({config.OPTIONS["job_state"].env: state})
    with subprocess.Popen(command, env=variables) as client:

        def pass_on(number: int, _: FrameType | None) -> None:
            client.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        code = client.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
