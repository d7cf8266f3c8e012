"""RDMA cards as Python sees them: the description, what doctor makes of it, and what programs are told."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from scripts import put_script

from monarch_rdma import config, rdma
from monarch_rdma.doctor import Check, devices
from monarch_rdma.doctor.isolated import Failed
from monarch_rdma.rdma import verbs

ROOT = Path(__file__).resolve().parent.parent


def entry(index: int, gid: str, interface: str = "eth0", type: str = "RoCE v2") -> dict[str, Any]:
    return {"index": index, "gid": gid, "type": type, "interface": interface, "up": True}


def port(reason: str, *, number: int = 1, used: bool = False, **facts: Any) -> dict[str, Any]:
    return {
        "port": number, "state": "ACTIVE", "link_layer": "Ethernet", "lid": 0, "mtu": 4096, "gbits": 400, "used": used,
        "left_out": False, "reason": reason, "gids": [entry(3, "::ffff:10.0.0.5")],
    } | facts  # fmt: skip


def card(name: str, *ports: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {
        "name": name, "driver": "mlx5_core", "firmware": "28.39.1002", "transport": "RC", "pci": "0000:1a:00.0",
        "numa": 0, "max_mr_size": 2**64 - 1, "max_qp": 131072, "max_sge": 30, "max_rd_atomic": 16, "atomics": True,
        "on_demand_paging": True, "memory_windows": False, "problem": "", "ports": list(ports),
    } | facts  # fmt: skip


def rail(name: str, group: int) -> dict[str, Any]:
    device, _, number = name.partition(":")
    return {
        "name": name, "device": device, "port": int(number), "group": group, "link_layer": "Ethernet", "gid_index": 3,
        "gid": "::ffff:10.0.0.5", "lid": 0, "mtu": 4096, "gbits": 400,
    }  # fmt: skip


def spot(kind: str, name: str, **distances: str) -> dict[str, Any]:
    return {
        "kind": kind, "name": name,
        "rails": [{"rail": f"{card}:1", "distance": distance} for card, distance in distances.items()],
    }  # fmt: skip


def description(
    *cards: dict[str, Any], rails: tuple[dict[str, Any], ...] = (), near: tuple[dict[str, Any], ...] = (), **facts: Any
) -> verbs.Description:
    document = {"built": True, "problem": "", "devices": cards, "rails": rails, "near": near} | facts
    return verbs.parse(json.loads(json.dumps(document)))


TWO_RAILS = description(
    card("mlx5_0", port("GID 3 ::ffff:10.0.0.5, RoCE v2, IPv4 of eth0", used=True)),
    card("mlx5_1", port("GID 3 ::ffff:10.0.1.5, RoCE v2, IPv4 of eth1", used=True), numa=1),
    rails=(rail("mlx5_0:1", 0), rail("mlx5_1:1", 1)),
    near=(
        spot("memory", "node 0", mlx5_0="same NUMA node", mlx5_1="other socket"),
        spot("AMD GPU", "0000:c1:00.0", mlx5_0="other socket", mlx5_1="same switch"),
    ),
)


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


# --- the description


def test_this_host_is_described_as_the_kernel_shows_it() -> None:
    found = verbs.describe()
    cards = Path("/sys/class/infiniband")
    assert {card.name for card in found.cards} == ({path.name for path in cards.iterdir()} if cards.exists() else set())
    assert bool(found.rails) is (found.problem == "")
    assert {rail.device for rail in found.rails} <= {card.name for card in found.cards}
    if found.built:
        nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
        assert [spot.name for spot in found.near if spot.kind == "memory"] == [
            f"node {path.name[4:]}" for path in nodes
        ]


def test_a_document_becomes_typed_facts() -> None:
    assert TWO_RAILS.cards[0].max_mr_size == 2**64 - 1
    assert TWO_RAILS.cards[0].ports[0].gids[0] == verbs.Entry(3, "::ffff:10.0.0.5", "RoCE v2", "eth0", True)
    assert [(rail.name, rail.group) for rail in TWO_RAILS.rails] == [("mlx5_0:1", 0), ("mlx5_1:1", 1)]
    assert TWO_RAILS.near[1].distances == {"mlx5_0:1": "other socket", "mlx5_1:1": "same switch"}


def test_a_document_of_any_length_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [card(f"mlx5_{number}", *[port("x" * 200, number=i) for i in range(1, 9)]) for number in range(100)]
    text = json.dumps({"built": True, "problem": "", "devices": cards, "rails": [], "near": []}).encode()
    asked = []

    class Core:
        @staticmethod
        def mr_verbs_describe(*arguments: Any) -> int:
            *options, out, capacity = arguments
            asked.append(options)
            verbs.ffi.memmove(out, text[: capacity - 1] + b"\0", min(len(text) + 1, capacity))
            return len(text)

    monkeypatch.setattr(verbs, "lib", Core)
    with config.configured(verbs_devices="mlx5_*", verbs_gid_index=3, ip_family=4):
        assert len(verbs.describe().cards) == 100
    assert asked == [[b"mlx5_*", 3, 4]] * 2


# --- what programs are told


def test_backends_of_this_host_are_told_honestly() -> None:
    available = "verbs" in config.LANES and verbs.describe().problem == ""
    assert rdma.is_ibverbs_available() is available
    named = "verbs" in str(config.get("lanes")).split(",")
    assert rdma.get_rdma_backend() == ("ibverbs" if available and named else "tcp")


@pytest.mark.parametrize("lane", [True, False])
@pytest.mark.parametrize("found", [TWO_RAILS, description(problem="no RDMA card"), description(built=False)])
def test_ibverbs_is_available_where_a_rail_and_the_lane_are(
    found: verbs.Description, lane: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "LANES", ("shm", "verbs", "tcp") if lane else ("shm", "tcp"))
    monkeypatch.setattr(verbs, "describe", lambda: found)
    available = lane and found is TWO_RAILS
    assert rdma.is_ibverbs_available() is rdma.is_rdma_available() is available
    if lane:
        with config.configured(lanes="shm,verbs,tcp"):
            assert rdma.get_rdma_backend() == ("ibverbs" if available else "tcp")
        with config.configured(lanes="verbs"):
            assert rdma.get_rdma_backend() == ("ibverbs" if available else "none")
    with config.configured(lanes="tcp"):
        assert rdma.get_rdma_backend() == "tcp"
    with config.configured(lanes="shm"):
        assert rdma.get_rdma_backend() == "none"


# --- doctor


def test_doctor_shows_rails_with_their_addresses() -> None:
    found = devices.rails(TWO_RAILS)
    assert named(found, "rails").ok
    assert named(found, "rails").why.startswith("0 = mlx5_0:1, 1 = mlx5_1:1")
    assert named(found, "mlx5_1:1").why == (
        "GID 3 ::ffff:10.0.1.5, RoCE v2, IPv4 of eth1 (Ethernet, 400 Gb/s, MTU 4096, mlx5_core, node 1)"
    )
    assert named(found, "nearest rails").why == (
        "memory node 0: mlx5_0:1 (same NUMA node); AMD GPU 0000:c1:00.0: mlx5_1:1 (same switch)"
    )
    assert [check for check in found if not check.ok] == []


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        ({"state": "DOWN"}, "ip link set eth0 up"),
        ({"gids": []}, "ip addr add ADDRESS/24 dev INTERFACE"),
        ({"state": "INIT", "link_layer": "InfiniBand"}, "opensm"),
    ],
)
def test_doctor_names_the_remedy_of_a_port(facts: dict[str, Any], remedy: str) -> None:
    found = devices.rails(description(card("bnxt_re0", port("why not", **facts)), problem="bnxt_re0: why not"))
    assert not named(found, "rails").ok
    assert "none (bnxt_re0: why not): transfers between hosts go over tcp" in named(found, "rails").why
    assert "not used: why not" in named(found, "bnxt_re0:1").why
    assert remedy in named(found, "bnxt_re0:1").fix


def test_doctor_on_cards_without_rc_and_ports_left_out() -> None:
    efa = "EFA: no RC, so it goes over tcp"
    found = devices.rails(
        description(
            card("rdmap0s6", port(efa), transport="other", driver="efa", problem=efa),
            card("mlx5_8", port("25 Gb/s beside 400 Gb/s", left_out=True)),
            problem=f"rdmap0s6: {efa}",
        )
    )
    assert (named(found, "rdmap0s6").ok, named(found, "rdmap0s6").why) == (True, efa)
    assert named(found, "mlx5_8:1").ok
    assert "rdmap0s6:1" not in {check.name for check in found}


def test_doctor_in_a_container_without_the_device_files() -> None:
    closed = "ibv_open_device of mlx5_0: Permission denied"
    found = devices.rails(description(card("mlx5_0", port(closed), problem=closed), problem=f"mlx5_0: {closed}"))
    assert "docker run --device=/dev/infiniband" in named(found, "mlx5_0:1").fix
    found = devices.rails(description(card("mlx5_0", problem=closed), problem=f"mlx5_0: {closed}"))
    assert "docker run --device=/dev/infiniband" in named(found, "mlx5_0").fix


def test_doctor_without_the_lane_or_with_a_library_that_crashes() -> None:
    left_out = description(built=False, problem="this build has no verbs lane: there was no header")
    assert [(check.ok, check.why) for check in devices.rails(left_out)] == [(False, left_out.problem)]
    assert "libibverbs-dev" in devices.rails(left_out)[0].fix
    crashed = devices.rails(Failed("it ended with signal 11"))
    assert [check.ok for check in crashed] == [False]
    assert "it ended with signal 11" in crashed[0].why


def test_what_doctor_cannot_use_comes_with_a_remedy() -> None:
    for used in (True, False):
        for facts in ({}, {"problem": "closed"}, {"transport": "iWARP", "problem": "iWARP"}, {"ports": []}):
            one = card("mlx5_0", port("because", used=used)) | facts
            assert [check for check in devices.rails(description(one)) if not check.ok and not check.fix] == []


# --- builds without the header


@pytest.fixture
def header_free_compiler(tmp_path: Path) -> Path:
    """g++ as on a machine without libibverbs' header."""
    missing = "fatal error: infiniband/verbs.h: No such file or directory"
    finds_none = f'case "$*" in *-fsyntax-only*) echo "{missing}" >&2; exit 1 ;; esac'
    return put_script(tmp_path / "bare-g++", f'{finds_none}\nexec g++ "$@"')


