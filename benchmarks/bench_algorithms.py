"""The algorithms of collectives between hosts that are far from each other.

    .venv/bin/python benchmarks/bench_algorithms.py [--hosts 8] [--delays 0,1,10] [--rate 0] [--mib 1] [--rounds 3]

Hosts of namespaces on this machine (tests/hosts/network.py; needs root), one member on each, `--delays` ms apart (one
way), each with a link of `--rate` Gbit/s (0: no limit) for what it sends. Medians, in ms, of the time until the last
member is done; algorithms take turns. Of an all_reduce also how many messages a member sends at most, and how many
bytes, which do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from hosts.network import Network  # noqa: E402
from members import Members  # noqa: E402

from monarch_rdma.rdma import Secret  # noqa: E402

SETUP = """
import torch
from monarch_rdma.collectives import Group
from monarch_rdma.collectives.measure import measured
torch.set_num_threads(1)
"""
COUNT = """
names = ("collective_pieces", "collective_piece_bytes")
result = {}
for nbytes in (8, 1 << 20, 16 << 20):
    for algorithm in ("direct", "doubling", "halving", "ring"):
        before = [engine.counters().get(name, 0) for name in names]
        group.all_reduce(torch.ones(nbytes // 4), algorithm=algorithm)
        result[nbytes, algorithm] = [engine.counters()[name] - then for name, then in zip(names, before)]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--delays", default="0,1,10", help="ms, one way")
    parser.add_argument("--rate", type=float, default=0, help="Gbit/s")
    parser.add_argument("--mib", type=int, default=1, help="size of the largest tensor")
    parser.add_argument("--kinds", default="barrier,all_reduce,broadcast,all_gather")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    secret = Secret.generate()
    with Network(options.hosts) as network:
        members = Members(
            [host.child(secret) for host in network.hosts], lambda rank: network.hosts[rank].child(secret), SETUP
        )
        members.form()
        counts = members.run(COUNT)
        print(f"all_reduce over {options.hosts} hosts, what one member sends at most:")
        for nbytes, algorithm in counts[0]:
            pieces, sent = (max(each[nbytes, algorithm][i] for each in counts) for i in range(2))
            print(f"  {nbytes:9} bytes  {algorithm:9} {pieces:6} messages {sent:10} bytes", flush=True)
        for delay in map(float, options.delays.split(",")):
            network.shape(delay=delay / 1e3, rate=options.rate * 1e9 / 8)
            code = "result = measured(group, mib=mib, rounds=rounds, kinds=kinds)"
            taken = members.run(code, mib=options.mib, rounds=options.rounds, kinds=options.kinds.split(","))[0]
            print(f"{delay:g} ms one way:")
            for kind, by_size in taken.items():
                for nbytes, seconds in by_size.items():
                    row = "  ".join(f"{name} {each * 1e3:.2f}" for name, each in seconds.items())
                    print(f"  {kind:15} {nbytes:9} bytes  {row}", flush=True)


if __name__ == "__main__":
    main()
