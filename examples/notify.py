"""One process writes rows into another one's tensor; the owner learns of each row when all of its bytes are there.

python examples/notify.py
"""

from __future__ import annotations

import multiprocessing
import sys

import torch

from monarch_rdma.rdma import RDMABuffer, connect, listen

ROWS, COLUMNS = 16, 100_000


def writer(address: str) -> None:
    results = connect(address).lookup("results")
    writes = []
    for row in range(ROWS):
        data = torch.full((COLUMNS,), float(row + 1))
        writes.append(results[row].write_from(data, notify=row))  # `results[row]` is made here; the owner is not asked
    for write in writes:
        write.get()


def main() -> int:
    results = torch.zeros(ROWS, COLUMNS)
    buffer = RDMABuffer(results, access="write")
    with listen() as owner:
        owner.publish("results", buffer)
        process = multiprocessing.get_context("spawn").Process(target=writer, args=(owner.address,), daemon=True)
        process.start()
        for _ in range(ROWS):
            row = buffer.next_notification(timeout=60)
            complete = bool((results[row] == row + 1).all())
            print(f"row {row:2} is {'complete' if complete else 'NOT COMPLETE'}")
            if not complete:
                return 1
        process.join()
        buffer.drop().get()  # from here on nobody else can write to `results`
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
