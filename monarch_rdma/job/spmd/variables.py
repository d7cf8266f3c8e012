"""Who a rank is, by the variables of what has started it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError

__all__ = ["Rank", "rank_from"]


@dataclass(frozen=True)
class Rank:
    """`run`: the same for all ranks of one start, as far as the launcher tells. `launcher`: for people."""

    rank: int
    size: int
    run: str
    launcher: str


@dataclass(frozen=True)
class _Launcher:
    """`run`: variables that tell one start from another."""

    name: str
    rank: str
    size: str
    run: tuple[str, ...]


# The first whose rank and size are there counts: torchrun may itself be run by srun, and so on.
_LAUNCHERS = (
    _Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"),
    ),
    _Launcher("PMI", "PMI_RANK", "PMI_SIZE", ("PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID")),
    _Launcher("SLURM", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
)


def rank_from(variables: Mapping[str, str]) -> Rank:
    """ConfigError where no launcher is recognised, or where it says what cannot be."""
    for launcher in _LAUNCHERS:
        if launcher.rank in variables and launcher.size in variables:
            rank = _integer(variables, launcher.rank)
            size = _integer(variables, launcher.size)
            if not 0 <= rank < size:
                raise ConfigError(f"{launcher.rank} is {rank}, but must be below {launcher.size}, which is {size}")
            run = "-".join(variables[name] for name in launcher.run if variables.get(name)) or _hydras_address()
            return Rank(rank, size, re.sub(r"[^\w.-]", "_", run)[:100] or "run", launcher.name)
    wanted = "; ".join(f"{each.rank} and {each.size} ({each.name})" for each in _LAUNCHERS)
    raise ConfigError(
        f"this program was not started by a launcher that is known here: there is neither of {wanted}. Start it with "
        "torchrun, srun or mpirun, or use a job from an ordinary program"
    )


def _hydras_address() -> str:
    """MPICH's launcher names no run. But what it has started on each host, an ancestor of ours, was told where it
    listens, which tells runs apart; "" elsewhere.
    """
    for command in _ancestors():
        if "--control-port" in command[:-1]:
            return command[command.index("--control-port") + 1]
    return ""


def _ancestors() -> Iterator[list[str]]:
    """Their commands, as far as they can be seen."""
    pid = os.getppid()
    try:
        while pid > 1:
            yield Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return


def _integer(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, but must be a number")
    return int(text)
