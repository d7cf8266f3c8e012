"""compare.py DEVICE ROUNDS: transport_bench beside perftest on one device of this machine, and on both devices beside
itself on one, taking turns. All poll all the time.

Prints one JSON line: for each kind and size the figures of both, bytes per second or seconds, the median of the rounds'
ratios (ours to the other's), and the goal for it.

A write is timed until its completion, as our operation ends with it: ib_write_bw with one in flight. ib_write_lat tells
half a ping-pong of writes that are seen in memory, without the acknowledgement.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace

BENCH = os.path.join(os.environ["RDMA_VM_PROGRAMS"], "..", "transport_bench")
PERFTEST_SECONDS = 60.0  # until it has told a figure


@dataclass(frozen=True)
class Figure:
    measure: str  # "latency", "bandwidth" or "two rails"
    op: str
    size: int
    count: int  # operations of each side and round
    depth: int = 1

    def __str__(self) -> str:
        return f"{self.measure} {self.op} {self.size}"

    @property
    def goal(self) -> float:
        """Of the ratio: at most that of a latency, at least that of a bandwidth."""
        return {"latency": 1.15, "bandwidth": 0.95, "two rails": 1.0}[self.measure]


KiB, MiB = 1 << 10, 1 << 20
FIGURES = [
    Figure("latency", "read", 8, 1000),
    Figure("latency", "write", 8, 1000),
    *(
        Figure("bandwidth", op, size, count, depth)
        for op in ("read", "write")
        for size, count, depth in ((64 * KiB, 400, 16), (MiB, 30, 8), (16 * MiB, 5, 2))
    ),
    *(Figure("two rails", op, 16 * MiB, 5, 2) for op in ("read", "write")),
]


def theirs(figure: Figure, device: str, address: str) -> float:
    """perftest's own figure: its average bandwidth, its median ("typical") latency, or one by messages a second."""
    waits = figure.measure == "latency" and figure.op == "write"
    tool = f"ib_{figure.op}_{'lat' if figure.measure == 'latency' and not waits else 'bw'}"
    command = [tool, "-d", device, "-F", "-s", str(figure.size), "-n", str(figure.count)]
    if waits:
        command += ["-t", "1"]
    elif figure.measure == "bandwidth":
        command += ["-t", str(max(figure.depth, 2))]
    column, unit = (4, 1e6) if waits else (4, 1e-6) if figure.measure == "latency" else (3, 1e6)
    deadline = time.monotonic() + PERFTEST_SECONDS
    while True:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            client = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=False)
            server.kill()
        rows = [line.split() for line in client.stdout.splitlines()]
        row = next((row for row in rows if row[:2] == [str(figure.size), str(figure.count)]), None)
        # It fails while its server does not listen yet, and now and then it says 0.
        if client.returncode == 0 and row is not None and float(row[column]) > 0:
            value = float(row[column]) * unit
            return 1 / value if waits else value
        if time.monotonic() > deadline:
            raise RuntimeError(f"{' '.join(command)}: {client.stdout}{client.stderr}")
        time.sleep(0.1)


def ours(figure: Figure, devices: str) -> float:
    measure = "latency" if figure.measure == "latency" else "bandwidth"
    command = [
        BENCH, "--local", "--lane", "verbs", "--devices", devices, "--op", figure.op, "--sizes", str(figure.size),
        "--measure", measure, "--iters", str(figure.count), "--rounds", "1", "--depth", str(figure.depth),
        "--spin", "1", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    row = json.loads(done.stdout)["figures"][0]
    return float(row["p50"] if figure.measure == "latency" else row["bytes_per_second"])


def both(figure: Figure, device: str) -> tuple[float, float]:
    """Ours, and what it is compared with."""
    if figure.measure == "two rails":
        return ours(figure, "rxe0,rxe1"), ours(figure, device)
    return ours(figure, device), theirs(figure, device, f"10.9.{device[-1]}.{os.environ['RDMA_VM_NUMBER']}")


def lighter(figure: Figure) -> Figure:
    """For the order of magnitude. perftest wants five operations at least."""
    return replace(figure, size=min(figure.size, 4 * MiB), count=max(5, figure.count // 2))


def main(device: str, rounds: int) -> None:
    out = {}
    for figure in FIGURES if rounds > 1 else map(lighter, FIGURES):
        pairs = [both(figure, device) for _ in range(rounds)]
        if rounds == 1 and not 0.2 < pairs[0][0] / pairs[0][1] < 5:  # other work on this host: the median tells
            pairs += [both(figure, device) for _ in range(4)]
        out[str(figure)] = {
            "ours": statistics.median(a for a, _ in pairs),
            "other": statistics.median(b for _, b in pairs),
            "ratio": statistics.median(a / b for a, b in pairs),
            "goal": figure.goal,
        }
        print(figure, out[str(figure)], file=sys.stderr, flush=True)
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
