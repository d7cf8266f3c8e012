"""Spawning processes on hosts: what to start where, and doing so through the hosts' agents, at first and again."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ..context import context
from ..future import Future
from ..joining.attach import reattach
from ..joining.controller import offer_controllers
from ..launch.launcher import ProcessSpec
from ..mesh import HostMesh, ProcMesh
from ..remote_error import ActorError
from ..runtime.proc import current_proc
from ..shape import Extent, Point
from ..supervising.processes import ProcessDriver
from ..supervising.restarts import Restarts
from .host import BootstrapCommand, Order, default_bootstrap_cmd
from .worker import seed

__all__ = ["Spawning", "spawn_on_hosts"]

_names = itertools.count()
_REATTACH_TIMEOUT = 1.0  # seconds to find a worker loop again; the policy says how often and how soon
# What every process needs sooner or later, imported once for all of them.
_PRELOAD = ("monarch_rdma.actor.encoding.pickling",)
_PRELOAD_WITH_TORCH = ("torch", "monarch_rdma.actor.encoding.tensors")


@dataclass(eq=False)
class Spawning:
    """The processes of one mesh, as orders for the agents of their hosts. `client` is shown what they print."""

    name: str
    hosts: HostMesh
    orders: tuple[Order, ...]  # by rank; as many for each host
    client: str
    timeout: float  # seconds

    def __post_init__(self) -> None:
        self._agents = self.hosts._chosen()  # those of the hosts now
        self._workers = (
            [self.hosts._workers[rank] for rank in self.hosts._region.ranks()] if self.hosts._workers else []
        )

    @property
    def count(self) -> int:
        return len(self.orders)

    def start_all(self, owner: tuple[str, int]) -> list[str]:
        """Their addresses, by rank: all, or none and an error. `owner`: the process and number that hears of ends."""
        agents = self._agents
        share = self.count // len(agents)
        futures = [self._start(range(host * share, (host + 1) * share), owner) for host in range(len(agents))]
        spawned: dict[str, list[str]] = {}
        failure: BaseException | None = None
        for agent, future in zip(agents, futures, strict=True):
            try:
                spawned[agent] = future.wait_get()
            except ActorError as error:
                failure = failure or error.exception
            except Exception as error:
                failure = failure or error
        if failure is not None:
            why = "other hosts could not start theirs"
            for stopped in [_alone(self.hosts, agent)._stop_procs(found, why) for agent, found in spawned.items()]:
                stopped.wait(None)
            raise failure
        addresses = [*itertools.chain(*spawned.values())]
        for rank, address in enumerate(addresses):
            self.watch(rank, address, owner)
        return addresses

    def start(self, rank: int, owner: tuple[str, int]) -> Future[list[str]]:
        """Starts one of them anew. Where the agent of its host was lost, by the one that is there now, if any."""
        ranks, host, proc = range(rank, rank + 1), self._host_index(rank), current_proc()
        if not self._workers or not proc.is_lost(self._agents[host]):
            return self._start(ranks, owner)
        started: Future[list[str]] = Future.pending()

        def start() -> None:
            try:
                if proc.is_lost(self._agents[host]):  # else another rank has found it
                    self._agents[host] = reattach(self._workers[host], self._agents[host], _REATTACH_TIMEOUT)
                future = self._start(ranks, owner)
            except Exception as error:
                started.set_error(error)
            else:
                future.add_callback(lambda: started.set_loader(future.wait_get))

        proc.errands.run(("reattach", self._agents[host]), start)
        return started

    def lost_host_of(self, rank: int) -> str | None:
        """The agent of its host, if it is lost."""
        agent = self._agents[self._host_index(rank)]
        return agent if current_proc().is_lost(agent) else None

    def stop(self, rank: int, address: str, reason: str) -> Future[None]:
        """Ends one of them; done when it has ended."""
        return self._host_of(rank)._stop_procs([address], reason)

    def watch(self, rank: int, address: str, owner: tuple[str, int]) -> None:
        """Its owner is told where its whole host is lost."""
        (agent,) = self._host_of(rank)._chosen()
        current_proc().host_watch.add(agent, self.name, rank, [address], owner)

    def _start(self, ranks: range, owner: tuple[str, int]) -> Future[list[str]]:
        orders = list(self.orders[ranks.start : ranks.stop])
        agent = self._host_of(ranks.start)._agents()
        started: Future[list[str]] = agent.spawn.call_one(
            orders, self.name, ranks.start, owner, self.client, self.timeout
        )
        return started

    def _host_of(self, rank: int) -> HostMesh:
        return _alone(self.hosts, self._agents[self._host_index(rank)])

    def _host_index(self, rank: int) -> int:
        return rank * len(self._agents) // self.count


def spawn_on_hosts(
    hosts: HostMesh,
    per_host: Mapping[str, int] | None,
    bootstrap: Callable[[], Any] | None,
    name: str | None,
    proc_bind: Sequence[Mapping[str, str]] | None,
    bootstrap_command: Any,
    env: Mapping[str, str | None] | None,
    cwd: str | None,
    threads: int | None,
    gpus_per_proc: int | None,
    timeout: float,
    restarts: Restarts | None,
    preload: Sequence[str] = (),
) -> ProcMesh:
    """See HostMesh.spawn_procs."""
    if per_host is not None and not isinstance(per_host, Mapping):
        raise ConfigError(f"per_host is {per_host!r:.100}, but must be a mapping such as {{'gpus': 8}}")
    per_host = dict(per_host or {})
    if clash := per_host.keys() & hosts.extent.keys():
        raise ConfigError(f"per_host has dimension {min(clash)!r}, which the host mesh has already")
    inner = Extent.of(per_host)
    extent = Extent([*hosts.extent.labels, *inner.labels], [*hosts.extent.sizes, *inner.sizes])
    count = inner.nelements
    if proc_bind is not None and len(proc_bind) != count:
        raise ConfigError(f"proc_bind has {len(proc_bind)} entries, but must have one for each of {count} processes")
    if name is not None and not (isinstance(name, str) and re.fullmatch("[!-~]{0,200}", name)):
        raise ConfigError(f"name is {name!r:.300}, but must be up to 200 printable ASCII characters without spaces")
    if isinstance(preload, str) or not all(isinstance(module, str) and module for module in preload):
        raise ConfigError(f"preload is {preload!r:.300}, but must be a sequence of module names")
    name = name or f"procs{next(_names)}"
    proc = current_proc()
    modules = (*_PRELOAD, *(_PRELOAD_WITH_TORCH if "torch" in sys.modules else ()), *preload)
    offer_controllers(proc)
    payload = seed(bootstrap)
    orders = []
    for rank in range(count * len(hosts._chosen())):
        command = _command(bootstrap_command, extent.point(rank))
        local = rank % count
        spec = ProcessSpec(
            name=f"{name}/{rank}",
            payload=payload,
            env={**command.env, **(env or {})},
            cwd=cwd,
            bind=dict(proc_bind[local]) if proc_bind is not None else {},
            threads=threads,
            visible_devices=None
            if gpus_per_proc is None
            else range(local * gpus_per_proc, (local + 1) * gpus_per_proc),
        )
        orders.append(Order(spec, command.python, modules, restarts is not None))
    spawning = Spawning(name, hosts, tuple(orders), proc.client or proc.address, timeout)
    owner = context().actor_instance.owner_reference
    if restarts is None:
        mesh = ProcMesh(name, spawning.start_all(owner), extent.region, hosts)
    else:
        driver = ProcessDriver(proc, spawning, restarts, owner)
        try:
            addresses = spawning.start_all(driver.keeper)
        except BaseException:
            driver.abandon()
            raise
        driver.begin(addresses)
        mesh = ProcMesh(name, addresses, extent.region, hosts, driver.keeper)
    context().actor_instance.owned.keep(mesh, name, mesh._identities(), has_actors=False)
    return mesh


def _alone(hosts: HostMesh, agent: str) -> HostMesh:
    """The one host of that agent."""
    return HostMesh(hosts._name, [agent], Extent([], []).region)


def _command(given: Any, point: Point) -> BootstrapCommand:
    command = given(point) if callable(given) else given
    if command is None:
        return default_bootstrap_cmd()
    if not isinstance(command, BootstrapCommand):
        raise ConfigError(f"bootstrap_command is {command!r}, but must be a BootstrapCommand, or a function giving one")
    return command
