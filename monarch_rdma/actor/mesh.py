"""Meshes: of hosts, of processes on them, of actors in these."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from .. import config
from ..errors import ConfigError
from ..supervision.events import emit
from ..supervision.policy import Backoff, Restart, Strategy
from .actor import Actor
from .context import context
from .debugging.registry import announce
from .encoding.codec import Outgoing, encode
from .endpoint import Endpoint, NotAnEndpoint, endpoints_of
from .failure import SupervisionError
from .future import Future, done_future
from .hosting.log_sink import post_option
from .runtime import message
from .runtime.birth import Birth
from .runtime.cast import cast
from .runtime.proc import AGENT, Proc, current_proc, name_of
from .runtime.reply import GatherReply
from .runtime.roster import UP, KeeperId, Roster, ask_keeper, tell_keeper
from .runtime.route import PATIENCE, Route
from .runtime.state import check_hooks
from .shape import Extent, MeshTrait, Region
from .supervising.actors import ActorDriver
from .supervising.birth_record import BirthRecord
from .supervising.restarts import Restarts

__all__ = ["ActorMesh", "HostMesh", "ProcMesh", "Supervised", "check_class", "this_proc"]

T = TypeVar("T", bound=Actor)


class _ProcessMesh(MeshTrait):
    """Processes in a shape. `_addresses` are those of the whole mesh that it was cut from, by base rank."""

    def __init__(self, name: str, addresses: Sequence[str], region: Region) -> None:
        self._name = name
        self._addresses = tuple(addresses)
        self._shape = region

    @property
    def _region(self) -> Region:
        return self._shape

    def _identities(self) -> list[str]:
        """The addresses that the processes had when they were spawned."""
        return [self._addresses[rank] for rank in self._shape.ranks()]

    def _chosen(self) -> list[str]:
        """Where they are now, or were last."""
        return self._identities()

    @property
    def name(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self._name, self._addresses, tuple(self._shape.ranks()), self.extent

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} {self.extent}>"


class ActorMesh(MeshTrait, Generic[T]):
    """The actors that one `spawn` made. Their endpoints are its attributes. Can be pickled, for use in any process."""

    def __init__(self, cls: type[T], name: str, number: int, procs: ProcMesh, keeper: KeeperId | None = None) -> None:
        """`keeper`: knows where they are, where they may be started again by themselves."""
        self._class = cls
        self._name = name
        self._number = number
        self._procs = procs
        self._keeper = keeper
        self._initialized: Future[Any] | None = None
        self._found_routes: list[Route] = []
        self._routes_of: Proc | None = None  # a fork, or a client after a close, has ways of its own
        self._generation = -1  # of the roster that they were found in
        self._extent_bytes = message.pack_extent(procs.extent)

    @property
    def initialized(self) -> Future[None]:
        """Done when every actor's `__init__` is; fails as the first of them."""
        return done_future(None) if self._initialized is None else self._initialized.then(lambda _: None)

    def stop(self, reason: str = "stopped by its owner") -> Future[None]:
        """Ends the actors after the messages that wait already. Those that are gone count as stopped."""
        context().actor_instance.owned.forget(self)
        emit("mesh.stopped", mesh=self._name, reason=reason)
        proc = current_proc()
        if self._keeper is not None:
            asked = (tuple(self._region.ranks()), reason)
            return _plain(ask_keeper(proc, self._keeper, b"stop", asked, f"{self._name}.stop"), SupervisionError)
        if self._procs._keeper is not None:
            tell_keeper(proc, self._procs._keeper, b"forget", (self._number,))
        routes = self._routes
        waiting = GatherReply(proc, routes, f"{self._name}.stop", self._region, or_lost=True)
        deadline = time.monotonic() + PATIENCE
        cast(proc, routes, encode(reason), b"stop", self._extent_bytes, waiting, deadline, flags=message.STOP)
        return waiting.future.then(lambda _: None)

    @property
    def _region(self) -> Region:
        return self._procs._region

    @property
    def _roster(self) -> Roster | None:
        if self._keeper is None:
            return self._procs._roster
        return current_proc().rosters.of(self._keeper, self._name, self._procs._addresses, self._number)

    @property
    def _routes(self) -> list[Route]:
        """The ways to the actors where they are now; to those that are being restarted, ways on which nothing gets."""
        return self._routes_at(0.0)

    def _routes_at(self, deadline: float) -> list[Route]:
        """The same; waits until `deadline` (of time.monotonic) for those that are being restarted."""
        proc, roster = current_proc(), self._roster
        if self._routes_of is proc and (roster is None or roster.generation == self._generation):
            return self._found_routes
        if roster is None:
            self._found_routes = [proc.route(address, self._number) for address in self._procs._chosen()]
            self._routes_of = proc
            return self._found_routes
        generation = roster.generation
        found, are_up = roster.routes(self._procs._region.ranks(), self._number, deadline)
        if are_up:  # they stay the same until something changes
            self._found_routes, self._routes_of, self._generation = found, proc, generation
        return found

    def _with_region(self, region: Region) -> ActorMesh[T]:
        part = ActorMesh(self._class, self._name, self._number, self._procs._with_region(region), self._keeper)
        part._initialized = self._initialized
        return part

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        prop = endpoints_of(self._class).get(name)
        if prop is not None:
            endpoint: Endpoint[Any] = Endpoint(self, prop, name)
            self.__dict__[name] = endpoint
            return endpoint
        method = inspect.getattr_static(self._class, name, None)
        if inspect.isfunction(method):
            return NotAnEndpoint(self, name, method)
        raise AttributeError(f"{self._class.__name__} has no endpoint {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorMesh, (self._class, self._name, self._number, self._procs, self._keeper)

    def __repr__(self) -> str:
        return f"<ActorMesh {self._name} of {self._class.__name__} {self.extent}>"


class ProcMesh(_ProcessMesh):
    """Processes that actors can be spawned in."""

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        region: Region,
        hosts: HostMesh | None = None,
        keeper: KeeperId | None = None,
    ) -> None:
        """`keeper`: knows where they are, where they may be restarted."""
        super().__init__(name, addresses, region)
        self._hosts = hosts
        self._keeper = keeper
        self._is_stopped = False

    @property
    def _roster(self) -> Roster | None:
        if self._keeper is None:
            return None
        return current_proc().rosters.of(self._keeper, self._name, self._addresses)

    def _chosen(self) -> list[str]:
        roster = self._roster
        if roster is None:
            return self._identities()
        return [roster.place(rank).address for rank in self._shape.ranks()]

    def spawn(self, name: str, Class: type[T], *args: Any, **kwargs: Any) -> ActorMesh[T]:
        """Makes one actor in each process, with these arguments; returns at once.

        Messages may be sent at once too. Raises ConfigError where the class cannot be spawned, TypeError where it
        cannot be pickled.
        """
        return self._spawn(None, name, Class, args, kwargs)

    def supervised(
        self,
        restart: Restart = "always",
        *,
        strategy: Strategy = "one_for_one",
        max_restarts: int | None = 3,
        within: float = 5.0,
        backoff: Backoff | None = None,
        restart_stuck: bool = False,
    ) -> Supervised:
        """Has actors started again when they end: `procs.supervised(restart="transient").spawn(name, Class, ...)`.

        `restart`: "always", "transient" (after a failure alone) or "never"; `strategy`, `max_restarts`, `within` and
        `backoff` are those of `supervision.policy.Policy`. `restart_stuck`: an actor that works on a message for longer
        than its limit is given up and started again, and what it works on fails. docs/supervision.md tells of all this.
        Raises ConfigError. (All keyword arguments of `spawn` itself are those of the class.)
        """
        stop_timeout = float(config.get("cleanup_timeout"))
        restarts = Restarts.checked(restart, strategy, max_restarts, within, backoff, restart_stuck, stop_timeout)
        if restarts is None:
            raise ConfigError("restart is None, but must be 'always', 'transient' or 'never'")
        return Supervised(self, restarts)

    def _spawn(
        self, restarts: Restarts | None, name: str, cls: type[T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ActorMesh[T]:
        check_class(name, cls)
        comes_back = self._keeper is not None if restarts is None else restarts.restart != "never"
        check_hooks(cls, restarts.policy.strategy if restarts else "one_for_one", len(self), comes_back=comes_back)
        announce(current_proc())
        if self._is_stopped:
            raise ConfigError(f"{self!r} has been stopped; nothing can be spawned there")
        proc, number = current_proc(), current_proc().random_number()
        instance = context().actor_instance
        emit("mesh.spawned", mesh=name, actor=f"{cls.__module__}.{cls.__qualname__}", ranks=len(self))
        owner = instance.owner_reference
        birth = Birth(cls, args, kwargs, name, owner, repr(instance), self, is_supervised=restarts is not None)
        extent = message.pack_extent(self.extent)
        mesh = ActorMesh(cls, name, number, self)
        record = None
        if restarts is not None:
            routes, outgoing, mesh._keeper = self._supervise(restarts, birth, number, extent)
        elif self._keeper is not None:
            record = BirthRecord.of(birth, number, self._region.ranks(), extent)
            routes, outgoing = record.adopted(proc, self._keeper), encode(record.first(birth, self._keeper))
        else:
            routes, outgoing = mesh._routes, encode(birth)
        waiting = GatherReply(proc, routes, f"{name}.__init__", self._region)
        deadline = time.monotonic() + PATIENCE
        cast(proc, routes, outgoing, b"__init__", extent, waiting, deadline, flags=message.NEW)
        mesh._initialized = waiting.future
        if record is not None and self._keeper is not None:
            record.forget_if_stillborn(proc, self._keeper, waiting.future)
        instance.owned.keep(mesh, name, self._identities(), has_actors=True)
        return mesh

    def _supervise(
        self, restarts: Restarts, birth: Birth, number: int, extent: bytes
    ) -> tuple[list[Route], Outgoing, KeeperId]:
        """The ways to the actors that are to be made, what makes them, and who starts them again."""
        proc, roster, ranks = current_proc(), self._roster, self._region.ranks()
        if roster is None:
            addresses, routes = list(self._addresses), [proc.route(self._addresses[rank], number) for rank in ranks]
        else:
            routes, _ = roster.routes(ranks, number, time.monotonic() + PATIENCE)
            addresses = [place.address for place in roster.places]
        driver = ActorDriver(proc, birth, number, ranks, extent, roster, restarts)
        try:
            outgoing = encode(driver.first(birth))
        except BaseException:
            driver.abandon()
            raise
        driver.begin(addresses)
        return routes, outgoing, driver.keeper

    @property
    def initialized(self) -> Future[bool]:
        """Done: `spawn_procs` returns when the processes are there."""
        return done_future(True)

    @property
    def host_mesh(self) -> HostMesh:
        """The hosts on which they run. ConfigError for a process that no host agent started."""
        if self._hosts is None:
            raise ConfigError(f"{self!r} was not spawned on a host mesh")
        return self._hosts

    def stop(self, reason: str = "stopped by its owner") -> Future[None]:
        """Ends the processes and all actors in them, `__cleanup__` included. Those that are gone count as stopped."""
        self._is_stopped = True
        emit("mesh.stopped", mesh=self._name, reason=reason)
        context().actor_instance.owned.forget(self, self._identities())
        if self._keeper is None:
            return self.host_mesh._stop_procs(self._chosen(), reason)
        asked = (tuple(self._region.ranks()), reason)
        stopped = ask_keeper(current_proc(), self._keeper, b"stop", asked, f"{self._name}.stop")
        return _plain(stopped, SupervisionError)  # where its keeper is gone, they are too

    def replace(self, rank: int) -> Future[None]:
        """Starts a process that is gone again, with all actors that were spawned in it; done when they can be called.

        `rank`: in this mesh. For meshes that were spawned with `restart`, "never" included; references follow. Fails
        with ConfigError where that process is not gone, or where there is nobody to start it, with SupervisionError
        where it does not come up.
        """
        if self._keeper is None:
            raise ConfigError(f"{self!r} cannot replace a process: it was not spawned with restart=")
        ranks = self._region.ranks()
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(ranks):
            raise ConfigError(f"rank is {rank!r}, but must be an integer from 0 to {len(ranks) - 1}")
        return ask_keeper(current_proc(), self._keeper, b"replace", (ranks[rank],), f"{self._name}.replace")

    def living(self) -> ProcMesh:
        """Those that are up now, as a mesh with the one dimension `procs`: what is left of it when some are lost.

        It stays as it is: processes that are lost later are lost, and those that are restarted are not in it. Raises
        SupervisionError where none is left.
        """
        proc, roster = current_proc(), self._roster
        if roster is None:
            up = [address for address in self._chosen() if not proc.is_lost(address)]
        else:
            places = [roster.place(rank) for rank in self._region.ranks()]
            up = [place.address for place in places if place.state == UP and not proc.is_lost(place.address)]
        if not up:
            raise SupervisionError(f"no process of {self!r} is left")
        return ProcMesh(self._name, up, Extent(["procs"], [len(up)]).region, self._hosts)

    def logging_option(
        self, stream_to_client: bool = True, aggregate_window_sec: float | None = 3.0, level: int = 20
    ) -> Future[None]:
        """What becomes of what the processes print: whether the client shows it, and for how many seconds identical
        lines are gathered and folded (None: each line at once). `level`: of Python's root logger in the processes.
        """
        from .hosting.agent import ProcAgent

        proc = current_proc()
        names = [name_of(address) for address in self._chosen()]
        post_option(proc, proc.client or proc.address, names, stream_to_client, aggregate_window_sec)
        agents = ActorMesh(ProcAgent, "agent", AGENT, self)
        return _plain(agents.set_log_level.call(level))

    def to_table(self) -> str:
        """The processes, one a line, for people."""
        rows = [
            f"{point}  {name_of(address)}" for point, address in zip(self.extent.points(), self._chosen(), strict=True)
        ]
        return "\n".join(rows)

    def _with_region(self, region: Region) -> ProcMesh:
        return ProcMesh(self._name, self._addresses, region, self._hosts, self._keeper)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcMesh, (self._name, self._addresses, self._shape, self._hosts, self._keeper)

    def __enter__(self) -> ProcMesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop("its with block ended").get()

    async def __aenter__(self) -> ProcMesh:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop("its async with block ended")


class Supervised:
    """Processes, and a policy for the actors that are spawned in them: see ProcMesh.supervised."""

    def __init__(self, procs: ProcMesh, restarts: Restarts) -> None:
        self._procs = procs
        self._restarts = restarts

    def spawn(self, name: str, Class: type[T], *args: Any, **kwargs: Any) -> ActorMesh[T]:
        """As ProcMesh.spawn; the actors are started again as the policy says."""
        return self._procs._spawn(self._restarts, name, Class, args, kwargs)

    def __repr__(self) -> str:
        return f"<Supervised {self._procs!r} restart={self._restarts.restart!r}>"


class HostMesh(_ProcessMesh):
    """Hosts, each with an agent that starts processes there."""

    def __init__(self, name: str, addresses: Sequence[str], region: Region, workers: Sequence[str] = ()) -> None:
        """`workers`: where their worker loops are found, as `attach_to_workers` was told; none where they have none."""
        super().__init__(name, addresses, region)
        self._workers = tuple(workers)

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        proc_bind: Sequence[Mapping[str, str]] | None = None,
        bootstrap_command: Any = None,
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: str | None = None,
        threads: int | None = None,
        gpus_per_proc: int | None = None,
        timeout: float = 300.0,
        restart: Restart | None = None,
        strategy: Strategy = "one_for_one",
        max_restarts: int | None = 3,
        within: float = 5.0,
        backoff: Backoff | None = None,
        preload: Sequence[str] = (),
    ) -> ProcMesh:
        """Starts processes on every host, `per_host` (such as `{"gpus": 8}`; one process by default); waits for them.

        `bootstrap`: called in each before anything else. `proc_bind`: one dict for each process of a host, with
        `cpunodebind`, `membind`, `physcpubind`, `cpus`. `bootstrap_command`: as `default_bootstrap_cmd()`, or a
        function from the process's Point to one. `env`: variables that differ from this program's; None removes one.
        `cwd`: working directory. `threads`: of OpenMP, MKL and torch in each. `gpus_per_proc`: how many GPUs each
        process sees, counted from the first on. `timeout`: seconds for all of it. `preload`: modules that take long to
        import, and start no threads: processes that have the same ones are forked with them already imported.

        `restart`: what becomes of a process that ends, "always", "transient" (started again unless its exit code is 0)
        or "never" (until `replace`); docs/supervision.md tells of this and of `strategy`, `max_restarts`, `within` and
        `backoff`, which are those of `supervision.policy.Policy`. None: it is lost for good, and its owner is told.

        Raises ConfigError (a wrong argument, a failing bootstrap), SupervisionError (a process ended instead of coming
        up; its last lines are in the message), TransferTimeout, ResourceExhausted.
        """
        from .hosting.spawning import spawn_on_hosts

        restarts = Restarts.checked(restart, strategy, max_restarts, within, backoff)
        announce(current_proc())
        return spawn_on_hosts(
            self,
            per_host,
            bootstrap,
            name,
            proc_bind,
            bootstrap_command,
            env,
            cwd,
            threads,
            gpus_per_proc,
            timeout,
            restarts,
            preload,
        )

    @property
    def region(self) -> Region:
        """Which ranks of the whole mesh these are, and how they are laid out."""
        return self._region

    @property
    def initialized(self) -> Future[bool]:
        return done_future(True)

    def stop(self, reason: str = "stopped by its owner") -> Future[None]:
        """Ends all processes on the hosts; the agents stay."""
        current_proc().host_watch.discard_hosts(self._chosen())
        return _plain(self._agents().stop_all.call_living(reason))

    def shutdown(self, reason: str = "the hosts were shut down") -> Future[None]:
        """Ends all processes on the hosts, and agents that `run_worker_loop_until_shutdown` made."""
        current_proc().host_watch.discard_hosts(self._chosen())
        return _plain(self._agents().shutdown.call_living(reason))

    def _agents(self) -> ActorMesh[Any]:
        from .hosting.host import HOST, HostAgent

        return ActorMesh(HostAgent, "host", HOST, ProcMesh(self._name, self._addresses, self._shape))

    def _stop_procs(self, addresses: Sequence[str], reason: str) -> Future[None]:
        current_proc().host_watch.discard(addresses)
        return _plain(self._agents().stop_procs.call_living(list(addresses), reason))

    def _with_region(self, region: Region) -> HostMesh:
        return HostMesh(self._name, self._addresses, region, self._workers)

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMesh, (self._name, self._addresses, self._shape, self._workers)

    async def __aenter__(self) -> HostMesh:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown("its async with block ended")


def _plain(future: Future[Any], *unless: type[Exception]) -> Future[None]:
    """Its end without the value. `unless`: failures that count as success."""

    def outcome() -> None:
        with contextlib.suppress(*unless):
            future.wait_get()

    plain: Future[None] = Future.pending(future.cancel)
    future.add_callback(lambda: plain.set_loader(outcome))
    return plain


def this_proc() -> ProcMesh:
    """This process, as a mesh of one without dimensions."""
    proc = current_proc()
    return ProcMesh(proc.name, [proc.address], Extent([], []).region, proc.hosts)


_RESERVED = frozenset(name for name in dir(ActorMesh) if not name.startswith("__"))


def check_class(name: str, cls: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name is {name!r}, but must be a string that is not empty")
    if not isinstance(cls, type) or not issubclass(cls, Actor):
        raise ConfigError(f"Class is {cls!r}, but must be a subclass of Actor")
    for taken in _RESERVED & endpoints_of(cls).keys():
        raise ConfigError(f"{cls.__name__}.{taken} cannot be an endpoint: ActorMesh has an attribute of that name")
