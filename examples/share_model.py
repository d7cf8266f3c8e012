"""A model that two processes use and one of them holds: the second maps its weights and copies nothing.

python examples/share_model.py
"""

from __future__ import annotations

import multiprocessing
import sys

import torch

from monarch_rdma.rdma import RDMABuffer, connect, listen, share_

WIDTH = 4096


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))


def private_bytes() -> int:
    """Memory that this process has for itself alone."""
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def user(address: str) -> None:
    with torch.device("meta"):
        model = make_model()  # shapes, no memory
    before = private_bytes()
    mapped = {name: buffer.map() for name, buffer in connect(address).lookup("model").items()}
    model.load_state_dict(mapped, assign=True)
    with torch.no_grad():
        output = model(torch.ones(1, WIDTH))
    size = sum(tensor.nbytes for tensor in mapped.values())
    grown = private_bytes() - before
    print(f"the output of {size / 1e6:.0f} MB of weights is {output.mean():.6f}; they took {grown / 1e6:.0f} MB here")
    sys.exit(grown > size // 2)


def main() -> int:
    torch.manual_seed(0)
    model = share_(make_model())  # in place: parameters stay what they are, optimizers keep working
    with torch.no_grad():
        print(f"here the output is {model(torch.ones(1, WIDTH)).mean():.6f}")
    with listen() as owner:
        weights = {name: RDMABuffer(tensor, access="read") for name, tensor in model.state_dict().items()}
        owner.publish("model", weights)
        process = multiprocessing.get_context("spawn").Process(target=user, args=(owner.address,), daemon=True)
        process.start()
        process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
