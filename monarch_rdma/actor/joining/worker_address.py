"""Addresses of worker loops, in the forms that Monarch's programs write, and what they mean here.

| form | meaning |
| --- | --- |
| `tcp://host:port`, `host:port` | listens there, and is found there |
| `tcp://dial_host:port@bind_host:port` | listens at the second, is found at the first; both ports are the same |
| `tcp://*:port` | listens on every address; is found at the first that is not loopback, or at option advertise_host |
| `tcp://eth0:port` | listens on this interface's address |
| `ipc://path` | processes of this host: a file tells them where; the listener writes it |
| `ipc://@name` | the same, the file being in this user's private directory |
| `file://path` | processes of all hosts that see this file, on shared storage: the listener says there where it is |

Between hosts everything goes through TLS, whatever the form; on one host through Unix sockets.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass

from ...errors import ConfigError
from ...rdma.private_files import private_directory

__all__ = ["FileAddress", "TcpAddress", "WorkerAddress", "engine_address", "parse", "port_of"]

_PORTS_TRIED = 100  # for the engine's other socket, from the address's port on
_EVERY = {"*": "0.0.0.0", "0.0.0.0": "0.0.0.0", "[::]": "::"}
_FORMS = "tcp://host:port, tcp://dial_host:port@bind_host:port, ipc://path, ipc://@name or file://path"
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.%\w]+\]|[^\s:/@?#\[\]]+):([0-9]+)")
_ENGINE = "mrdma://"


@dataclass(frozen=True)
class TcpAddress:
    """`host` is where it is found, `bind` where it listens; "" for `host` says that the engine finds out."""

    text: str
    host: str
    bind: str
    port: int

    @property
    def dial(self) -> str:
        """As the engine dials. Raises ConfigError for an address that only a listener can have."""
        if not self.host:
            raise ConfigError(f"address {self.text!r} says where to listen, not whom to connect to")
        return f"{self.host}:{self.port}"

    @property
    def options(self) -> dict[str, str | int]:
        """Those of an engine that listens there."""
        options: dict[str, str | int] = {
            "listen_host": _EVERY.get(self.bind, self.bind.strip("[]")),
            "port_min": self.port,
            "port_max": min(self.port + _PORTS_TRIED - 1, 65535),
        }
        if self.host and _is_only_loopback(self.bind):
            options["listen_host"] = "0.0.0.0"
        if self.host and not _is_only_loopback(self.host):
            options["advertise_host"] = self.host.strip("[]")
        return options


@dataclass(frozen=True)
class FileAddress:
    """`path` of the file that tells where. `is_shared`: other hosts see it too."""

    text: str
    path: str
    is_shared: bool = False


WorkerAddress = TcpAddress | FileAddress


def parse(address: object) -> WorkerAddress:
    """Raises ConfigError."""
    if not isinstance(address, str):
        raise ConfigError(f"address is a {type(address).__name__}, but must be a string such as 'tcp://host:22222'")
    scheme, separator, rest = address.rpartition("://")
    if scheme == "ipc":
        return FileAddress(address, _path(address, rest))
    if scheme == "file":
        if not rest.startswith("/"):
            raise ConfigError(f"address {address!r} names no file: it must be file:// and an absolute path")
        return FileAddress(address, rest, is_shared=True)
    if not separator or scheme in ("tcp", "tls", "mrdma"):
        return _tcp(address, rest)
    raise ConfigError(f"address {address!r} has the form of {scheme}, which does not exist here; use {_FORMS}")


def engine_address(address: str) -> str | None:
    """The address itself if it is the complete one of an engine, such as its `address`; else None."""
    return address if address.startswith(_ENGINE) and "?" in address else None


def port_of(engine: str) -> int:
    """The port in an engine's complete address."""
    return int(engine.removeprefix(_ENGINE).partition("/")[0].rpartition(":")[2])


def _path(address: str, rest: str) -> str:
    name = rest.removeprefix("@")
    if not name or "\0" in name or (name != rest and "/" in name):
        raise ConfigError(f"address {address!r} names no file: it must be ipc://path or ipc://@name")
    return os.path.join(private_directory(), f"{name}.address") if name != rest else os.path.abspath(rest)


def _tcp(address: str, rest: str) -> TcpAddress:
    dialled, at, bound = rest.partition("@")
    host, port = _host_and_port(address, dialled)
    bind, bind_port = _host_and_port(address, bound) if at else (host, port)
    if port != bind_port:
        raise ConfigError(f"address {address!r} has two ports: what listens at one cannot be found at the other")
    if host in _EVERY or host in (name for _, name in socket.if_nameindex()):
        if at:
            raise ConfigError(f"address {address!r}: {host} is where to listen, but no host to be found at")
        host = ""
    return TcpAddress(address, host, bind, port)


def _host_and_port(address: str, text: str) -> tuple[str, int]:
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(f"address {address!r} has no host and port (1 to 65535): it must be {_FORMS}")
    return match[1], int(match[2])


def _is_only_loopback(name: str) -> bool:
    """Whether a host's name is entered as a loopback address, as some systems do with their own name: listening there
    would keep the others out.
    """
    bare = name.strip("[]")
    if bare in _EVERY or bare == "localhost" or _is_literal(bare):
        return False
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except OSError:  # an interface, or no host at all: the engine says so
        return False
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
