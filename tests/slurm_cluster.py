"""A private SLURM cluster on this host, for tests: a controller and several nodes, on ports and in a directory of their
own. It ends with the tests, and so does everything that runs in it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from ports import free_ports

__all__ = ["Cluster", "Unavailable"]

ROOT = Path(__file__).resolve().parent.parent
_STARTING, _STOPPING = 30.0, 20.0  # seconds
_MARK = "MONARCH_RDMA_TEST_SLURM"  # a variable of all that runs in the cluster, jobs included


class Unavailable(Exception):
    """Why there can be no SLURM here, in one line."""


class Cluster:
    """Nodes n1, n2, ... of `cpus` processors and `gpus` pretended GPUs each, in partitions `main` (all) and `short` (a
    minute at most; one node).
    """

    def __init__(self, directory: Path, nodes: int = 4, cpus: int = 8, gpus: int = 4) -> None:
        self.directory = directory
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.conf = directory / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        _install()
        self._write(cpus, gpus)

    def start(self) -> None:
        """Returns when all nodes are idle. AssertionError with the logs where they do not get there."""
        self._run("ctld", "slurmctld", "-c", "-D", "-f", str(self.conf))
        for node in self.nodes:
            self._run(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))
        deadline = time.monotonic() + _STARTING
        while self.ask("sinfo", "-h", "-N", "-t", "idle", "-p", "main", "-o", "%N").split() != self.nodes:
            assert time.monotonic() < deadline, f"the cluster does not come up:\n{self.logs()}"
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends all jobs, then the nodes and the controller, then whatever is left of what ran in them."""
        if "ctld" in self._processes:
            self.ask("scancel", "--user=root")
            deadline = time.monotonic() + _STOPPING
            while self.ask("squeue", "-h").strip() and time.monotonic() < deadline:
                time.sleep(0.1)
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf), _MARK: str(self.directory)}

    def ask(self, *command: str) -> str:
        """What one of SLURM's commands prints."""
        done = subprocess.run(command, env=os.environ | self.environment, capture_output=True, text=True, check=False)
        return done.stdout

    def processes(self) -> list[int]:
        """Of steps and jobs: all that runs in the cluster, but for its daemons."""
        mark = f"{_MARK}={self.directory}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                ours = mark in (path / "environ").read_bytes() and int(path.name) != os.getpid()
                name = (path / "comm").read_text().strip()
            except OSError:
                continue
            if ours and name not in ("slurmctld", "slurmscriptd", "slurmd"):
                found.append(int(path.name))
        return found

    def agents(self) -> dict[str, int]:
        """The pids of the library's agents, by node."""
        found = {}
        for pid in self.processes():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"monarch_rdma.job.agent" in command:
                node = next(each for each in variables if each.startswith(b"SLURMD_NODENAME="))
                found[node.partition(b"=")[2].decode()] = pid
        return found

    def daemon_of_step(self, pid: int) -> int:
        """The slurmstepd that this process of a step descends from."""
        while Path(f"/proc/{pid}/comm").read_text().strip() != "slurmstepd":
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return pid

    def kill_node(self, node: str) -> None:
        """The node's daemon, at once; the controller finds out in its own time."""
        self._processes[node].kill()
        self._processes[node].wait()

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-800:]}" for path in sorted(self.directory.glob("*.log")))

    def _run(self, name: str, *command: str) -> None:
        with open(self.directory / f"{name}.out", "wb") as out:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def _write(self, cpus: int, gpus: int) -> None:
        host, here = socket.gethostname().partition(".")[0], self.directory
        first, *ports = free_ports(len(self.nodes) + 1)
        for part in ("state", *(f"spool-{node}" for node in self.nodes)):
            (here / part).mkdir()
        for number in range(gpus):
            os.mknod(here / f"gpu{number}", 0o20600, os.makedev(1, 3))
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={first}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/none",
            "CredType=cred/none",
            f"StateSaveLocation={here}/state",
            f"SlurmdSpoolDir={here}/spool-%n",
            f"SlurmctldPidFile={here}/ctld.pid",
            f"SlurmdPidFile={here}/%n.pid",
            f"SlurmctldLogFile={here}/ctld.log",
            f"SlurmdLogFile={here}/%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "JobCompType=jobcomp/none",
            "MpiDefault=none",
            "SwitchType=switch/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SlurmdParameters=config_overrides",
            "ReturnToService=2",
            "InactiveLimit=0",
            "KillWait=5",
            "MinJobAge=300",
            "SlurmctldTimeout=30",
            "SlurmdTimeout=10",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=bf_interval=5,sched_interval=2",
            "GresTypes=gpu",
        ]
        for node, port in zip(self.nodes, ports, strict=True):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
                f"Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=64000 Gres=gpu:{gpus}"
            )
        lines += [
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO",
            f"PartitionName=short Nodes={self.nodes[0]} MaxTime=1 State=UP OverSubscribe=NO",
        ]
        self.conf.write_text("\n".join(lines) + "\n")
        (here / "gres.conf").write_text(
            "".join(
                f"NodeName={node} Name=gpu Flags=nvidia_gpu_env,amd_gpu_env File={here}/gpu[0-{gpus - 1}]\n"
                for node in self.nodes
            )
        )
        (here / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n"
        )


def _install() -> None:
    if os.geteuid() != 0:
        raise Unavailable("a private SLURM needs root: its daemons run jobs as their users")
    if not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "setpriv"))):
        done = subprocess.run(
            [ROOT / ".ci/system_packages.sh", "jobs"], capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode:
            raise Unavailable(f"SLURM cannot be installed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
