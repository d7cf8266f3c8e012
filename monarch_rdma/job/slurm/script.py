"""The batch script of a job: what it asks for, and how it starts an agent on each node."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..scheduled import Launch

__all__ = ["Request", "batch_script", "step"]

# Agents end by themselves, one by one; none of them shall be kept on one processor, or take others with it.
_STEP = (
    "srun",
    "--ntasks-per-node=1",
    "--cpu-bind=none",
    "--mem-bind=none",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--no-kill",
    "--label",
    "--unbuffered",
)


@dataclass(frozen=True)
class Request:
    """One component of a job: meshes that have the same kind of nodes. `options`: of sbatch, by name without dashes; an
    empty value is a flag.
    """

    meshes: Mapping[str, int]
    options: Mapping[str, str]
    more: Sequence[str] = ()

    @property
    def num_nodes(self) -> int:
        return sum(self.meshes.values())

    def directives(self) -> list[str]:
        named = [f"--{name}={value}" if value else f"--{name}" for name, value in self.options.items()]
        return [f"#SBATCH {option}" for option in (*named, *self.more)]


def batch_script(
    launch: Launch, job_options: Mapping[str, str], requests: Sequence[Request], python: str, more: Sequence[str]
) -> str:
    """`job_options`: of the whole job. `more`: further arguments of the agents."""
    whole = [f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in job_options.items()]
    lines = ["#!/bin/bash", *whole]
    for index, request in enumerate(requests):
        lines += ["#SBATCH hetjob"] * (index > 0) + request.directives()
    lines.append("unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_CPU_BIND SLURM_MEM_BIND")
    for index, request in enumerate(requests):
        first = 0
        for mesh, count in request.meshes.items():
            where = [f"--het-group={index}"] if len(requests) > 1 else []
            where += [f"--relative={first}"] if len(request.meshes) > 1 else []
            lines.append(f"{step(launch, mesh, count, python, where, more)} &")
            first += count
    if launch.client:
        client = shlex.join(launch.client_command(python, ends_job=False))
        log = shlex.quote(str(launch.log_dir / "client.log"))
        lines += [f"{client} > {log} 2>&1 &", "wait $!", "code=$?", "kill $(jobs -p) 2> /dev/null", "exit $code"]
    else:
        lines += ["code=0", 'for step in $(jobs -p); do wait "$step" || code=$?; done', "exit $code"]
    return "\n".join(lines) + "\n"


def step(launch: Launch, mesh: str, count: int, python: str, srun: Sequence[str], more: Sequence[str]) -> str:
    """The command that starts the agents of one mesh. `srun`: further options of it."""
    address = launch.folder.agent_address(mesh, "$SLURM_PROCID", is_shared=True)
    agent = shlex.join(launch.agent(python, "--with-parent", *more)) + f' --address "{address}"'
    command = [*_STEP, *srun, f"--nodes={count}", f"--ntasks={count}", "bash", "-c", f"exec {agent}"]
    return shlex.join(command)
