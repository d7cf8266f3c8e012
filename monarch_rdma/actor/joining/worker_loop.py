"""A process as the agent of its host: clients attach to it, and it starts processes for them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ... import config
from ...errors import ResourceExhausted
from ...rdma.engine import Engine
from ...rdma.secret import Secret
from ..future import Future
from ..hosting.host import HOST, start_agent
from ..hosting.worker import leave, serve
from ..runtime.proc import Proc, current_proc
from .job_secret import check_ca, engine_of_job, job_secret
from .last_words import told_in_a_sentence
from .rendezvous import Claim, SharedClaim
from .transport import be_found_by_other_hosts
from .worker_address import FileAddress, TcpAddress, parse, port_of

__all__ = ["open_loop", "run_worker_loop_forever", "run_worker_loop_until_shutdown", "start_worker_loop_forever"]

_log = logging.getLogger("monarch_rdma.actor")


def run_worker_loop_forever(
    *, private_key: bytes | os.PathLike[str] | None = None, ca: Any = None, address: str
) -> None:
    """Makes this process the agent of its host, and serves clients until SIGTERM or SIGINT (Ctrl-C).

    Clients reach it with `attach_to_workers(workers=[address])`; several may use it at once. What a client started here
    ends when the client does; everything ends with this process, however that ends.

    `address`: `tcp://host:port`, `tcp://dial_host:port@bind_host:port`, `tcp://*:port`, for clients on the same host
    `ipc://path`, or `file://path` on storage that the clients' hosts share: then any port is taken, and the file says
    which. `private_key`: the job secret, or the path of its file; by default what the options secret_file or
    secret_fd give. `ca`: Monarch's; "trust_all_connections" is accepted and means nothing.

    Processes that are started here listen on the same host address, at any port; the options port_min and port_max in
    this process's environment bound them.

    Raises ConfigError (no job secret, a wrong address, a process that has begun as something else) or ResourceExhausted
    (the address is taken). A program that does not catch them ends with their sentence and exit code 1.
    """
    with told_in_a_sentence():
        check_ca(ca)
        _run(private_key, address, ends_at_shutdown=False)


def run_worker_loop_until_shutdown(
    *, private_key: bytes | os.PathLike[str] | None = None, ca: Any = None, address: str
) -> None:
    """Like `run_worker_loop_forever`, but returns also when a client calls `shutdown()` on the host mesh."""
    with told_in_a_sentence():
        check_ca(ca)
        _run(private_key, address, ends_at_shutdown=True)


def start_worker_loop_forever(
    *, private_key: bytes | os.PathLike[str] | None = None, ca: Any = None, address: str
) -> Future[None]:
    """Like `run_worker_loop_forever`, but returns at once: for a program that does other things too.

    The future is over when this process has ended its part in the actor layer (`shutdown_context()`, or its exit).
    """
    check_ca(ca)
    secret = job_secret(private_key)
    proc = open_loop(address, secret, ends_at_shutdown=False)
    ended: Future[None] = Future.pending()

    def end() -> None:
        ended.set_result(None)

    proc.at_close(end)
    return ended


def _run(private_key: bytes | os.PathLike[str] | None, address: str, *, ends_at_shutdown: bool) -> None:
    secret = job_secret(private_key)
    with _signals_end_it():
        proc = open_loop(address, secret, ends_at_shutdown)
        proc.client = None
        serve()


def open_loop(
    address: str | None, secret: Secret, ends_at_shutdown: bool, prepare: Callable[[Proc], None] | None = None
) -> Proc:
    """Makes this process the agent of its host. `address`: None listens where the options say. `prepare`: called with
    this process's part in the actor layer before it is an agent.
    """
    if address is None:
        return _serve_on(engine_of_job(secret), ends_at_shutdown, prepare)
    where = parse(address)
    if isinstance(where, FileAddress):
        claim = SharedClaim(where.path) if where.is_shared else Claim(where.path)
        if where.is_shared:
            be_found_by_other_hosts()
        try:
            proc = _serve_on(engine_of_job(secret), ends_at_shutdown, prepare)
            claim.tell(proc.address)
        except BaseException:
            claim.release()
            raise
        proc.at_close(claim.release)
    else:
        proc = _serve_on(_listening(where, secret), ends_at_shutdown, prepare)
    _log.info("worker loop at %s (%s)", address, proc.address)
    return proc


def _serve_on(engine: Engine, ends_at_shutdown: bool, prepare: Callable[[Proc], None] | None) -> Proc:
    proc = current_proc()
    assert proc.engine is engine, "both are this process's default engine"
    if prepare is not None:
        prepare(proc)
    if HOST not in proc.receivers:  # else it has used its own host already
        start_agent(proc, ends_at_shutdown=ends_at_shutdown)
    return proc


def _listening(where: TcpAddress, secret: Secret) -> Engine:
    """This process's engine, made so that it listens there. Options stay as they were where that fails."""
    before = config.get_runtime_config()
    config.configure(**where.options)
    try:
        engine = engine_of_job(secret)
        if port_of(engine.address) != where.port:
            engine.close()
            raise ResourceExhausted(
                f"address {where.text!r} is taken: another process listens at port {where.port}", operation="listen"
            )
    except BaseException:
        config.clear_runtime_config()
        config.configure(**before)
        raise
    return engine


@contextmanager
def _signals_end_it() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the loop, in order. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _: FrameType | None) -> None:
        leave(f"signal {signal.Signals(number).name}")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
