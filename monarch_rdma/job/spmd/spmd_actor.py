"""Plain torch.distributed code inside actors: the variables that torchrun would set, in each actor's process."""

from __future__ import annotations

import math
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from ...actor import Actor, ActorMesh, ProcMesh, current_rank, current_size, endpoint
from ...actor.launch.placement import set_variables
from ...errors import ConfigError

__all__ = ["SPMDActor", "setup_torch_elastic_env", "setup_torch_elastic_env_async"]

AddressKind = Literal["ipv4", "ipv6"]


class SPMDActor(Actor):
    """One in each process of a mesh whose last dimension counts the processes of a host, as `spawn_procs` makes them.

    `torch.distributed.init_process_group()` finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK,
    GROUP_WORLD_SIZE, ROLE_RANK, ROLE_WORLD_SIZE, ROLE_NAME, MASTER_ADDR and MASTER_PORT, as under torchrun.
    """

    def __init__(self) -> None:
        point, sizes = current_rank(), current_size()
        labels = list(sizes)
        self.rank = point.rank
        self.world_size = math.prod(sizes.values())
        self.local_rank = point[labels[-1]] if labels else 0
        self.local_world_size = sizes[labels[-1]] if labels else 1

    @endpoint
    def get_host_port(self, use_ipaddr: AddressKind | None = None) -> tuple[str, int]:
        """Where a process group can meet: this host's name (or its address), and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        name = socket.gethostname()
        if use_ipaddr is None:
            return name, port
        families = {"ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}
        if use_ipaddr not in families:
            raise ConfigError(f"use_ipaddr is {use_ipaddr!r}, but must be 'ipv4', 'ipv6' or None")
        found = socket.getaddrinfo(name, port, families[use_ipaddr], socket.SOCK_STREAM)
        return str(found[0][4][0]), port

    @endpoint
    def setup_env(self, master_addr: str, master_port: int) -> None:
        """Sets the variables."""
        self._set_up(master_addr, master_port)

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: list[str]) -> bool:
        """Sets the variables and runs a script, or with "-m" a module, as `__main__`. What it raises is raised."""
        if not script_args or script_args == ["-m"]:
            raise ConfigError(f"script_args is {script_args!r}, but must begin with a script, or with -m and a module")
        self._set_up(master_addr, master_port)
        if script_args[0] == "-m":
            sys.argv = script_args[1:]
            runpy.run_module(script_args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(script_args)
            runpy.run_path(script_args[0], run_name="__main__")
        return True

    @endpoint
    def run_command(self, entrypoint: str, args: Sequence[str], env: Mapping[str, str]) -> bool:
        """Runs a command with these variables added; CalledProcessError where it fails."""
        set_variables(env)
        subprocess.run([entrypoint, *args], check=True)
        return True

    def _set_up(self, master_addr: str, master_port: int) -> None:
        groups = math.ceil(self.world_size / self.local_world_size)
        values = {
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": master_port,
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.rank // self.local_world_size,
            "GROUP_WORLD_SIZE": groups,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "ROLE_NAME": "rank",
        }
        set_variables({name: str(value) for name, value in values.items()})


def setup_torch_elastic_env(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddressKind | None = None,
) -> None:
    """Sets torchrun's variables in all processes of a mesh, for actors that call torch.distributed.

    `master_addr`, `master_port`: where the group meets; by default the first process's host, and a port free there.
    """
    actors, first = _spawned(proc_mesh)
    where = first.get_host_port.call_one(use_ipaddr).get() if master_addr is None or master_port is None else ("", 0)
    actors.setup_env.call(master_addr or where[0], master_port or where[1]).get()
    actors.stop("the variables are set").get()


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddressKind | None = None,
) -> None:
    """The same, for coroutines."""
    actors, first = _spawned(proc_mesh)
    where = await first.get_host_port.call_one(use_ipaddr) if master_addr is None or master_port is None else ("", 0)
    await actors.setup_env.call(master_addr or where[0], master_port or where[1])
    await actors.stop("the variables are set")


def _spawned(procs: ProcMesh) -> tuple[ActorMesh[SPMDActor], ActorMesh[SPMDActor]]:
    """All of them, and the first."""
    actors = procs.spawn("spmd_env", SPMDActor)
    return actors, actors.slice(**dict.fromkeys(actors.sizes, 0))
