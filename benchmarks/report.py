"""Every figure the project sets itself as a goal, in one run: what, measured, against, ratio, what to reach.

    python benchmarks/report.py                 about six minutes
    python benchmarks/report.py --quick         about one
    python benchmarks/report.py --only tcp,idle --json figures.json

Contenders take turns and medians are compared, so that other load on the machine meets all of them alike. Nothing fails
because it is slow. iperf3, NIXL and ucx_perftest are used where they are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing

import program_rows as program
import python_rows as python
import torch
from owner import OwnerProcess
from rows import Table
from sections import table_parser, tabulate

from monarch_rdma.rdma import Secret

SECTIONS = ("copies", "small", "idle", "strided", "tcp", "control", "memory", "peers", "ucx")


def sections(lab: python.Lab, quick: bool) -> dict[str, list[Callable[[], None]]]:
    table, seconds = lab.table, "0.5" if quick else "3"
    return {
        "copies": [lambda: python.shared_host_copies(lab)],
        "small": [lambda: program.small_reads_of_the_core(table, seconds), lambda: python.small_reads(lab)],
        "idle": [lambda: program.idle(table, "2" if quick else "10")],
        "strided": [lambda: program.strided(table, seconds)],
        "tcp": [lambda: python.tcp_read(lab), lambda: program.tcp_round_trip(table, seconds)],
        "control": [lambda: program.control_round_trip(table, seconds)],
        "memory": [lambda: program.memory(table, (1 if quick else 4) << 30)],
        "peers": [lambda: python.gloo_and_nixl(lab)],
        "ucx": [lambda: program.ucx(table, lab.rounds, lab.largest)],
    }


def main() -> int:
    parser = table_parser(__doc__, SECTIONS)
    parser.add_argument("--nixl-python", metavar="PYTHON", help="an interpreter that has nixl [this one, where it has]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    secret = Secret.generate()
    with closing(OwnerProcess(secret)) as owner:
        table = Table(lambda text: print(text, flush=True))
        lab = python.Lab(
            secret=secret,
            owner=owner,
            table=table,
            rounds=3 if arguments.quick else 7,
            seconds=0.05 if arguments.quick else 0.15,
            largest=(64 << 20) if arguments.quick else (1 << 30),
            nixl_python=arguments.nixl_python or (sys.executable if python.has_nixl() else None),
        )
        return tabulate(table, sections(lab, arguments.quick), arguments)


if __name__ == "__main__":
    sys.exit(main())
