"""The rails of this machine, and waiting for what becomes of them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from monarch_rdma.rdma import verbs

BOTH = {f"rxe{rail}:1": (rail, f"::ffff:10.9.{rail}.{os.environ['RDMA_VM_NUMBER']}") for rail in (0, 1)}


def present() -> dict[str, tuple[int, str]]:
    """Number and address of those that an engine would use."""
    return {rail.name: (rail.group, rail.gid) for rail in verbs.describe().rails}


def until(reached: Callable[[], object], seconds: float = 30) -> None:
    """Waits for what the kernel or a peer does a moment later, in a thread of its own."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not reached within {seconds:.0f} s; rails: {verbs.describe().rails}"
        time.sleep(0.05)


def sent_packets(rail: int) -> int:
    """Those that the card of a rail has sent."""
    return int(Path(f"/sys/class/infiniband/rxe{rail}/ports/1/hw_counters/sent_pkts").read_text())


def queue_pairs(pid: int | None = None) -> set[tuple[str, int]]:
    """Those of a process on all devices, by device and number, and those whose process is not known any more; or all.

    The kernel names the thread that made one, as long as that lives: some of other processes may be among them.
    """
    found = json.loads(subprocess.check_output(["rdma", "-j", "resource", "show", "qp"]))
    threads = {str(pid), *os.listdir(f"/proc/{pid}/task")} if pid is not None else set()
    return {
        (entry["ifname"], entry["lqpn"])
        for entry in found
        if entry["type"] == "RC" and (pid is None or str(entry.get("pid", pid)) in threads)
    }
