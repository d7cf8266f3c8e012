"""A program that runs once for each rank, as one with a mesh: actors in its own processes, and on its hosts."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from ... import config
from ...actor import HostMesh, ProcMesh, this_host
from ...actor.joining.job_secret import engine_of_job
from ...actor.joining.transport import be_found_by_other_hosts
from ...actor.runtime.proc import current_proc, existing_proc
from ...actor.shape import Extent
from ...errors import ConfigError
from ...rdma.engine import seconds
from ...rdma.secret import configured_secret
from .meeting import Meeting
from .variables import rank_from

__all__ = ["World", "from_env"]


@dataclass(frozen=True)
class World:
    """All ranks. `procs`: their processes as a mesh, `{hosts, gpus}`, or `{ranks}` where hosts have different numbers
    of ranks; rank r of the program is rank r of the mesh. `hosts`: one agent on each host, in the first rank's process
    there: `hosts.spawn_procs` starts further processes. `local_rank`, `local_size`: of the ranks on this host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    procs: ProcMesh
    hosts: HostMesh
    launcher: str


def from_env(*, timeout: float = 60.0) -> World:
    """Every rank calls it, before anything else of this package: who all ranks are, by the variables of torchrun, SLURM
    or MPI.

    The ranks meet in a directory below option `job_dir`, which all hosts have to see; there rank 0 leaves a secret for
    the others (mode 0600), unless all have one (option secret_file). `timeout`: seconds for the slowest rank. Raises
    ConfigError (no launcher, or too late: this process has begun already), TransferTimeout (ranks that are missing).
    """
    limit = seconds(timeout)
    me = rank_from(config.launcher_variables())
    if existing_proc() is not None:
        raise ConfigError("from_env comes too late: this process takes part already; call it before anything else")
    meeting = Meeting(me.run, me.rank, me.size, limit)
    secret = meeting.secret(configured_secret())
    be_found_by_other_hosts()
    engine_of_job(secret)
    this_host()  # each rank can start processes; one of each host does it for `hosts`
    proc = current_proc()
    if me.rank == 0:
        proc.at_close(meeting.remove)
    said = meeting.addresses({"address": proc.address, "host": _host()})
    places = [str(each["host"]) for each in said]
    addresses = [str(each["address"]) for each in said]
    mine = [rank for rank, place in enumerate(places) if place == places[me.rank]]
    first = list(dict.fromkeys(places))
    agents = [addresses[places.index(place)] for place in first]
    hosts = HostMesh("hosts", agents, Extent(["hosts"], [len(agents)]).region)
    procs = ProcMesh("world", addresses, _extent(places).region, hosts)
    return World(me.rank, me.size, mine.index(me.rank), len(mine), procs, hosts, me.launcher)


def _host() -> str:
    """The same for ranks that share a host; another for each container."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{os.uname().nodename} {boot}"


def _extent(places: list[str]) -> Extent:
    counts = Counter(places)
    size = len(places) // len(counts)
    blocks = [places[index : index + size] for index in range(0, len(places), size)]
    if len(set(counts.values())) == 1 and all(len(set(block)) == 1 for block in blocks):
        return Extent(["hosts", "gpus"], [len(counts), size])
    return Extent(["ranks"], [len(places)])
