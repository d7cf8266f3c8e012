"""Endpoints: the methods of actors that messages may call, and the ways to call them."""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import ConfigError
from ..rdma.engine import seconds
from .encoding.codec import encode_call
from .future import Future
from .port import Port
from .runtime import message
from .runtime.cast import cast
from .runtime.proc import Proc, current_proc
from .runtime.reduce import Reduction
from .runtime.reply import GatherReply, ReduceReply, SingleReply, StreamReply, Waiting
from .runtime.route import PATIENCE
from .value_mesh import ValueMesh

if TYPE_CHECKING:
    from .mesh import ActorMesh
    from .runtime.route import Route

__all__ = ["Accumulator", "Endpoint", "EndpointProperty", "concurrent_endpoint", "endpoint", "endpoints_of", "send"]

A = TypeVar("A")
R = TypeVar("R")


class EndpointProperty:
    """A method that was decorated as an endpoint. On an actor itself it is the plain method."""

    def __init__(
        self,
        method: Callable[..., Any],
        *,
        explicit_response_port: bool = False,
        is_concurrent: bool = False,
        propagate: Any = None,
        limit: float | None = None,
    ) -> None:
        if not callable(method):
            raise ConfigError(f"method is {method!r}, but an endpoint is made of a function")
        self.method = method
        self.name = getattr(method, "__name__", "endpoint")
        self.is_async = inspect.iscoroutinefunction(method)
        self.is_concurrent = is_concurrent
        self.explicit_response_port = explicit_response_port
        self.propagate = propagate
        self.limit = None if limit is None else seconds(limit, "limit")
        if is_concurrent and not self.is_async:
            raise ConfigError(f"{self.name} is not async: concurrent endpoints must be `async def`")
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.method.__get__(instance, owner)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """Of a call: without self, and without the response port."""
        full = inspect.signature(self.method)
        parameters = list(full.parameters.values())
        if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            del parameters[: 2 if self.explicit_response_port else 1]
        return full.replace(parameters=parameters)

    @functools.cached_property
    def _positional(self) -> range:
        """The numbers of positional arguments with which a call without keywords surely fits."""
        parameters = self.signature.parameters.values()
        plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
            return range(0)
        most = 1 << 30 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(plain)
        return range(sum(p.default is p.empty for p in plain), most + 1)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises TypeError where a call with these arguments cannot work."""
        if kwargs or len(args) not in self._positional:
            self.signature.bind(*args, **kwargs)


def endpoint(
    method: Callable[..., Any] | None = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
    limit: float | None = None,
) -> Any:
    """Makes a method of an Actor one that messages may call.

    `explicit_response_port`: the method gets a `Port` as its first argument after self, and answers through it, now or
    later. `limit`: seconds that a message may be worked on; after that the actor is reported as stuck to its owner,
    and works on (see docs/supervision.md). `propagate` and `instrument` are accepted for Monarch's programs; they
    change nothing here.
    """
    if method is None:
        return functools.partial(
            endpoint,
            propagate=propagate,
            explicit_response_port=explicit_response_port,
            instrument=instrument,
            limit=limit,
        )
    if isinstance(method, EndpointProperty):
        raise ConfigError(f"{method.name} is an endpoint already")
    return EndpointProperty(method, propagate=propagate, explicit_response_port=explicit_response_port, limit=limit)


def concurrent_endpoint(
    method: Callable[..., Any] | None = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
    limit: float | None = None,
) -> Any:
    """Like `endpoint`, for `async def` only: messages start in order, but do not wait for each other's end."""
    if method is None:
        return functools.partial(
            concurrent_endpoint,
            propagate=propagate,
            explicit_response_port=explicit_response_port,
            instrument=instrument,
            limit=limit,
        )
    if isinstance(method, EndpointProperty):
        raise ConfigError(f"{method.name} is an endpoint already")
    return EndpointProperty(method, explicit_response_port=explicit_response_port, is_concurrent=True, limit=limit)


def endpoints_of(cls: type) -> dict[str, EndpointProperty]:
    """By name, those of base classes too."""
    return _endpoints_of(cls)


@functools.lru_cache(maxsize=4096)
def _endpoints_of(cls: Any) -> dict[str, EndpointProperty]:
    found = ((name, inspect.getattr_static(cls, name)) for name in dir(cls))
    return {name: value for name, value in found if isinstance(value, EndpointProperty)}


@dataclass(frozen=True)
class _Options:
    """How calls are made. `timeout`: seconds; `view`: see codec.encode; `codec`: "pickle" or "safe"; `wait_for_restart`
    of calls to actors that are being restarted.
    """

    timeout: float | None = None
    view: bool = False
    codec: str = "pickle"
    wait_for_restart: bool = True

    def deadline(self) -> float:
        """For finding room, by time.monotonic()."""
        return time.monotonic() + (PATIENCE if self.timeout is None else self.timeout)


_DEFAULT = _Options()


