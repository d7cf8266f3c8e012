"""The client of the example: attaches to the pods that were applied beside it, and has each of their GPUs add something
up. docs/jobs-kubernetes.md says how it is run.
"""

from __future__ import annotations

import os
import socket

from monarch_rdma.actor import Actor, current_rank, endpoint
from monarch_rdma.job.kubernetes import KubernetesJob
from monarch_rdma.supervision.policy import Backoff

PATIENT = Backoff(1.0, 2.0, 30.0)  # seconds: pods that are replaced take their time
PODS, GPUS = int(os.environ.get("PODS", "2")), int(os.environ.get("GPUS", "8"))


class Trainer(Actor):
    @endpoint
    def add_up(self, count: int) -> tuple[str, str, float]:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"  # ROCm is called "cuda" too
        return socket.gethostname(), device, torch.arange(count, device=device).sum().item() + current_rank().rank


def main() -> None:
    job = KubernetesJob(attach_to="hello", timeout=1800.0)
    job.add_mesh("trainers", PODS)
    hosts = job.state(cached_path=None).trainers
    procs = hosts.spawn_procs({"gpus": GPUS}, gpus_per_proc=1, restart="always", max_restarts=None, backoff=PATIENT)
    trainers = procs.spawn("trainers", Trainer)
    for point, (host, device, total) in trainers.add_up.call(1000).get():
        print(f"{host} gpu {point['gpus']} ({device}): {total:g}")
    job.kill()  # gives back what this client has; the pods stay


if __name__ == "__main__":
    main()
