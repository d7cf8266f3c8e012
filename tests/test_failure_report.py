"""What a failure says: the signal, what the kernel knows, the last lines, when it was noticed and who was told."""

from __future__ import annotations

import os
import pickle
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from actor_client import LIMIT, Faults
from supervised import Worker, kill

from monarch_rdma.actor import Actor, HostMesh, MeshFailure, SupervisionError, endpoint
from monarch_rdma.actor.launch import post_mortem


class Crasher(Actor):
    @endpoint
    def abort(self, has_core: bool) -> None:
        size = resource.RLIM_INFINITY if has_core else 0
        resource.setrlimit(resource.RLIMIT_CORE, (size, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.abort()

    @endpoint
    def fail(self) -> None:
        raise LookupError("unheard")


def test_a_kill_by_somebody_else(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs() as procs:
        worker = procs.spawn("worker", Worker)
        pid = kill(worker)
        failure = faults.next()
        assert (failure.signal, failure.exit_code) == ("SIGKILL", -signal.SIGKILL)
        assert "somebody did" in failure.hint
        assert f"pid {pid}" in failure.report() and failure.hint in failure.report()
        noticed, told = failure.timeline
        assert "agent of its host" in noticed[1] and "owner" in told[1] and noticed[0] <= told[0]


@pytest.mark.parametrize("has_core", [True, False])
def test_a_crash_says_where_in_python_it_was(client: HostMesh, faults: Faults, tmp_path: Path, has_core: bool) -> None:
    with client.spawn_procs(cwd=str(tmp_path)) as procs:
        with pytest.raises(SupervisionError):
            procs.spawn("crasher", Crasher).abort.call_one(has_core).get(LIMIT)
        failure = faults.next()
        assert failure.signal == "SIGABRT"
        assert any("test_failure_report.py" in line and "in abort" in line for line in failure.lines)
        can_dump = resource.getrlimit(resource.RLIMIT_CORE)[1] != 0
        assert ("core file" in failure.hint) == (has_core and can_dump)
        for core in tmp_path.iterdir():  # large
            core.unlink()


def test_a_kill_for_want_of_memory(client: HostMesh, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"vmstat": "pgfault 1\noom_kill 3\n", "group": "low 0\noom 2\noom_kill 2\n"}
    monkeypatch.setattr(post_mortem, "_texts", lambda: iter(counters.values()))
    assert post_mortem.oom_kills() == 5
    with client.spawn_procs() as procs:
        worker = procs.spawn("worker", Worker)
        worker.pid.call_one().get(LIMIT)
        counters["group"] = "low 0\noom 3\noom_kill 3\n"
        kill(worker)
        failure = faults.next()
        assert "for want of memory" in failure.hint and "1 times" in failure.hint


def test_the_counters_of_this_kernel_can_be_read() -> None:
    assert post_mortem.oom_kills() >= 0
    assert any("oom_kill" in text for text in post_mortem._texts())


def test_an_actor_has_its_traceback_and_no_hint(client: HostMesh, faults: Faults) -> None:
    with client.spawn_procs() as procs:
        procs.spawn("crasher", Crasher).fail.broadcast()
        failure = faults.next()
        assert "in fail" in failure.message and "LookupError: unheard" in failure.message
        assert (failure.hint, failure.signal) == ("", None)
        assert "noticed in its process" in failure.timeline[0][1]


def test_what_was_done_about_each_cause(client: HostMesh, faults: Faults) -> None:
    procs = client.spawn_procs(restart="always", max_restarts=1, within=600.0)
    worker = procs.spawn("worker", Worker)
    kill(worker)
    kill(worker)
    failure = faults.next()
    assert any("given up" in what for _, what in failure.timeline)
    first, second = failure.causes
    said = [what for _, what in first.timeline]
    assert [any(word in what for what in said) for word in ("noticed", "told", "restart 1", "up again")] == [True] * 4
    assert all("restart" not in what for _, what in second.timeline)
    report = failure.report()
    assert report.count("because of:") == 2 and report.count("killed by SIGKILL") >= 2
    procs.stop().get(LIMIT)


def test_a_stopped_process_is_killed_and_the_report_says_why(client: HostMesh, faults: Faults) -> None:
    from monarch_rdma import config

    config.configure(heartbeat_interval=0.2, heartbeat_timeout=1.0)
    with client.spawn_procs() as procs:
        worker = procs.spawn("worker", Worker)
        os.kill(worker.pid.call_one().get(LIMIT), signal.SIGSTOP)
        failure = faults.next()
        assert "could not be reached any more" in failure.message and failure.hint == ""


def test_failures_travel_and_read_well() -> None:
    cause = MeshFailure("low", "process", "it ended", 1, -9, ("last",), hint="why").noted("noticed")
    failure: Any = MeshFailure("high", "actor", "it failed", causes=(cause,)).noted("told")
    assert pickle.loads(pickle.dumps(failure)) == failure
    lines = failure.report().splitlines()
    assert lines[0] == "actor failure in mesh 'high': it failed"
    assert lines.index("because of:") == 3 and lines[4].startswith("    process failure in mesh 'low', rank 1")
    assert MeshFailure("m", "process", "", exit_code=-200).signal == "signal 200"
