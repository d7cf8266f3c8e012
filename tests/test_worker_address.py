"""The forms of a worker loop's address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monarch_rdma import config
from monarch_rdma.actor.joining import worker_address
from monarch_rdma.actor.joining.worker_address import FileAddress, TcpAddress, engine_address, parse, port_of
from monarch_rdma.errors import ConfigError


def tcp(address: str) -> TcpAddress:
    parsed = parse(address)
    assert isinstance(parsed, TcpAddress)
    return parsed


@pytest.mark.parametrize(
    ("address", "dial", "listen_host", "advertise_host"),
    [
        ("tcp://127.0.0.1:22222", "127.0.0.1:22222", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:22222", "127.0.0.1:22222", "127.0.0.1", "127.0.0.1"),
        ("tls://localhost:22222", "localhost:22222", "localhost", "localhost"),
        ("mrdma://127.0.0.1:22222", "127.0.0.1:22222", "127.0.0.1", "127.0.0.1"),
        ("tcp://[::1]:22222", "[::1]:22222", "::1", "::1"),
        ("tcp://10.1.2.3:22222@0.0.0.0:22222", "10.1.2.3:22222", "0.0.0.0", "10.1.2.3"),
        ("tcp://10.1.2.3:22222@*:22222", "10.1.2.3:22222", "0.0.0.0", "10.1.2.3"),
        ("tcp://*:22222", None, "0.0.0.0", None),
        ("tcp://[::]:22222", None, "::", None),
        ("tcp://lo:22222", None, "lo", None),
    ],
)
def test_tcp(address: str, dial: str | None, listen_host: str, advertise_host: str | None) -> None:
    parsed = tcp(address)
    options = parsed.options
    assert (options["listen_host"], options.get("advertise_host")) == (listen_host, advertise_host)
    assert options["port_min"] == 22222 == parsed.port
    if dial is not None:
        assert parsed.dial == dial
    else:
        with pytest.raises(ConfigError, match="says where to listen, not whom to connect to"):
            _ = parsed.dial


def test_ports_at_the_end_of_the_range() -> None:
    assert tcp("tcp://127.0.0.1:65535").options["port_max"] == 65535


def test_a_host_whose_name_is_entered_as_loopback_listens_for_others_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def entered(host: str, *_: Any, **__: Any) -> list[Any]:
        return [(None, None, 0, "", ("127.0.1.1" if host == "node1" else "10.1.2.3", 0))]

    monkeypatch.setattr(worker_address.socket, "getaddrinfo", entered)
    options = tcp("tcp://node1:22222").options
    assert (options["listen_host"], options.get("advertise_host")) == ("0.0.0.0", None)
    options = tcp("tcp://node2:22222").options
    assert (options["listen_host"], options.get("advertise_host")) == ("node2", "node2")


def test_files(tmp_path: Path) -> None:
    assert parse("ipc:///run/worker") == FileAddress("ipc:///run/worker", "/run/worker")
    relative = parse("ipc://worker")
    assert isinstance(relative, FileAddress) and relative.path == str(Path("worker").absolute())
    config.configure(runtime_dir=str(tmp_path))
    named = parse("ipc://@worker")
    assert isinstance(named, FileAddress)
    assert Path(named.path).parent.parent == tmp_path and Path(named.path).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "tcp://host",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://:22222",
        "tcp://a b:22222",
        "tcp://a:1@b:2",
        "tcp://*:1@*:1",
        "tcp://a:1@",
        "tcp://host:22222/x",
        "ipc://",
        "ipc://@",
        "ipc://@a/b",
        "inproc://1",
        "metatls://host:22222",
        5,
        None,
    ],
)
def test_what_is_no_address(address: Any) -> None:
    with pytest.raises(ConfigError, match=r"address '.*'|address is a"):
        parse(address)


def test_complete_addresses() -> None:
    address = "mrdma://10.1.2.3:22222/node1:77?inc=0123&boot=x"
    assert engine_address(address) == address
    assert engine_address("tcp://10.1.2.3:22222") is None
    assert port_of(address) == 22222
