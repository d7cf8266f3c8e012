"""Monarch's choice of a transport. Here it says from where this process can be reached: every way is used that there is
(shared memory and Unix sockets on one host, TCP with TLS between hosts).
"""

from __future__ import annotations

import difflib
import enum
import socket

from ... import config
from ...errors import ConfigError
from ...rdma.engine import check_options
from ..runtime.proc import existing_proc
from .worker_address import FileAddress, parse

__all__ = ["ChannelTransport", "be_found_by_other_hosts", "enable_transport"]


class ChannelTransport(enum.Enum):
    """Monarch's names. Local, Unix and TcpWithLocalhost: processes of this host reach this one. TcpWithHostname and
    Tls: those of other hosts too. The others do not exist here.
    """

    Local = "local"
    Unix = "unix"
    TcpWithLocalhost = "tcp(localhost)"
    TcpWithHostname = "tcp(hostname)"
    Tls = "tls"
    Quic = "quic"
    MetaTlsWithHostname = "metatls(hostname)"
    MetaTlsWithIpV6 = "metatls(ipv6)"
    MetaQuicWithHostname = "metaquic(hostname)"
    MetaQuicWithIpV6 = "metaquic(ipv6)"

    def get(self) -> str:
        """The name that `enable_transport` takes."""
        return str(self.value)


_WITHIN_HOST = (ChannelTransport.Local, ChannelTransport.Unix, ChannelTransport.TcpWithLocalhost)
_BETWEEN_HOSTS = (ChannelTransport.TcpWithHostname, ChannelTransport.Tls)
_SHORT = {"tcp": ChannelTransport.TcpWithHostname, "ipc": ChannelTransport.Unix}
_enabled: ChannelTransport | str | None = None


def enable_transport(transport: ChannelTransport | str) -> None:
    """Call it before anything else. "tcp" lets processes on other hosts begin to talk to this one: a client needs it
    where its workers on other hosts call its controllers or actors. "ipc" is the default: this host only.

    `transport`: a ChannelTransport, its name, "tcp", "ipc", or `tcp://host:port` to listen there.
    Raises ConfigError: an unknown one, another one than before, or a process that has begun already.
    """
    global _enabled
    wanted = _known(transport)
    if _enabled not in (None, wanted):
        raise ConfigError(
            f"only one transport can be enabled, and it is {_shown(_enabled)} already; {_shown(wanted)} cannot be added"
        )
    before = config.get_runtime_config()
    config.configure(**_options(wanted))
    try:
        check_options()
    except ConfigError:
        config.clear_runtime_config()
        config.configure(**before)
        raise
    _enabled = wanted


def be_found_by_other_hosts() -> None:
    """Unless this process has begun already, or somebody has said where it listens, it does so on every address."""
    listens = config.OPTIONS["listen_host"]
    if existing_proc() is None and config.get("listen_host") == listens.default:
        config.configure(**_options(ChannelTransport.TcpWithHostname))


def _known(transport: object) -> ChannelTransport | str:
    """A transport, or an address to listen at."""
    if isinstance(transport, ChannelTransport):
        return _existing(transport)
    if not isinstance(transport, str):
        raise ConfigError(f"transport is a {type(transport).__name__}, but must be a ChannelTransport or a string")
    if "://" in transport:
        if isinstance(parse(transport), FileAddress):
            raise ConfigError(f"transport {transport!r} names a file, which only worker loops have; use 'ipc'")
        return transport
    names = {**_SHORT, **{each.value: each for each in ChannelTransport}, **ChannelTransport.__members__}
    if transport not in names:
        near = difflib.get_close_matches(transport, names, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else "use 'tcp' or 'ipc'"
        raise ConfigError(f"there is no transport {transport!r}; {hint}")
    return _existing(names[transport])


def _existing(transport: ChannelTransport) -> ChannelTransport:
    if transport not in (*_WITHIN_HOST, *_BETWEEN_HOSTS):
        raise ConfigError(f"transport {transport.value} does not exist here; 'tcp' between hosts is TLS 1.3")
    return transport


def _options(transport: ChannelTransport | str) -> dict[str, str | int]:
    if isinstance(transport, str):
        where = parse(transport)
        assert not isinstance(where, FileAddress), "refused by _known"
        return where.options
    if transport in _WITHIN_HOST:
        return {"listen_host": "127.0.0.1", "advertise_host": ""}
    options: dict[str, str | int] = {"listen_host": "0.0.0.0"}
    if not config.get("advertise_host") and (address := _own_address()):
        options["advertise_host"] = address
    return options


def _own_address() -> str:
    """What this host's name stands for, unless that is loopback: then the engine takes its first other address."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return ""
    addresses = [str(entry[4][0]) for entry in found]
    return next((address for address in addresses if not address.startswith("127.")), "")


def _shown(transport: ChannelTransport | str | None) -> str:
    return repr(transport.value if isinstance(transport, ChannelTransport) else transport)
