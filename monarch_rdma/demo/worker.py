"""One process of the demo, an owner or a reader: does what the parent says, line by line, and ends with it.

A line of its standard input is {"do": name, ...arguments}; the answer is {"result": ...} or {"error": ...}, after any
number of {"progress": bytes} and {"event": name}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1

Emit = Callable[..., None]


def _end_with(parent: int) -> None:
    """The kernel kills this process when the parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answers() -> TextIO:
    """The pipe to the parent; whatever else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def main() -> None:
    """Arguments: role ("owner" or "reader"), name, descriptor of the job secret, process id of the parent."""
    role, name, secret_fd, parent = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    _end_with(parent)
    answers = _answers()

    def emit(**facts: Any) -> None:
        answers.write(json.dumps(facts) + "\n")

    try:
        _serve(role, name, secret_fd, emit)
    except Exception as error:
        emit(error=_failure(error))


def _serve(role: str, name: str, secret_fd: int, emit: Emit) -> None:
    from .. import config

    config.configure(secret_fd=secret_fd, secret_file="", name=name)  # whatever the environment says
    import torch

    from ..rdma import RDMATcpFallbackWarning

    torch.set_num_threads(1)  # the cores are for the copies
    warnings.simplefilter("ignore", RDMATcpFallbackWarning)  # every lane is asked for by name here
    actor: Any
    if role == "owner":
        from .owner import Owner

        actor = Owner(emit)
    else:
        from .reader import Reader

        actor = Reader(emit)
    emit(event="ready")
    for line in sys.stdin:
        order = json.loads(line)
        try:
            emit(result=getattr(actor, order.pop("do"))(**order))
        except Exception as error:
            emit(error=_failure(error))


def _failure(error: Exception) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}


if __name__ == "__main__":
    main()