def plan(tmp_path: Path, *variables: str) -> str:
    """What csrc/Makefile would do in an empty folder."""
    command = ["make", "-C", ROOT / "csrc", "--no-print-directory", "-n", f"OUT={tmp_path}/out", "lib", *variables]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def test_without_the_header_the_lane_is_left_out_with_one_line(header_free_compiler: Path, tmp_path: Path) -> None:
    printed = plan(tmp_path, f"CXX={header_free_compiler}").splitlines()
    assert [line for line in printed if "left out" in line] == [
        "monarch_rdma: verbs lane: left out: no header infiniband/verbs.h of rdma-core >= 34; on Debian or Ubuntu: "
        "apt-get install libibverbs-dev, then build again"
    ]
    compiled = [line for line in printed if " -c -o " in line]
    sources = [line.rpartition("/csrc/")[2] for line in compiled]
    assert len(sources) > 20
    assert [source for source in sources if re.search("verbs|queue_pair", source)] == []
    assert "MR_VERBS" not in "".join(compiled)


def test_what_names_the_lane_compiles_without_it(tmp_path: Path) -> None:
    """Those that look at MR_VERBS; the lane's own files are left out."""
    poison = tmp_path / "infiniband" / "verbs.h"
    poison.parent.mkdir()
    poison.write_text("#error this machine does not have it\n")
    named = [path for path in sorted((ROOT / "csrc").rglob("*.cc")) if "MR_VERBS" in path.read_text()]
    assert named
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{tmp_path}", f"-I{ROOT}/csrc"]
    done = subprocess.run(["g++", *flags, *named], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
