"""A process reads a tensor out of another one and proves, by checksums of each MiB, that it has what the owner has.

python examples/verify.py

The owner publishes the tensor and its checksums. The reader computes its own from what arrived. Then a bit of the copy
is flipped, as a bad memory module would do it, and the reader finds the one MiB to read again.
"""

from __future__ import annotations

import multiprocessing
import sys

import torch

from monarch_rdma import kernels
from monarch_rdma.rdma import RDMABuffer, connect, listen

MIB = 1 << 20


def reader(address: str) -> None:
    owner = connect(address)
    weights, sums = owner.lookup("weights"), owner.lookup("sums")
    copy, theirs = torch.empty(16 * MIB), torch.empty(64, dtype=torch.int64)
    weights.read_into(copy).get()
    sums.read_into(theirs).get()
    print(f"after the read {differing(copy, theirs)} of {len(theirs)} MiB differ")

    bits = copy.view(torch.int32)
    bits[5_000_000] ^= 1 << 9
    (bad,) = (kernels.checksum(copy) != theirs).nonzero().flatten().tolist()
    print(f"with a flipped bit MiB {bad} differs")
    part = slice(bad * MIB // 4, (bad + 1) * MIB // 4)
    weights[part].read_into(copy[part]).get()
    print(f"read again, {differing(copy, theirs)} differ")


def differing(copy: torch.Tensor, theirs: torch.Tensor) -> int:
    return int((kernels.checksum(copy) != theirs).sum())


def main() -> int:
    weights = torch.randn(16 * MIB)  # 64 MiB
    with listen() as owner:
        owner.publish("weights", RDMABuffer(weights, access="read"))
        owner.publish("sums", RDMABuffer(kernels.checksum(weights), access="read"))
        process = multiprocessing.get_context("spawn").Process(target=reader, args=(owner.address,), daemon=True)
        process.start()
        process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