class Endpoint(Generic[R]):
    """One endpoint of the actors of a mesh."""

    __slots__ = ("_mesh", "_name", "_options", "_property")

    def __init__(self, mesh: ActorMesh[Any], prop: EndpointProperty, name: str, options: _Options = _DEFAULT) -> None:
        self._mesh = mesh
        self._property = prop
        self._name = name.encode()
        self._options = options

    def options(
        self,
        *,
        timeout: float | None = None,
        view: bool = False,
        codec: str = "pickle",
        wait_for_restart: bool = True,
    ) -> Endpoint[R]:
        """The same endpoint, called differently.

        `timeout`: seconds from the call on until it fails with `TransferTimeout`, and the handler is cancelled.
        `view`: receivers on this host see large arguments that lie in shared memory (`monarch_rdma.rdma.empty`,
        `share`) in place, read-only, without a copy; the caller must leave them as they are.
        `codec`: "pickle", or "safe" for plain values, arrays and tensors only, which never unpickles anything.
        `wait_for_restart`: a call made while an actor's process is being restarted waits for it, in the calling thread,
        as long as `timeout` allows (60 seconds without one); False: it fails at once with `SupervisionError`.
        Raises ConfigError.
        """
        seconds(timeout)
        if not isinstance(wait_for_restart, bool):
            raise ConfigError(f"wait_for_restart is {wait_for_restart!r}, but must be True or False")
        if codec not in ("pickle", "safe"):
            raise ConfigError(f"codec is {codec!r}, but must be 'pickle' or 'safe'")
        options = _Options(timeout, view, codec, wait_for_restart)
        return Endpoint(self._mesh, self._property, self._name.decode(), options)

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[R]]:
        """Calls all actors of the mesh; a ValueMesh of their results, or the first failure, an `ActorError`.

        Raises TypeError where the arguments miss the endpoint's signature, and `SupervisionError` where an actor's
        process is known to be lost. The caller may change its arguments when this returns.
        """
        return self._call_all(args, kwargs)

    def call_living(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[R | None]]:
        """The same, with None as the result of actors that have ended or whose process is lost."""
        return self._call_all(args, kwargs, or_lost=True)

    def _call_all(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, or_lost: bool = False) -> Future[Any]:
        proc, deadline = current_proc(), self._options.deadline()
        routes = self._mesh._routes if or_lost else self._routes(deadline)
        waiting = GatherReply(proc, routes, self._what(), self._mesh._region, or_lost=or_lost)
        self._post(proc, routes, waiting, args, kwargs, deadline)
        return waiting.future

    def _reduce(self, reduction: Reduction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """The results, combined; on the way too, unless nothing may be unpickled there."""
        proc, deadline = current_proc(), self._options.deadline()
        routes = self._routes(deadline)
        packed = reduction.dumps() if self._options.codec == "pickle" else b""
        waiting = ReduceReply(proc, routes, self._what(), reduction, packed)
        self._post(proc, routes, waiting, args, kwargs, deadline)
        return waiting.future

    def call_one(self, *args: Any, **kwargs: Any) -> Future[R]:
        """Calls the one actor of this mesh. Raises ConfigError (a ValueError) where it has more, and as `call`."""
        deadline = self._options.deadline()
        routes = self._routes(deadline)
        if len(routes) != 1:
            raise ConfigError(f"call_one requires exactly 1 actor, but mesh has {len(routes)}")
        proc = current_proc()
        waiting = SingleReply(proc, routes[0], self._what())
        self._post(proc, routes, waiting, args, kwargs, deadline)
        return waiting.future

    def choose(self, *args: Any, **kwargs: Any) -> Future[R]:
        """Calls one actor, chosen at random. Raises as `call`."""
        proc, deadline = current_proc(), self._options.deadline()
        routes = self._routes(deadline)
        rank = random.randrange(len(routes))
        waiting = SingleReply(proc, routes[rank], self._what())
        self._post(proc, routes[rank : rank + 1], waiting, args, kwargs, deadline, first_rank=rank)
        return waiting.future

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Future[R]]:
        """Calls all actors; their results one by one, as they come. Raises as `call`."""
        proc, deadline = current_proc(), self._options.deadline()
        routes = self._routes(deadline)
        waiting = StreamReply(proc, routes, self._what())
        self._post(proc, routes, waiting, args, kwargs, deadline)
        return iter(waiting)

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Calls all actors and does not wait. An exception in a handler ends that actor. Raises as `call`.

        What is on its way is lost with the process that sent it, where that is killed, or with the one that gets it.
        """
        deadline = self._options.deadline()
        self._post(current_proc(), self._routes(deadline), None, args, kwargs, deadline)

    def rref(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: it belongs to Monarch's tensor engine. Raises ConfigError."""
        raise ConfigError(
            f"{self._what()}.rref needs a tensor engine, which monarch_rdma has not; use call or call_one"
        )

    def _send_to_port(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], port: Port[R] | None, selection: str
    ) -> None:
        proc, rank, deadline = current_proc(), 0, self._options.deadline()
        routes = self._routes(deadline)
        if selection == "choose":
            rank = random.randrange(len(routes))
            routes = routes[rank : rank + 1]
        if port is not None:
            port.expect_from(proc, routes)
        reply = 0 if port is None else port.number
        self._post(proc, routes, None, args, kwargs, deadline, first_rank=rank, reply=reply)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raises TypeError: it says how to call it."""
        raise TypeError(
            f"{self._what()} is an endpoint of other processes: call it with {self._what()}.call(...) for all of them, "
            ".call_one(...), .broadcast(...), ...; an actor calls its own with self." + self._name.decode() + "(...)"
        )

    def __repr__(self) -> str:
        return f"<Endpoint {self._what()} of {self._mesh!r}>"

    def _routes(self, deadline: float) -> list[Route]:
        return self._mesh._routes_at(deadline) if self._options.wait_for_restart else self._mesh._routes

    def _what(self) -> str:
        return f"{self._mesh._name}.{self._name.decode()}"

    def _post(
        self,
        proc: Proc,
        routes: Sequence[Route],
        waiting: Waiting | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline: float,
        *,
        first_rank: int = 0,
        reply: int = 0,
    ) -> None:
        """Encodes once and sends to each. Nothing is sent where the arguments are wrong."""
        options = self._options
        try:
            self._property.check(args, kwargs)
            outgoing = encode_call(args, kwargs, codec=options.codec, view=options.view)
        except BaseException:
            if waiting is not None:
                waiting.finish()
            raise
        timeout = options.timeout
        if waiting is not None and timeout is not None:
            waiting.expire_at(deadline, timeout)
        flags = message.PORT if self._property.explicit_response_port else 0
        if timeout is not None:
            flags |= message.PATIENT
        if options.codec == "safe":
            flags |= message.SAFE
        if waiting is not None:
            waiting.accept = options.codec
        cast(proc, routes, outgoing, self._name, self._mesh._extent_bytes, waiting, deadline, first_rank, flags, reply)


def as_endpoint(not_an_endpoint: Any, *, propagate: Any = None, explicit_response_port: bool = False) -> Endpoint[Any]:
    """An endpoint of a method that was not decorated as one: `as_endpoint(mesh.method).call(...)`."""
    if not isinstance(not_an_endpoint, NotAnEndpoint):
        raise ConfigError(f"{not_an_endpoint!r} is not a method of a spawned actor")
    prop = EndpointProperty(not_an_endpoint.method, explicit_response_port=explicit_response_port, propagate=propagate)
    return Endpoint(not_an_endpoint.mesh, prop, not_an_endpoint.name)


@dataclass(frozen=True)
class NotAnEndpoint:
    """A method of a spawned actor that was not decorated: calling it says what to do."""

    mesh: ActorMesh[Any]
    name: str
    method: Callable[..., Any]

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(self._sentence())

    def __getattr__(self, attribute: str) -> Any:
        """AttributeError: `mesh.method.call` has none."""
        raise AttributeError(attribute if attribute.startswith("_") or attribute == "mesh" else self._sentence())

    def _sentence(self) -> str:
        return (
            f"{self.mesh._class.__name__}.{self.name} is not annotated as an endpoint: decorate it with @endpoint, or "
            f"wrap it where it is called: as_endpoint(mesh.{self.name}).call(...)"
        )


def send(
    endpoint: Endpoint[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[Any] | None = None,
    selection: str = "all",
) -> None:
    """Calls the actors of an endpoint's mesh ("all"), or one of them ("choose"); answers go to `port`, where given."""
    if selection not in ("all", "choose"):
        raise ConfigError(f"selection is {selection!r}, but must be 'all' or 'choose'")
    endpoint._send_to_port(args, kwargs, port, selection)


