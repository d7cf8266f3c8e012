"""How soon a job of SLURM is there, how soon its failures are known. On a private cluster on this host (root).

    python benchmarks/bench_jobs.py [--nodes 4] [--tasks 8] [--rounds 3]

The promises: 4 nodes with 8 tasks each from `apply` on idle nodes to the first answered `call` from all 32 in less than
10 s; a step that is killed is known in less than 2 s.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from slurm_cluster import Cluster, Unavailable  # noqa: E402

from monarch_rdma import actor, config  # noqa: E402
from monarch_rdma.actor import Actor, current_rank, endpoint  # noqa: E402
from monarch_rdma.job import SlurmJob  # noqa: E402
from monarch_rdma.supervision.events import Recording  # noqa: E402


class Guest(Actor):
    @endpoint
    def rank(self) -> int:
        return current_rank().rank


def one_round(cluster: Cluster, nodes: int, tasks: int) -> tuple[float, float, float]:
    """Seconds from `apply` to the answers of all, from the end of a step to its event, and for `kill`."""
    job = SlurmJob({"hosts": nodes}, ntasks_per_node=tasks)
    began = time.monotonic()
    guests = job.state(cached_path=None).hosts.spawn_procs({"tasks": tasks}).spawn("guests", Guest)
    assert len(guests.rank.call().get(120).values()) == nodes * tasks
    answered = time.monotonic() - began
    agents = cluster.agents()
    with Recording("job.host_lost") as recording:
        killed = time.monotonic()
        os.kill(cluster.daemon_of_step(agents[cluster.nodes[nodes - 1]]), signal.SIGKILL)
        noticed = recording.wait("job.host_lost", timeout=60).monotonic - killed
    began = time.monotonic()
    job.kill()
    return answered, noticed, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    actor.unhandled_fault_hook = lambda failure: None  # the killed step is one
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "cluster").mkdir()
        try:
            cluster = Cluster(Path(directory) / "cluster", nodes=arguments.nodes, cpus=arguments.tasks)
        except Unavailable as why:
            print(why)
            return 1
        os.environ.update(cluster.environment)
        os.chdir(directory)
        config.configure(job_dir=f"{directory}/jobs")
        try:
            cluster.start()
            print("apply to all answers   step killed to event   kill")
            for _ in range(arguments.rounds):
                answered, noticed, killed = one_round(cluster, arguments.nodes, arguments.tasks)
                print(f"{answered:17.2f} s   {noticed:18.3f} s   {killed:5.2f} s", flush=True)
        finally:
            cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
