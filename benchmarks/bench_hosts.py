"""The tcp lane between two hosts beside iperf3, on a network of a given rate, delay and loss.

    .venv/bin/python benchmarks/bench_hosts.py [--rounds 5] [--rate 10] [--round-trips 0,20] [--json FILE]

Two hosts of namespaces on this machine (tests/hosts/network.py; needs root), joined at `--rate` Gbit/s. In each round
iperf3 with 1, 4 and 8 streams and the tcp lane take turns at moving bytes from one host to the other for `--seconds`;
what counts is the median of the rounds, iperf3's with the number of streams that was best. Reads of 256 MiB follow each
other with the next one always asked for, as iperf3 does not stop either; `alone` is one such read at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from hosts.network import Host, Network  # noqa: E402

from monarch_rdma.rdma import Secret  # noqa: E402

STREAMS = (1, 4, 8)
SIZE = 256 << 20
WARM_UP = 2  # seconds; a read of 256 MiB for the lane
OWN = """
import mmap
data = mmap.mmap(-1, size)
for at in range(0, size, 4096): data[at] = 1
result = RDMABuffer(memoryview(data), engine=engine).to_bytes()
"""
PREPARE = """
import mmap, time
handle = RDMABuffer.from_bytes(blob, engine=engine)
landings = [memoryview(mmap.mmap(-1, handle.size())) for _ in range(2)]
for each in landings: handle.read_into(each).get(120)
"""
# Bytes a second that arrived, of reads that follow each other, `depth` at a time, from the end of the first one on.
READ = """
ends, going, began = -1, [], 0.0
while ends < 1 or time.perf_counter() - began < seconds:
    while len(going) < depth: going.append(handle.read_into(landings[(ends + len(going)) % 2], timeout=120))
    going.pop(0).get(120)
    ends += 1
    if ends == 0: began = time.perf_counter()
result = ends * handle.size() / (time.perf_counter() - began)
for each in going: each.get(120)
"""


def iperf(sender: Host, receiver: Host, streams: int, seconds: float) -> float:
    """Bytes a second that arrived."""
    server = receiver.popen(["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        assert server.poll() is None, "iperf3 does not start"
    said = sender.run("iperf3", "-c", receiver.address, "-P", streams, "-t", seconds, "-O", WARM_UP, "-J")
    server.communicate()
    return float(json.loads(said)["end"]["sum_received"]["bits_per_second"]) / 8


def measure(network: Network, delay: float, loss: float, options: argparse.Namespace) -> dict[str, Any]:
    here, there = network.hosts
    network.shape(delay=delay, loss=loss, rate=options.rate * 1e9 / 8)
    secret = Secret.generate()
    lane = {} if options.sockets is None else {"tcp_sockets": options.sockets}
    with there.child(secret, **lane) as owner, here.child(secret, **lane) as reader:
        reader.run(PREPARE, blob=owner.run(OWN, size=SIZE))
        rows: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for streams in STREAMS:
                rows.setdefault(f"iperf3 {streams}", []).append(iperf(there, here, streams, options.seconds))
            for name, depth in (("tcp lane", 2), ("alone", 1)):
                rows.setdefault(name, []).append(reader.run(READ, depth=depth, seconds=options.seconds))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    best = max(medians[f"iperf3 {streams}"] for streams in STREAMS)
    ratios = {name: medians[name] / best for name in ("tcp lane", "alone")}
    return {"bytes_per_second": medians, "of_iperf3": ratios, "all": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2, help="of each measurement")
    parser.add_argument("--rate", type=float, default=10, help="Gbit/s of each host's cable; 0: no limit")
    parser.add_argument("--sockets", type=int, help="option tcp_sockets")
    parser.add_argument("--round-trips", default="0,20", help="milliseconds, by commas")
    parser.add_argument("--loss", type=float, default=0.0, help="of packets, 0..1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    with Network(2) as network:
        print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors, {options.rate} Gbit/s; GB/s")
        print(
            f"{'round trip':12}"
            + "".join(f"{'iperf3 ' + str(n):>10}" for n in STREAMS)
            + f"{'tcp lane':>10}{'alone':>10}"
            f"{'of iperf3':>11}{'alone':>7}"
        )
        for milliseconds in map(float, options.round_trips.split(",")):
            name = f"{milliseconds:g} ms"
            found = results[name] = measure(network, milliseconds / 2000, options.loss, options)
            speeds = "".join(f"{value / 1e9:10.2f}" for value in found["bytes_per_second"].values())
            ratios = found["of_iperf3"]
            print(f"{name:12}{speeds}{ratios['tcp lane']:11.2f}{ratios['alone']:7.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
