"""The RDMA cards of this host as libibverbs tells them, which of their ports carry traffic, and why not the others.

for rail in describe().rails:
    print(rail.name, rail.gid, rail.gbits)

A rail is a port that is used; rail k of one host talks to rail k of another. The options `verbs_devices`,
`verbs_gid_index` and `ip_family` (`monarch_rdma.config`) change the choice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .. import config
from .._engine import ffi, lib

__all__ = ["Card", "Description", "Entry", "Near", "Port", "Rail", "describe", "parse"]


@dataclass(frozen=True)
class Entry:
    """One entry of a port's GID table. `interface` is whose IP address it stands for ("" on InfiniBand)."""

    index: int
    gid: str
    type: str  # "InfiniBand", "RoCE v1", "RoCE v2"
    interface: str
    up: bool


@dataclass(frozen=True)
class Port:
    """One port. `used`: it is a rail. `left_out`: nothing is wrong with it, but it is not wanted."""

    port: int
    state: str  # "ACTIVE", "DOWN", ...
    link_layer: str  # "InfiniBand", "Ethernet", "unspecified"
    lid: int
    mtu: int  # bytes
    gbits: float  # per second
    used: bool
    left_out: bool
    reason: str
    gids: tuple[Entry, ...]


@dataclass(frozen=True)
class Card:
    """One device. `transport` is "RC" where it has reliable connections that need no rdma_cm; `problem` tells why it
    cannot be used at all. Limits are zero where it was not opened.
    """

    name: str
    driver: str  # "" for a card of software
    firmware: str
    transport: str  # "RC", "iWARP", "other"
    pci: str  # address, "" where it has none
    numa: int  # node, -1 = not known
    max_mr_size: int  # bytes
    max_qp: int
    max_sge: int
    max_rd_atomic: int
    atomics: bool
    on_demand_paging: bool
    memory_windows: bool
    problem: str
    ports: tuple[Port, ...]


@dataclass(frozen=True)
class Rail:
    """A port that is used, by the GID that it was chosen."""

    name: str  # "mlx5_0:1"
    device: str
    port: int
    group: int
    link_layer: str
    gid_index: int
    gid: str
    lid: int
    mtu: int  # bytes
    gbits: float  # per second


@dataclass(frozen=True)
class Near:
    """A GPU or the memory of a NUMA node, and how far each rail is: "same switch", "same root", "same NUMA node", "same
    socket", "other socket", "unknown".
    """

    kind: str  # "memory", "NVIDIA GPU", "AMD GPU"
    name: str
    distances: dict[str, str]


@dataclass(frozen=True)
class Description:
    """`problem` says why there are no rails. `built`: this build of the library has the verbs lane."""

    built: bool
    problem: str
    cards: tuple[Card, ...]
    rails: tuple[Rail, ...]
    near: tuple[Near, ...]


def describe() -> Description:
    """Looks at the host as it is now; opens each card for a moment."""
    document = ffi.new("char[]", 1 << 16)
    arguments = (str(config.get("verbs_devices")).encode(), config.get("verbs_gid_index"), config.get("ip_family"))
    while (length := lib.mr_verbs_describe(*arguments, document, len(document))) >= len(document):
        document = ffi.new("char[]", 2 * length)
    return parse(json.loads(ffi.string(document)))


def parse(document: dict[str, Any]) -> Description:
    """A Description from the document that the core writes."""
    return Description(
        built=document["built"],
        problem=document["problem"],
        cards=tuple(_card(card) for card in document["devices"]),
        rails=tuple(Rail(**rail) for rail in document["rails"]),
        near=tuple(
            Near(spot["kind"], spot["name"], {rail["rail"]: rail["distance"] for rail in spot["rails"]})
            for spot in document["near"]
        ),
    )


def _card(card: dict[str, Any]) -> Card:
    ports = tuple(Port(**port | {"gids": tuple(Entry(**entry) for entry in port["gids"])}) for port in card["ports"])
    return Card(**card | {"ports": ports})
