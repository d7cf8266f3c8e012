"""Four replicas of two trainers each, a fault every few seconds, no checkpoint: beside the same without failures.

From the repository's root: `python -m examples.llama_diloco.story`, or `make demo`; with `--job slurm` on a login node.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

_ENDING = 1.0  # seconds for what this program has started to end in order; it ends by itself when the program is gone


def main() -> int:
    _on_signals(_leave)  # until there is anything to be ended
    parser = argparse.ArgumentParser(prog="python -m examples.llama_diloco.story", description=__doc__)
    parser.add_argument("--small", action="store_true", help="short: about a minute")
    parser.add_argument("--rounds", type=int, help="of each run [as many as take a minute or so]")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--trainers", type=int, default=2, help="of each replica")
    parser.add_argument("--fault-every", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--output", type=Path, default=Path("demo_out"), help="where picture and figures go")
    parser.add_argument("--job", choices=("local", "slurm"), default="local", help="where replicas run")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="of each replica's job; may be "
                        "repeated: --sbatch=--partition=gpu")  # fmt: skip
    parser.add_argument("--coordination", choices=("monarch_rdma", "torchft"), default="monarch_rdma")
    arguments = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of each connection that a fault has ended

    from monarch_rdma.config import configure
    from monarch_rdma.errors import RdmaError

    from .comparison import Setting, play

    setting = Setting(
        replicas=min(arguments.replicas, 3) if arguments.small else arguments.replicas,
        trainers=arguments.trainers,
        rounds=arguments.rounds or (8 if arguments.small else None),
        fault_every=arguments.fault_every,
        seed=arguments.seed,
        output=arguments.output,
        job=arguments.job,
        sbatch=tuple(arguments.sbatch),
        coordination=arguments.coordination,
    )
    configure(process_exit_timeout=1.0)
    try:
        _on_signals(_interrupt)
        return play(setting)
    except KeyboardInterrupt as stopped:
        _end(128 + int(stopped.args[0]))
    except RdmaError as error:
        print(f"story: {error}", file=sys.stderr)
        return 1


def _on_signals(action: object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, action)  # type: ignore[arg-type]


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing was started yet; what is being imported need not be taken apart."""
    os.write(2, b"\nstopped\n")
    os._exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Once: who is impatient does not disturb the end."""
    _on_signals(signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def _end(code: int) -> NoReturn:
    """Whatever waits for something is not waited for: threads that start processes, or wait in a scheduler's queue."""
    from monarch_rdma.actor import shutdown_context

    try:
        shutdown_context().get(_ENDING)
    except TimeoutError:
        print("\nwhat has been started ends by itself", file=sys.stderr)
    print("\nstopped", file=sys.stderr)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
