"""Programs that a launcher starts once for each rank, and torch.distributed inside actors."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from actor_client import wait_until
from programs import LIMIT, TESTS, Program
from spmd_programs import HOLDERS, TOGETHER, WORLD, lines_of

from monarch_rdma.actor import Actor, HostMesh, endpoint
from monarch_rdma.errors import ConfigError
from monarch_rdma.job import SPMDActor, setup_torch_elastic_env, setup_torch_elastic_env_async
from monarch_rdma.job.spmd.variables import rank_from
from monarch_rdma.job.spmd.world import _extent


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts one rank as a launcher would. `rest`: what it does when it knows the others."""
    programs: list[Program] = []

    def start(number: int, size: int, rest: str = "hear()", **env: str) -> Program:
        variables = {"RANK": str(number), "WORLD_SIZE": str(size), "MASTER_ADDR": "here", "MASTER_PORT": "29555"}
        programs.append(Program(WORLD + rest, MONARCH_RDMA_JOB_DIR=str(tmp_path), **variables, **env))
        return programs[-1]

    yield start
    for each in programs:
        each.close()


def test_ranks_are_a_mesh_with_actors_buffers_and_hosts(rank: Callable[..., Program], tmp_path: Path) -> None:
    ranks = [rank(number, 3, HOLDERS + "hear()") for number in range(3)]
    lines = [each.line() for each in ranks]
    assert lines == [f"rank {number} 3 {number} 3 {{'hosts': 1, 'gpus': 3}} torchrun" for number in range(3)]
    assert ranks[0].line() == "sums 0 4 8 3 True 1"
    (meeting,) = tmp_path.iterdir()
    assert meeting.name == "spmd-here-29555" and (meeting / "secret").stat().st_mode & 0o777 == 0o600
    for each in reversed(ranks):
        each.tell()
        assert each.wait() == 0, each.errors
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_run_has_left_is_not_taken_for_this_one(rank: Callable[..., Program], tmp_path: Path) -> None:
    old = tmp_path / "spmd-here-29555"
    old.mkdir(mode=0o700)
    (old / "secret").write_bytes(b"x" * 32)
    (old / "secret").chmod(0o600)
    for name in ("hello.0", "hello.1", "here.1"):
        (old / name).write_text(json.dumps({"word": "old", "facts": {"address": "old", "host": "old"}}))
    (old / "roll").write_text(json.dumps({"words": {"1": "old"}}))
    (old / "table").write_text(json.dumps({"words": ["old", "old"], "facts": [{}, {}]}))
    first = rank(0, 2)
    wait_until(
        lambda: (old / "roll").exists() and "word" in json.loads((old / "roll").read_text()), "rank 0 does not begin"
    )
    second = rank(1, 2)  # rank 0 has heard the old words meanwhile
    assert first.line().startswith("rank 0 2") and second.line().startswith("rank 1 2")


def test_ranks_that_do_not_come_are_named(rank: Callable[..., Program]) -> None:
    alone = rank(0, 3, PATIENCE="0.5")
    assert alone.wait() == 1
    assert "rank 0 of 3: ranks [1, 2] have not come within 0.5 s" in alone.errors and "option job_dir" in alone.errors
    lost = rank(2, 3, PATIENCE="0.5")
    assert lost.wait() == 1
    assert "rank 2 of 3: rank 0 has not called us within 0.5 s" in lost.errors


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        WORLD + HOLDERS + "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={**os.environ, "MONARCH_RDMA_JOB_DIR": str(tmp_path / "jobs"), "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "sums 0 4 2 True 1" in done.stdout and "rank 1 2 1 2 {'hosts': 1, 'gpus': 2} torchrun" in done.stdout


MPI = {
    "Open MPI": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "PMI": ["mpiexec.hydra", "-n", "2"],  # MPICH's, and Intel's
}