class Accumulator(Generic[A, R]):
    """Calls all actors of an endpoint and folds their results into one, in the order of their ranks."""

    def __init__(
        self,
        endpoint: Endpoint[R],
        identity: A,
        combine: Callable[[A, R], A],
        merge: Callable[[A, A], A] | None = None,
    ) -> None:
        """`combine(sum so far, result)`; `identity`: the sum of nothing.

        `merge(sum of some, sum of the ranks after them)`: with it, calls that go over a tree are combined on their way
        up, in the processes of the actors, and the caller gets one sum from each branch rather than every result. It
        must be associative, and `merge(identity, sum)` the same as `sum`; for a plain sum it is what `combine` is.
        """
        for name, function in (("combine", combine), ("merge", merge)):
            if not callable(function) and (name, function) != ("merge", None):
                raise ConfigError(f"{name} is {function!r}, but must be a function of two arguments")
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine
        self._merge = merge

    def accumulate(self, *args: Any, **kwargs: Any) -> Future[A]:
        """The folded result; fails with the first failure, or with what `combine` or `merge` raised, in whatever
        process. Raises as `Endpoint.call`, and what pickling `identity` and the functions raises.
        """
        if self._merge is not None:
            return self._endpoint._reduce(Reduction(self._identity, self._combine, self._merge), args, kwargs)
        results = self._endpoint.call(*args, **kwargs)
        return results.then(lambda mesh: functools.reduce(self._combine, mesh.values(), self._identity))
