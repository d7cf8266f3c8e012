"""Clients: of hosts where worker loops run, and of jobs that run already."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

from ... import config
from ...errors import AuthenticationError, ConfigError, PeerLost
from ...rdma.engine import seconds
from ..failure import SupervisionError
from ..future import Future, done_future
from ..mesh import HostMesh
from ..runtime.guardians import is_same_host
from ..runtime.proc import Proc, close_current, current_proc, existing_proc
from ..shape import Extent
from .introduction import Introduction, ask, introduce
from .job_secret import check_ca, engine_of_job, job_secret

__all__ = ["attach", "attach_to_workers", "reattach", "shutdown_context"]

_LONGEST_TIMEOUT = 1e6  # seconds
_joined: set[str] = set()  # agents of other processes that know us as a client


def attach_to_workers(
    *,
    private_key: bytes | os.PathLike[str] | None = None,
    ca: Any = None,
    workers: Sequence[str | Future[str]],
    name: str | None = None,
    timeout: float = 30.0,
) -> HostMesh:
    """The hosts where `run_worker_loop_forever` runs, as a mesh with the dimension `hosts`, in the order of `workers`.

    `workers`: their addresses. `private_key`, `ca`: as there. `timeout`: seconds for reaching all of them; those that
    do not answer are tried again until then, so that client and workers may be started at the same time.

    Raises PeerLost or TransferTimeout (a worker was not reached), AuthenticationError (its job secret is another one),
    ProtocolError (its version is), ConfigError.
    """
    check_ca(ca)
    limit = seconds(timeout)
    limit = limit if limit >= 0 else _LONGEST_TIMEOUT
    secret = job_secret(private_key)
    addresses = [_address_of(worker, index) for index, worker in enumerate(workers)]
    if not addresses:
        raise ConfigError("workers is empty, but a mesh has at least one host")
    deadline = time.monotonic() + limit
    engine_of_job(secret)
    found = ask(addresses, secret, limit)
    _check_workers(addresses, found)
    agents, region = [each.address for each in found], Extent(["hosts"], [len(found)]).region
    hosts = HostMesh(name or "hosts", agents, region, addresses)
    _join(current_proc(), hosts, max(0.1, deadline - time.monotonic()))
    return hosts


def reattach(worker: str, lost: str, timeout: float) -> str:
    """The agent that serves at a worker's address after the one at `lost` was lost: another one, or the same, which was
    cut off and has ended what we had there. Raises as `attach_to_workers`.
    """
    proc = current_proc()
    (found,) = ask([worker], proc.engine.secret, timeout)
    _check_workers([worker], [found])
    if found.address != lost:
        proc.supersede(lost)
    _join(proc, HostMesh("host", [found.address], Extent([], []).region), timeout)
    return found.address


def attach(address: str, *, private_key: bytes | os.PathLike[str] | None = None, timeout: float = 30.0) -> None:
    """Makes this process a client of a job that runs already, through any of its processes.

    `address`: of a worker loop as in `attach_to_workers`, or a complete one (any process's `default_engine().address`).
    Afterwards `this_host()` is the host of that process, and `get_or_spawn_controller` finds the controllers of that
    job, where it has a client. What this client starts ends with it; the job goes on. Raises as `attach_to_workers`.
    """
    if not isinstance(address, str):
        raise ConfigError(f"address is a {type(address).__name__}, but must be a string")
    limit = seconds(timeout)
    limit = limit if limit >= 0 else _LONGEST_TIMEOUT
    secret = job_secret(private_key)
    deadline = time.monotonic() + limit
    engine_of_job(secret)
    (found,) = ask([address], secret, limit)
    proc = current_proc()
    if proc.client != proc.address:
        raise ConfigError("this process is part of a job already: it was started by it, or has attached before")
    host = HostMesh("host", [found.host], Extent([], []).region)
    _join(proc, host, max(0.1, deadline - time.monotonic()))
    proc.hosts = host
    proc.client = found.client or proc.address
    introduce(proc)


def shutdown_context(host_timeout: float | None = None) -> Future[None]:
    """Ends what this client has started, on its own host and on those that it attached to, and its part in the job.

    `host_timeout`: seconds for the attached hosts; by default option process_exit_timeout. Worker loops go on.
    A program that goes on using actors afterwards begins anew.
    """
    default = float(config.get("process_exit_timeout"))
    limit = default if host_timeout is None else seconds(host_timeout, "host_timeout")
    proc = existing_proc()
    if proc is None:
        return done_future(None)
    ended: Future[None] = Future.pending()

    def end() -> None:
        try:
            _part(proc, limit if limit >= 0 else _LONGEST_TIMEOUT)
            close_current()
        except BaseException as error:
            ended.set_error(error)
        else:
            ended.set_result(None)

    threading.Thread(target=end, name="monarch_rdma-shutdown", daemon=True).start()
    return ended


def _address_of(worker: str | Future[str], index: int) -> str:
    address = worker.get() if isinstance(worker, Future) else worker
    if not isinstance(address, str):
        raise ConfigError(
            f"workers[{index}] is a {type(address).__name__}, but must be an address or the Future of one"
        )
    return address


def _check_workers(addresses: Sequence[str], found: Sequence[Introduction]) -> None:
    seen: dict[str, str] = {}
    for address, each in zip(addresses, found, strict=True):
        if not each.is_host_agent:
            raise ConfigError(f"the process at {address} is no worker loop: it was started by one")
        if each.address in seen:
            raise ConfigError(f"workers {seen[each.address]} and {address} are the same process")
        seen[each.address] = address


def _join(proc: Proc, hosts: HostMesh, timeout: float) -> None:
    """Tells the agents that we are there: proves that each can be reached, and that frames come back."""
    agents = [agent for agent in hosts._chosen() if agent != proc.address]
    if not agents:
        return
    _warn_if_unreachable(proc, agents)
    for agent in agents:  # it answers, so it is there, whatever was between us
        proc.is_back(agent)
    mesh = HostMesh(hosts.name, agents, Extent(["hosts"], [len(agents)]).region)
    try:
        mesh._agents().join.options(timeout=timeout).call(proc.address).wait_get()
    except (SupervisionError, AuthenticationError) as error:
        raise PeerLost(
            f"{error}. It answered at the address that was given, but says that it is found at the one named here: if "
            "that cannot be reached, say where in its own address (tcp://dial_host:port@bind_host:port) or in its "
            "option advertise_host",
            operation="attach",
        ) from error
    if not _joined:
        proc.at_close(_joined.clear)
    _joined.update(agents)


def _part(proc: Proc, timeout: float) -> None:
    agents = sorted(agent for agent in _joined if not proc.is_lost(agent))
    if agents:
        proc.host_watch.discard_hosts(agents)
        mesh = HostMesh("joined", agents, Extent(["hosts"], [len(agents)]).region)
        parting = mesh._agents().part.options(timeout=timeout).call(proc.address)
        parting.wait(timeout)


def _warn_if_unreachable(proc: Proc, agents: Sequence[str]) -> None:
    """Answers come over our own connections. What workers begin themselves needs a way to us."""
    listens_at = proc.address.partition("://")[2].rpartition("/")[0].rpartition(":")[0]
    is_alone = listens_at in ("127.0.0.1", "[::1]", "localhost")
    if is_alone and not all(is_same_host(agent, proc.address) for agent in agents):
        warnings.warn(
            "this client listens on its own host only, so processes on other hosts cannot begin to talk to it (to its "
            "controllers, for example); call enable_transport('tcp') first, or set option listen_host",
            UserWarning,
            stacklevel=3,
        )
