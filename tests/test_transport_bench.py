"""transport_bench: every kind of figure, with every byte that was moved compared; and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monarch_rdma import bench


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([bench.binary(), *arguments], capture_output=True, text=True, timeout=120, check=False)


def figures(*arguments: str) -> list[dict[str, Any]]:
    few = ("--iters", "8", "--rounds", "2")
    done = run("--local", "--json", *few, *arguments)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["figures"]
    return rows


def test_every_lane_and_operation_with_latency_and_bandwidth() -> None:
    rows = figures("--lane", "shm-mapped,shm-process_vm,tcp,local", "--op", "read,write", "--sizes", "8,1M", "--verify")
    kinds = {(row["lane"], row["op"], row["bytes"], row["figure"]) for row in rows}
    assert len(kinds) == len(rows) == 4 * 2 * 2 * 2
    for row in rows:
        if row["figure"] == "latency":
            assert 0 < row["p50"] <= row["p99"] <= row["p999"]
        else:
            assert row["bytes_per_second"] > 0


def test_several_peers_in_both_directions_and_many_in_flight() -> None:
    crowd = ("--peers", "3", "--depth", "4", "--bidirectional", "--measure", "bandwidth", "--verify")
    rows = figures("--lane", "shm-mapped,tcp", "--op", "write", "--sizes", "64K", *crowd)
    assert [(row["peers"], row["depth"], row["bidirectional"]) for row in rows] == [(3, 4, True)] * 2


def test_strided_atomic_and_messages() -> None:
    (strided, _) = figures("--lane", "tcp", "--strided", "16x1K", "--verify")
    assert strided["bytes"] == 16 << 10
    assert "16 single" in strided["against"][0]["name"]
    rows = figures("--lane", "tcp", "--op", "fetch_add,message", "--sizes", "8", "--measure", "latency", "--verify")
    assert {row["op"] for row in rows} == {"fetch_add", "message"}


def test_the_mapped_view_stands_beside_the_checked_read() -> None:
    rows = figures("--lane", "shm-mapped", "--mapped-view", "--sizes", "8,1M", "--verify")
    assert [row["bytes"] for row in rows] == [8, 8, 1 << 20, 1 << 20]
    for row in rows:
        (view,) = row["against"]
        assert view["name"] == "mapped view"
        assert view.get("seconds", 0) > 0 or view["bytes_per_second"] > 0


def test_a_client_measures_against_a_server_in_another_process(tmp_path: Path) -> None:
    secret = ("--secret-file", str(tmp_path / "secret"))
    command = [bench.binary(), "--listen", "127.0.0.1", *secret]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(word for word in server.stdout.readline().split() if "://" in word)
            few = ("--lane", "tcp", "--sizes", "64K", "--iters", "8", "--rounds", "2", "--verify", "--json")
            done = run("--connect", address, *secret, *few)
            assert done.returncode == 0, done.stderr
            assert [row["bytes"] for row in json.loads(done.stdout)["figures"]] == [64 << 10] * 2
            stranger = tmp_path / "another secret"
            stranger.write_bytes(bytes(32))
            stranger.chmod(0o600)
            refused = run("--connect", address, "--secret-file", str(stranger), *few)
            assert (refused.returncode, refused.stdout) == (1, "")
        finally:
            server.terminate()


def test_what_idle_engines_and_a_moving_buffer_take() -> None:
    done = run("--local", "--json", "--idle", "0.2")
    assert done.returncode == 0, done.stderr
    assert "cpu_seconds" in done.stdout
    done = run("--local", "--json", "--memory", "--lane", "tcp", "--sizes", "64M")
    assert done.returncode == 0, done.stderr
    assert "64" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--local", "--mapped-view"], "--mapped-view goes with --lane shm-mapped, --op read and --sizes"),
        (["--local", "--mapped-view", "--lane", "shm-mapped", "--op", "write"], "--mapped-view goes with"),
        (["--local", "--sizes", "8X"], "'8X'"),
        ([], "give one of --local, --listen and --connect"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(arguments: list[str], why: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


def test_figures_that_cannot_be_written_are_a_failure() -> None:
    with open("/dev/full", "w") as full:
        command = [bench.binary(), "--local", "--lane", "tcp", "--sizes", "8", "--iters", "8", "--rounds", "1"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "transport_bench: the figures cannot be written\n")
