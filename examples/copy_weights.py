"""Copies a model's weights into another process. All that is handed over is one address string.

python examples/copy_weights.py
"""

from __future__ import annotations

import multiprocessing
import sys
import time

import torch

from monarch_rdma.rdma import RDMABuffer, connect, listen


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))


def reader(address: str) -> None:
    model = make_model(seed=1)
    mine = model.state_dict()
    theirs = connect(address).lookup("weights")
    began = time.perf_counter()
    reads = [theirs[name].read_into(mine[name]) for name in mine]  # all at once
    for read in reads:
        read.get()  # raises PeerLost, TransferTimeout, AccessDenied, ... where it did not succeed
    seconds = time.perf_counter() - began
    size = sum(buffer.size() for buffer in theirs.values())
    print(f"{len(reads)} tensors, {size / 1e6:.1f} MB in {seconds * 1e3:.1f} ms; the last one: {reads[-1].explain()}")
    same = all(torch.equal(tensor, mine[name]) for name, tensor in make_model(seed=0).state_dict().items())
    print("the reader's model is now the owner's" if same else "the models DIFFER")
    sys.exit(not same)


def main() -> int:
    model = make_model(seed=0)
    with listen() as owner:
        owner.publish("weights", {name: RDMABuffer(tensor) for name, tensor in model.state_dict().items()})
        process = multiprocessing.get_context("spawn").Process(target=reader, args=(owner.address,), daemon=True)
        process.start()
        process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
