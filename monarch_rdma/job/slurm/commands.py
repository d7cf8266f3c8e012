"""SLURM's own commands: how they are run, and what their refusals mean."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from ...errors import ConfigError, RdmaError

__all__ = ["NoAnswer", "advice_for_refusal", "refused", "run"]

_TIMEOUT = 60.0  # seconds; a busy controller may take some
_NOISE = ("sbatch: error: ", "srun: error: ", "scancel: error: ", "scontrol: error: ", "squeue: error: ")
# What a refusal or a reason to wait contains, and what to try. The first that fits counts.
_ADVICE = (
    ("invalid partition", "choose one of: {partitions}"),
    ("partitionnodelimit", "ask for fewer nodes, or another partition of: {partitions}"),
    ("partitionconfig", "the partition does not allow it: ask for less, or choose another of: {partitions}"),
    ("partitiontimelimit", "lower time_limit to what the partition allows (sinfo -o '%R %l'), or choose another"),
    ("time limit", "lower time_limit to what the partition allows (sinfo -o '%R %l'), or choose another"),
    ("invalid account", "pass an account of yours: sacctmgr show associations user=$USER format=account,partition,qos"),
    ("invalid qos", "pass a qos of yours: sacctmgr show associations user=$USER format=account,partition,qos"),
    (
        "node configuration is not available",
        "no node has so many GPUs, processors or so much memory: sinfo -o '%R %c %m %G'",
    ),
    ("badconstraints", "no node has all that is asked for: sinfo -o '%R %c %m %G %f'"),
    ("maxsubmit", "you have as many jobs in the queue as you may: squeue --me; scancel some, or wait"),
    ("qos", "the quota of this qos is used up or too small: sacctmgr show qos; ask for less, or wait"),
    ("assoc", "the quota of this account is used up or too small: sacctmgr show associations; ask for less, or wait"),
    ("dependencyneversatisfied", "what it depends on has failed: kill it, and apply it again without the dependency"),
    ("jobheld", "it is held: scontrol release JOB, or ask the administrators"),
    ("held", "it is held: scontrol release JOB, or ask the administrators"),
    ("partitiondown", "the partition is down: choose another of: {partitions}"),
    ("partitioninactive", "the partition takes no jobs: choose another of: {partitions}"),
    ("reqnodenotavail", "nodes that it asks for are down or reserved: sinfo -R; scontrol show reservation"),
    ("reservation", "nodes are reserved: scontrol show reservation"),
    ("priority", "others are before it: squeue --start -j JOB says when it may begin"),
    ("resources", "it waits for nodes to become free: squeue --start -j JOB says when that may be"),
    ("unable to contact", "the controller does not answer: scontrol ping"),
)


class NoAnswer(RdmaError, ConnectionError):
    """The controller did not answer."""


def run(*command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs one of SLURM's commands. ConfigError where there is none; NoAnswer where it takes too long."""
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            f"there is no command {command[0]!r}: SLURM's commands are not installed here, or not in PATH; run this on "
            "a login node of the cluster",
            operation="job",
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} has not answered within {_TIMEOUT:g} s; scontrol ping", operation="job") from None


def refused(command: Sequence[str], done: subprocess.CompletedProcess[str]) -> ConfigError:
    """The error for a command that has failed, in SLURM's words."""
    words = _words(done.stderr or done.stdout) or f"exit code {done.returncode}"
    advice = advice_for_refusal(words)
    return ConfigError(f"SLURM refuses the job ({command[0]}): {words}{f'; {advice}' if advice else ''}", cause=words)


def advice_for_refusal(words: str) -> str:
    """What to try about a refusal, or about a reason for which a job waits; "" where nothing is known."""
    text = words.lower()
    for sign, advice in _ADVICE:
        if sign in text:
            return advice.format(partitions=_partitions()) if "{" in advice else advice
    return ""


def _words(text: str) -> str:
    lines = []
    for line in text.strip().splitlines():
        for noise in _NOISE:
            line = line.removeprefix(noise)
        if line and line not in lines:
            lines.append(line)
    return "; ".join(lines)


def _partitions() -> str:
    done = run("sinfo", "-h", "-o", "%R")
    return ", ".join(sorted(set(done.stdout.split()))) or "(sinfo shows none)"