@pytest.mark.parametrize("launcher", MPI)
def test_mpi_also_of_two_programs_at_once(launcher: str, tmp_path: Path) -> None:
    if not all(map(shutil.which, [command[0] for command in MPI.values()])):
        done = subprocess.run([TESTS.parent / ".ci/system_packages.sh", "jobs"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"there is no MPI, and none can be installed: {done.stderr.strip()[-200:]}")
    script = tmp_path / "script.py"
    script.write_text(WORLD + HOLDERS + TOGETHER)
    environment = {**os.environ, "MONARCH_RDMA_JOB_DIR": str(tmp_path / "jobs"), "PYTHONPATH": str(TESTS.parent)}
    command, pipe = [*MPI[launcher], sys.executable, str(script)], subprocess.PIPE
    running = [
        subprocess.Popen([*command, tmp_path / name], env=environment, stdout=pipe, stderr=pipe, text=True)
        for name in ("first", "second")
    ]
    for each in running:
        out, errors = each.communicate(timeout=100)
        assert each.returncode == 0, errors
        assert sorted(out.splitlines()) == lines_of(2, "{'hosts': 1, 'gpus': 2}", launcher)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "9", "MASTER_ADDR": "a b"}, (1, 4, "a_b", "torchrun")),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, (2, 3, "7-0", "SLURM")),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "x@1"},
            (0, 2, "x_1", "Open MPI"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 1, "run", "PMI")),
    ],
)
def test_launchers(variables: dict[str, str], found: tuple[int, int, str, str]) -> None:
    rank = rank_from(variables)
    assert (rank.rank, rank.size, rank.run, rank.launcher) == found


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "not started by a launcher that is known here: there is neither of RANK and WORLD_SIZE .torchrun."),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4, but must be below WORLD_SIZE, which is 4"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK is 'x', but must be a number"),
    ],
)
def test_launchers_that_say_what_cannot_be(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        rank_from(variables)


def test_the_shape_follows_the_hosts() -> None:
    assert dict(_extent(["a", "a", "b", "b"])) == {"hosts": 2, "gpus": 2}
    assert dict(_extent(["a", "b", "a", "b"])) == {"ranks": 4}
    assert dict(_extent(["a", "a", "b"])) == {"ranks": 3}


# --- torch.distributed inside actors


class Reducer(Actor):
    @endpoint
    def total(self) -> float:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return float(tensor.item())

    @endpoint
    def variables(self) -> dict[str, str]:
        names = [
            "RANK",
            "LOCAL_RANK",
            "GROUP_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "GROUP_WORLD_SIZE",
            "ROLE_RANK",
            "ROLE_NAME",
        ]
        return {name: os.environ[name] for name in names}


def test_plain_torch_distributed_runs_in_actors(client: HostMesh) -> None:
    procs = client.spawn_procs({"gpus": 2})
    setup_torch_elastic_env(procs, master_addr="127.0.0.1", master_port=None, use_ipaddr="ipv4")
    reducers = procs.spawn("reducers", Reducer)
    assert reducers.total.call().get(60).values() == [3.0, 3.0]
    assert reducers.slice(gpus=1).variables.call_one().get(LIMIT) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_NAME": "rank",
    }
    asyncio.run(setup_torch_elastic_env_async(procs, "localhost", 29999))
    assert reducers.slice(gpus=0).variables.call_one().get(LIMIT)["RANK"] == "0"
    procs.stop().get()


def test_a_script_and_a_module_run_as_main(client: HostMesh, tmp_path: Path) -> None:
    procs = client.spawn_procs({"gpus": 2})
    actors = procs.spawn("spmd", SPMDActor)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "assert __name__ == '__main__'\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['MASTER_PORT'])\n"
    )
    assert actors.main.call("localhost", 1234, [str(script), str(tmp_path)]).get(LIMIT).values() == [True, True]
    assert [(tmp_path / name).read_text() for name in "01"] == ["1234", "1234"]
    one = actors.slice(gpus=0)
    assert one.main.call_one("localhost", 1, ["-m", "this"]).get(LIMIT)
    assert one.run_command.call_one("sh", ["-c", 'test "$WHAT" = here'], {"WHAT": "here"}).get(LIMIT)
    for wrong, problem in ([], "must begin with a script"), (["-m"], "must begin with a script"):
        assert problem in str(one.main.call_one("localhost", 1, wrong).exception())
    assert "use_ipaddr is 'ipx'" in str(one.get_host_port.call_one("ipx").exception())
    host, port = one.get_host_port.call_one().get(LIMIT)
    assert host == os.uname().nodename and 0 < port < 65536
    procs.stop().get()
