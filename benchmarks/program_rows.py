"""Rows that the stand-alone program transport_bench measures, some beside ucx_perftest."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rows import Table, faster_than, limit, rate_of, size_text, time_of
from turns import Contender, take_turns

import monarch_rdma

__all__ = ["control_round_trip", "idle", "memory", "small_reads_of_the_core", "strided", "tcp_round_trip", "ucx"]

PROGRAM = Path(monarch_rdma.__file__).parent / "bin" / "transport_bench"


def measure(*arguments: str) -> list[dict[str, Any]]:
    """Figures of `transport_bench --local --json ARGUMENTS`. RuntimeError with its sentence where it fails."""
    command = [str(PROGRAM), "--local", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"transport_bench ended with {done.returncode}")
    figures: list[dict[str, Any]] = json.loads(done.stdout)["figures"]
    return figures


def small_reads_of_the_core(table: Table, seconds: str) -> None:
    lanes = {"shm-mapped": 0.3e-6, "shm-process_vm": 3e-6}
    arguments = ["--op", "read", "--sizes", "8", "--measure", "latency", "--seconds", seconds]
    for figure in measure("--lane", ",".join(lanes), *arguments):
        lane = figure["lane"]
        table.add(limit(f"{lane} read 8 B (C++), p50", figure["p50"], "s", lanes[lane]))


# A round trip depends on whether both ends share a processor: then nobody has to wake a sleeping one.
PLACES = {"one processor": "0,0", "two processors": "0,1"}


def tcp_round_trip(table: Table, seconds: str) -> None:
    _round_trips(table, "tcp read 8 B", 1.5, "--lane", "tcp", "--op", "read", "--seconds", seconds)


def control_round_trip(table: Table, seconds: str) -> None:
    _round_trips(table, "control frame round trip 8 B", 1.3, "--op", "message", "--seconds", seconds)


def _round_trips(table: Table, what: str, most: float, *arguments: str) -> None:
    for place, cpus in PLACES.items():
        (figure,) = measure("--cpus", cpus, "--sizes", "8", "--measure", "latency", "--baseline", *arguments)
        against = figure["against"][0]
        name = f"{what}, {place} (C++), p50"
        table.add(time_of(name, figure["p50"], against["name"], against["seconds"], most))


def strided(table: Table, seconds: str) -> None:
    latency, flight = measure("--lane", "tcp", "--strided", "256x1K", "--verify", "--seconds", seconds)
    what, size = "tcp read 256 x 1 KiB strided, one read (C++)", latency["bytes"]
    singles = latency["against"][0]
    table.add(rate_of(what, size, latency["p50"], singles["name"], singles["seconds"], 10))
    singles, seconds_of_one = flight["against"][0], size / flight["bytes_per_second"]
    table.add(rate_of(what, size, seconds_of_one, singles["name"], size / singles["bytes_per_second"]))


def idle(table: Table, seconds: str) -> None:
    for figure in measure("--idle", seconds):
        side = figure["side"].split()[0]
        table.add(limit(f"idle engine, {side}: processor", figure["cpu_seconds"] / figure["seconds"], "cores", 0.0005))
        switches = figure["context_switches"] / figure["seconds"]
        table.add(limit(f"idle engine, {side}: context switches", switches, "/s", 1.0))


def memory(table: Table, size: int) -> None:
    for figure in measure("--memory", "--op", "read,write", "--sizes", str(size)):
        for side in ("client", "server"):
            what = f"extra memory, {figure['lane']} {figure['op']} of {size_text(size)}, {side}"
            table.add(limit(what, figure[f"{side}_extra"], "B", 64 << 20))


def ucx(table: Table, rounds: int, largest: int) -> None:
    """UCX's get over mapped shared memory, which is a memcpy and checks nothing, program beside program: our copy out
    of the mapped view, which is the same; and our read, which checks that the owner lives, has not dropped the region
    and grants reading, and makes a drop wait.
    """
    if shutil.which("ucx_perftest") is None:
        table.note("ucx_perftest: left out, not installed here (apt-get install ucx-utils)")
        return
    for size in (8, 64, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30):
        if size > largest:
            continue
        theirs = _single_figure("ucx_perftest ucp_get", _ucx_get, size)
        ours = [_single_figure("mapped view", _view, size), _single_figure("shm-mapped read, checked", _read, size)]
        take_turns([*ours, theirs], rounds=rounds)
        for each in ours:
            what = f"{each.name}, {size_text(size)} (C++)"
            table.add(faster_than(what, size, each.seconds, theirs.name, theirs.seconds, 0.9))


def _single_figure(name: str, figure: Callable[[int], float], size: int) -> Contender:
    return Contender(name, lambda _: [figure(size)], whole_program=True)


def _read(size: int) -> float:
    """Mean seconds of one read, one at a time: the median of rounds."""
    return size / float(_mapped(size)["bytes_per_second"])


def _view(size: int) -> float:
    """The same of a copy out of the mapped view."""
    return size / float(_mapped(size, "--mapped-view")["against"][0]["bytes_per_second"])


def _mapped(size: int, *arguments: str) -> dict[str, Any]:
    what = ["--lane", "shm-mapped", "--op", "read", "--sizes", str(size)]
    return measure(*what, "--measure", "bandwidth", "--seconds", "0.5", *arguments)[0]


def _ucx_get(size: int) -> float:
    """Mean seconds of one get, one at a time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "UCX_TLS": "posix,self", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    command = ["ucx_perftest", "-p", port]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_listener(server, int(port))
        count = str(max(10, min(200_000, (1 << 32) // size)))
        test = ["127.0.0.1", "-t", "ucp_get", "-s", str(size), "-n", count, "-w", "10", "-f", "-O", "1"]
        client = subprocess.run(
            [*command, *test], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
    finally:
        server.kill()
        server.wait()
    final = client.stdout.strip().splitlines()[-1].replace("Final:", "").split()
    return size / (float(final[5]) * 2**20)  # from the MB/s of all iterations: its times have too few digits


def _wait_for_listener(server: subprocess.Popen[bytes], port: int) -> None:
    """Looks for the listening socket without connecting: the server takes the first connection for its client."""
    wanted = f":{port:04X}"
    for _ in range(1000):
        if server.poll() is not None:
            raise RuntimeError(f"ucx_perftest ended with {server.returncode} before it listened")
        sockets = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
        lines = [line.split() for table in sockets if table.exists() for line in table.read_text().splitlines()[1:]]
        if any(line[1].endswith(wanted) and line[3] == "0A" for line in lines):
            return
        time.sleep(0.01)
    raise RuntimeError(f"ucx_perftest did not listen on port {port} within 10 s")
