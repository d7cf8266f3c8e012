"""RDMA cards and network interfaces."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from .. import config
from ..rdma import verbs
from . import gpus, isolated
from .check import Check
from .isolated import Failed

__all__ = ["checks", "why_no_loopback"]

# A NULL list with ENOSYS (38) is how a kernel without RDMA says "no devices".
_VERBS = """
import ctypes, json
try:
    lib = ctypes.CDLL("libibverbs.so.1", use_errno=True)
except OSError as error:
    print(json.dumps(["missing", str(error)])); raise SystemExit
lib.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
lib.ibv_get_device_list.argtypes = [ctypes.POINTER(ctypes.c_int)]
lib.ibv_get_device_name.restype, lib.ibv_get_device_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
count = ctypes.c_int()
devices = lib.ibv_get_device_list(ctypes.byref(count))
if not devices:
    print(json.dumps(["errno", ctypes.get_errno()])); raise SystemExit
print(json.dumps(["devices", [lib.ibv_get_device_name(devices[i]).decode() for i in range(count.value)]]))
"""

# The core's own look at the cards. Their drivers' libraries are loaded for it: not into this process.
_DESCRIBE = """
import ctypes, json, sys
core, cards, gid_index, ip_family = sys.argv[1:]
describe = ctypes.CDLL(core).mr_verbs_describe
describe.restype = ctypes.c_uint64
describe.argtypes = [ctypes.c_char_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64]
document = ctypes.create_string_buffer(1 << 22)
describe(cards.encode(), int(gid_index), int(ip_family), document, len(document))
print(json.dumps(json.loads(document.value)))
"""
_CORE = Path(__file__).resolve().parent.parent / "libmonarch_rdma.so"


def checks(root: Path = Path("/")) -> list[Check]:
    """All of this module, in the order in which they are shown."""
    return [
        _cards(root),
        _libibverbs(),
        *rails(_describe()),
        *gpus.checks(),
        _loopback(),
        _interfaces(root),
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cards(root: Path) -> Check:
    """The kernel's view."""
    found = []
    for card in sorted((root / "sys/class/infiniband").glob("*")):
        driver = card / "device/driver"  # software cards have no device
        name = os.path.basename(os.path.realpath(driver)) if driver.exists() else "software"
        ports = [_port(port) for port in sorted((card / "ports").glob("*"))]
        found.append(f"{card.name} ({name}; {'; '.join(ports)})")
    if found:
        return Check("cards", "RDMA cards", True, ", ".join(found))
    fix = "modprobe mlx5_ib (or bnxt_re, ionic_rdma, irdma); without a card: rdma link add rxe0 type rxe netdev eth0"
    return Check("cards", "RDMA cards", False, "none: transfers between hosts go over tcp", fix)


def _port(port: Path) -> str:
    state = _read(port / "state").partition(": ")[2] or "?"
    return f"port {port.name} {state}, {_read(port / 'link_layer')}, {_read(port / 'rate')}"


def _libibverbs() -> Check:
    """The library's view."""
    name, fix = "libibverbs", "apt-get install libibverbs1 ibverbs-providers"
    try:
        what, value = isolated.run(_VERBS)
    except Failed as failure:
        return Check("cards", name, False, f"it cannot be used: {failure}", fix)
    if what == "missing":
        return Check("cards", name, False, "not installed; only cards need it", fix)
    if what == "errno":
        why = "no devices: this kernel has no RDMA" if value == 38 else f"no devices: {os.strerror(value)}"
        return Check("cards", name, False, why, "modprobe ib_uverbs")
    return Check("cards", name, bool(value), f"devices: {', '.join(value) or 'none'}", "modprobe ib_uverbs")


def _describe() -> verbs.Description | Failed:
    options = [str(config.get(name)) for name in ("verbs_devices", "verbs_gid_index", "ip_family")]
    try:
        return verbs.parse(isolated.run(_DESCRIBE, str(_CORE), *options))
    except Failed as failure:
        return failure


