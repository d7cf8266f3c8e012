"""`python -m monarch_rdma.job.agent`: what a job's scheduler starts on each host.

A worker loop that also tells its clients what the scheduler's signals say (SIGTERM: the host is taken away; SIGUSR1: it
will be soon), and that ends when nobody wants it any more. The job's secret comes from a private file or from standard
input, never from an argument.
"""

from __future__ import annotations

import argparse
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .. import config
from ..actor.hosting.worker import leave, serve
from ..actor.joining.transport import be_found_by_other_hosts
from ..actor.joining.worker_loop import open_loop
from ..actor.runtime.proc import Proc
from ..errors import ConfigError, RdmaError
from ..rdma.secret import Secret
from .notices import ENDING, TOLD, WARNED, Subscribers, offer_notices

__all__ = ["main"]

_PATIENCE = 1.0  # seconds for clients to hear that this host ends
_PORTS = 100
_STDIN = "-"
_SECRET_BYTES = 4097  # one more than a secret may have


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal, a client's `shutdown()`, or until nobody wants this host any more."""
    arguments = _parser().parse_args(argv)
    try:
        return _serve(arguments)
    except RdmaError as error:
        print(f"monarch_rdma.job.agent: {error}", file=sys.stderr, flush=True)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m monarch_rdma.job.agent", description=__doc__)
    parser.add_argument("--secret", required=True, metavar="FILE", help="the job's secret; - reads standard input")
    parser.add_argument("--job", help="the number of the job, for who looks at processes")
    parser.add_argument(
        "--address", help="where clients find it: tcp://..., ipc://... or file://...; default: any port"
    )
    parser.add_argument("--port", type=int, help=f"the first of {_PORTS} ports that may be taken; default: any")
    parser.add_argument("--tell", action="store_true", help="print the complete address and the pid once it listens")
    parser.add_argument("--local", action="store_true", help="for clients of this host alone")
    parser.add_argument("--idle", type=float, default=math.inf, help="end after so many seconds without any client")
    parser.add_argument("--linger", type=float, default=math.inf, help="... and so many after the last one was lost")
    parser.add_argument("--with-parent", action="store_true", help="end at once when the process that started it ends")
    parser.add_argument("--log", type=Path, help="where what is printed goes once it listens")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.with_parent:
        _end_with(os.getppid())
    if arguments.secret == _STDIN:
        secret = Secret(sys.stdin.buffer.read(_SECRET_BYTES))
    else:
        secret = Secret.from_file(arguments.secret)
    config.configure(secret_file="")  # whatever the environment of the scheduler says
    if arguments.port is not None:
        config.configure(port_min=arguments.port, port_max=min(arguments.port + _PORTS - 1, 65535))
    if not arguments.local:
        be_found_by_other_hosts()
    subscribers: list[Subscribers] = []

    def prepare(proc: Proc) -> None:
        subscribers.append(offer_notices(proc, arguments.idle, arguments.linger, leave))

    _on_signals(subscribers)
    proc = open_loop(arguments.address, secret, ends_at_shutdown=True, prepare=prepare)
    proc.client = None
    if arguments.tell:
        print(f"{TOLD}{proc.address} {proc.pid}", flush=True)
    if arguments.log is not None:
        _print_to(arguments.log)
    serve()
    return 0


def _on_signals(subscribers: list[Subscribers]) -> None:
    """Whoever is in the middle of something must not be kept there: what takes time is done by threads."""

    def on_end(number: int, _: FrameType | None) -> None:
        reason = f"signal {signal.Signals(number).name}"
        if not subscribers:
            raise SystemExit(128 + number)
        threading.Thread(target=end, args=(reason,), name="monarch_rdma-ending", daemon=True).start()

    def end(reason: str) -> None:
        subscribers[0].tell(ENDING, reason, _PATIENCE)
        leave(reason)

    def on_warning(number: int, _: FrameType | None) -> None:
        for each in subscribers:
            what = f"signal {signal.Signals(number).name}"
            threading.Thread(target=each.tell, args=(WARNED, what, 0.0), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_end)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, on_warning)


def _end_with(parent: int) -> None:
    """The kernel tells of the parent's end, whichever of its threads started us."""
    try:
        fd = os.pidfd_open(parent)
    except OSError as error:
        raise ConfigError(f"process {parent}, which started this agent, cannot be watched: {error.strerror}") from error
    if os.getppid() != parent:
        raise SystemExit(1)

    def watch() -> NoReturn:
        select.select([fd], [], [])
        os._exit(1)  # the host is given up: what runs here ends with us, by the kernel

    threading.Thread(target=watch, name="monarch_rdma-parent", daemon=True).start()


def _print_to(log: Path) -> None:
    """Lets go of the pipes of whoever started us: it knows all that it has to."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(fd, stream.fileno())
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