def rails(found: verbs.Description | Failed) -> list[Check]:
    """A line for each port: whether it carries traffic, by which address, and why not; and what the rails are near."""
    if isinstance(found, Failed):
        fix = "LD_DEBUG=libs ibv_devinfo"
        return [Check("cards", "rails", False, f"libibverbs fails when it looks for cards: {found}", fix)]
    checks = [_choice(found)]
    for card in found.cards:
        if not card.ports or card.transport != "RC":
            has_no_rc = card.transport != "RC"
            checks.append(Check("cards", card.name, has_no_rc, card.problem, "" if has_no_rc else _TO_OPEN))
        checks += [_rail(card, port) for port in card.ports if card.transport == "RC"]
    return checks + ([_nearest(found)] if found.rails else [])


_TO_OPEN = "docker run --device=/dev/infiniband --ulimit memlock=-1; outside of containers: ls -l /dev/infiniband"


def _choice(found: verbs.Description) -> Check:
    """The verdict on the host."""
    name = "rails"
    if not found.built:
        return Check("cards", name, False, found.problem, "apt-get install libibverbs-dev, then build again")
    if not found.rails:
        fix = "see the lines of the ports below" if found.cards else "rdma link add rxe0 type rxe netdev eth0"
        return Check("cards", name, False, f"none ({found.problem}): transfers between hosts go over tcp", fix)
    why = ", ".join(f"{rail.group} = {rail.name}" for rail in found.rails)
    if "verbs" not in config.LANES:
        why += "; this version has no verbs lane yet, so transfers between hosts go over tcp"
    return Check("cards", name, True, why)


def _rail(card: verbs.Card, port: verbs.Port) -> Check:
    where = f"node {card.numa}" if card.numa >= 0 else "no NUMA node"
    facts = f"{port.link_layer}, {port.gbits:g} Gb/s, MTU {port.mtu}, {card.driver or 'software'}, {where}"
    why = f"{'' if port.used else 'not used: '}{port.reason} ({facts})"
    ok = port.used or port.left_out
    return Check("cards", f"{card.name}:{port.port}", ok, why, "" if ok else _remedy(card, port))


def _remedy(card: verbs.Card, port: verbs.Port) -> str:
    interface = next((entry.interface for entry in port.gids if entry.interface), "INTERFACE")
    if card.problem:
        return _TO_OPEN
    if port.link_layer == "InfiniBand":
        return "systemctl start opensm, on one host of the fabric; then ibstat"
    if port.state != "ACTIVE":
        return f"ip link set {interface} up; then ethtool {interface}, and look at the cable"
    return f"ip addr add ADDRESS/24 dev {interface}; ip link set {interface} up"


_DISTANCES = ("same switch", "same root", "same NUMA node", "same socket", "other socket", "unknown")


def _nearest(found: verbs.Description) -> Check:
    """For each GPU and each node's memory the rails that are nearest."""
    parts = []
    for spot in found.near:
        best = min(spot.distances.values(), key=_DISTANCES.index)
        names = [rail for rail, distance in spot.distances.items() if distance == best]
        parts.append(f"{spot.kind} {spot.name}: {', '.join(names)} ({best})")
    return Check("cards", "nearest rails", True, "; ".join(parts) or "this kernel shows no NUMA nodes")


def _loopback() -> Check:
    problem = why_no_loopback()
    return Check("network", "loopback", not problem, problem or "127.0.0.1 can be reached", "ip link set lo up")


def why_no_loopback() -> str:
    """Why a connection within this host fails, as in a new network namespace; "" where it works."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return f"127.0.0.1 cannot be reached: {error.strerror}"
    return ""


def _interfaces(root: Path) -> Check:
    """Names, state, speed and MTU. The TCP control stream listens on option listen_host, 127.0.0.1 by default."""
    found = []
    for _, name in socket.if_nameindex():
        folder = root / "sys/class/net" / name
        speed = _read(folder / "speed")
        rate = f", {int(speed) / 1000:g} Gb/s" if speed.isdecimal() and int(speed) > 0 else ""
        found.append(f"{name} ({_read(folder / 'operstate') or '?'}{rate}, MTU {_read(folder / 'mtu') or '?'})")
    why = ", ".join(found) or "none"
    return Check("network", "interfaces", bool(found), why, "ip link set lo up")
