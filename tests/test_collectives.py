"""Groups of processes: right results for every dtype, size and way; one error that names the rank when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from collective_programs import ALGORITHMS, DTYPES, OPS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from members import ChildError, Members, members

from monarch_rdma import config, errors
from monarch_rdma.collectives import Group, measure, table
from monarch_rdma.collectives.algorithms import chooser
from monarch_rdma.collectives.meeting import MemberLost, meet
from monarch_rdma.rdma import Engine, Secret
from monarch_rdma.rdma import group as core

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
ROUNDS = 300 if LONG else 5
EXAMPLES = 300 if LONG else 12

# Small steps, so that small tensors already take many of them; and the two ways that bytes can go.
SMALL_STEPS = {"MONARCH_RDMA_COLLECTIVE_STEP_BYTES": "512", "MONARCH_RDMA_COLLECTIVE_MESSAGE_BYTES": "256"}
WAYS = ["shm,verbs,tcp", "tcp"]
FLOAT32, FP8 = 5, 9  # numbers of dtypes
HEARTBEATS = {"heartbeat_interval": 0.1, "heartbeat_timeout": 3.0}


@pytest.fixture(scope="module", params=WAYS, ids=lambda lanes: lanes.split(",")[0])
def pool(request: pytest.FixtureRequest) -> Iterator[Members]:
    with members(3, environment=SMALL_STEPS, lanes=request.param, **HEARTBEATS) as processes:
        yield processes


@pytest.fixture
def processes(pool: Members) -> Members:
    """Three of them, as yet without a group."""
    pool.replace_ended()
    return pool


@pytest.fixture
def formed(processes: Members) -> Members:
    processes.form()
    return processes


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(OPS),
    count=st.one_of(st.integers(0, 40), st.integers(0, 3000)),
    seed=st.integers(0, 1000),
    root=st.integers(0, 2),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_every_collective(
    formed: Members, dtype: torch.dtype, op: str, count: int, seed: int, root: int, algorithm: str | None
) -> None:
    formed.run(
        "check(group, dtype, count, op, seed, root, algorithm=algorithm)",
        dtype=dtype, op=op, count=count, seed=seed, root=root, algorithm=algorithm,
    )  # fmt: skip


def test_every_dtype_by_every_algorithm(formed: Members) -> None:
    formed.run(
        """
        for number, algorithm in enumerate(ALGORITHMS[2:]):
            for dtype in DTYPES:
                check(group, dtype, 501 + number, OPS[number], number, number % size, algorithm=algorithm)
        """
    )


def test_large_tensors(formed: Members) -> None:
    formed.run("check(group, torch.bfloat16, 100_001, 'sum', 1, 0)")


def test_tensors_that_others_can_map_are_read_in_place(processes: Members, request: pytest.FixtureRequest) -> None:
    """Of a MiB and more; the second one past the caches."""
    processes.run("from monarch_rdma import config; config.configure(collective_step_bytes=1 << 16)")
    request.addfinalizer(lambda: processes.run("config.configure(collective_step_bytes=512)"))
    processes.form()
    counted = "result = engine.counters().get('collectives_in_place', 0)"
    before = processes.run(counted)
    processes.run("check(group, torch.float32, 300_001, 'sum', 1, 2, in_place=True)")
    processes.run("check(group, torch.int64, 800_001, 'max', 2, 0, in_place=True)")
    used = [b - a for a, b in zip(before, processes.run(counted), strict=True)]
    is_mapped = processes.run("result = group.core.is_on_this_host((rank + 1) % size, 10)")[0]
    assert all(used) if is_mapped else not any(used)


def test_messages(formed: Members) -> None:
    results = formed.run(
        """
        to, sender = (rank + 1) % size, (rank - 1) % size
        for tag in (1, 2, 3):
            group.send(torch.full((tag * 7,), rank * 10 + tag), to, tag=tag)
        got = []
        for tag in (3, 1, 2):
            tensor = torch.empty(tag * 7, dtype=torch.int64)
            assert group.receive(tensor, sender if tag < 3 else None, tag=tag) == sender
            got.append(tensor.unique().tolist())
        result = got
        """
    )
    size = len(formed.children)
    for rank, got in enumerate(results):
        sender = (rank - 1) % size
        assert got == [[sender * 10 + tag] for tag in (3, 1, 2)]


def test_what_does_not_fit_is_told_before_anything_happens(formed: Members) -> None:
    formed.run(
        """
        for call in (
            lambda: group.all_reduce(torch.ones(3), op="xor"),
            lambda: group.all_reduce(torch.ones(4, 4)[:, 1]),
            lambda: group.all_reduce(torch.ones(3, dtype=torch.int32), op="avg"),
            lambda: group.all_reduce(torch.ones(3, dtype=torch.complex64)),
            lambda: group.broadcast(torch.ones(3), size),
            lambda: group.all_gather([torch.ones(3)] * (size + 1), torch.ones(3)),
            lambda: group.all_gather([torch.ones(4)] * size, torch.ones(3)),
            lambda: group.send(torch.ones(1), rank),
            lambda: group.all_reduce(torch.ones(1), timeout=-1),
            lambda: group.all_reduce(torch.ones(1), algorithm="tree"),
            lambda: group.barrier(algorithm="fast"),
        ):
            assert attempt(call)[0] == "ConfigError", attempt(call)
        assert group.failed_rank is None
        group.barrier()
        """
    )


# --- forming


def test_a_group_of_one() -> None:
    with Engine(secret=Secret.generate()) as engine, Group.form([engine.address], engine=engine) as group:
        tensor = torch.arange(3.0)
        group.all_reduce(tensor, op="avg")
        group.all_gather([tensor], tensor)
        group.barrier()
        assert tensor.tolist() == [0, 1, 2]


def test_who_does_not_come_is_named() -> None:
    secret = Secret.generate()
    with Engine(secret=secret) as engine, Engine(secret=secret) as other:
        with pytest.raises(errors.TransferTimeout, match="rank 1"):
            Group.form([engine.address, other.address], engine=engine, timeout=0.2)
        with pytest.raises(errors.ConfigError, match="this engine's address"):
            Group.form([other.address], engine=engine)
        with pytest.raises(errors.ConfigError, match="twice"):
            Group.form([engine.address] * 2, engine=engine)
        address = other.address
        other.close()
        with pytest.raises(errors.PeerLost, match="rank 1"):
            Group.form([engine.address, address], engine=engine, timeout=20)


def test_several_groups_at_a_time(processes: Members) -> None:
    processes.form()
    processes.run("whole = group")
    processes.form([0, 2])
    processes.start("tensor = torch.ones(1); whole.all_reduce(tensor); result = tensor.item()", [1])
    results = processes.run(
        """
        tensor = torch.tensor([float(whole.rank)])
        group.all_reduce(tensor)
        whole.all_reduce(tensor)
        result = tensor.item()
        """,
        [0, 2],
    )
    assert results == [5.0, 5.0] and processes.finish([1]) == [5.0]


def test_compressed_sums_lose_nothing_in_the_long_run(formed: Members) -> None:
    """Each is right to a few 256ths of its block's largest; what is lost is made up for by the next ones."""
    results = formed.run(
        """
        from monarch_rdma.collectives.compressed import CompressedAllReduce
        count, rounds, result = 5000 + 7, 40, []
        wanted = sum(torch.sin(torch.arange(count) * (1.0 + each)) for each in range(size)) / size
        mine = torch.sin(torch.arange(count) * (1.0 + rank))
        for dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
            reduction, total = CompressedAllReduce(group, count, dtype=dtype), torch.zeros(count)
            first = None
            for _ in range(rounds):
                tensor = mine.clone()
                reduction.run(tensor, op="avg")
                first = tensor if first is None else first
                total += tensor
            one, all_of_them = (first - wanted).abs().max(), (total / rounds - wanted).abs().max()
            result.append((dtype, float(one), float(all_of_them), tensor.view(torch.uint8).sum().item()))
        try:
            reduction.run(torch.ones(3))
        except errors.ConfigError as error:
            result.append(str(error))
        """
    )
    assert all(each == results[0] for each in results)  # the same bits everywhere
    limits = {"int8": 0.02, "float8_e4m3fn": 0.15, "float8_e5m2": 0.3}
    for dtype, one, all_of_them, _ in results[0][:3]:
        assert 0 < one < limits[dtype] and all_of_them < one / 5, (dtype, one, all_of_them)
    assert results[0][3].startswith("tensor has 3 elements, but must have 5007")


def test_the_table_is_read_by_size(tmp_path: Path) -> None:
    across = {"all_reduce": ((0, "doubling"), (1 << 20, "ring")), "barrier": ((0, "doubling"),)}
    rows = [table.Row(2, 4096, 0), table.Row(8, 1 << 20, 1 << 16, across)]
    table.save(rows, tmp_path / "table.json")
    with config.configured(collective_table=str(tmp_path / "table.json")):
        assert [table.row_for(size).step_bytes for size in (1, 2, 7, 8, 100)] == [4096, 4096, 4096, 1 << 20, 1 << 20]
        with config.configured(collective_step_bytes=512):
            assert table.row_for(9) == table.Row(9, 512, 1 << 16, across)
        choose = chooser(9, is_spread=True)
        assert choose is not None
        taken = [choose(core.ALL_REDUCE, size, FLOAT32) for size in (0, 8, (1 << 20) - 1, 1 << 20, 1 << 30)]
        assert taken == [core.ALGORITHMS[name] for name in ("doubling",) * 3 + ("ring",) * 2]
        assert choose(core.ALL_REDUCE, 8, FP8) == choose(core.BROADCAST, 8, 0) == core.ALGORITHMS["direct"]
        with config.configured(collective_algorithm="tree"):
            choose = chooser(9, is_spread=False)
            assert choose is not None and choose(core.BROADCAST, 8, 0) == core.ALGORITHMS["tree"]
            assert choose(core.ALL_REDUCE, 8, FLOAT32) == core.ALGORITHMS["direct"]
        assert chooser(9, is_spread=False) is None
    assert table.row_for(2).step_bytes == table.BUILT_IN[0].step_bytes


def test_the_table_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    command = [sys.executable, "-m", "monarch_rdma.cli", "bench", "--collectives", "--processes", "2"]
    said = subprocess.run(
        [*command, "--mib", "1", "--rounds", "1", "--save", str(path)], check=True, capture_output=True, text=True
    ).stdout
    assert said.count("<- best") == 1 and str(path) in said
    assert all(f"\n  {kind} " in said for kind in table.KINDS) and "ring " in said
    assert [row.size for row in table.load(path)] == [2]


def test_the_table_is_measured_by_those_whom_torchrun_starts(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    what = ["-m", "monarch_rdma.collectives.measure", "--mib", "1", "--rounds", "1", "--save", str(path)]
    said = subprocess.run([*command, *what], check=True, capture_output=True, text=True).stdout
    assert said.count("2 members on hosts of their own") == 1 and said.count("written") == 1
    assert [row.size for row in table.load(path)] == [2]


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--processes", "0", "'0' is not a number from 2 to 64"),
        ("--processes", "2,x", "'x' is not a number from 2 to 64"),
        ("--processes", "2000", "'2000' is not a number from 2 to 64"),
        ("--mib", "0", "'0' is not a number from 1 to 4096"),
        ("--rounds", "0", "'0' is not a number from 1 to 10000"),
        ("--save", "/nowhere/table", "'/nowhere/table' cannot be written"),
        ("--save", "/", "'/' cannot be written"),
    ],
)
def test_what_is_not_measured(option: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure.main([option, value])
    assert f"argument {option}: {problem}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 1, "groups": []}',
        '{"version": 2, "groups": [{"size": 2, "step_bytes": 1}]}',
        '{"version": 2, "groups": [{"size": 2, "step_bytes": 64, "two_level_bytes": 0, "across": {"sum": []}}]}',
        '{"version": 2, "groups": [{"size": 2, "step_bytes": 64, "two_level_bytes": 0, "across":'
        ' {"barrier": [[0, "ring"]]}}]}',
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "table.json").write_text(content)
    with config.configured(collective_table=str(tmp_path / "table.json")), pytest.raises(errors.ConfigError) as refused:
        table.row_for(2)
    assert "table.json" in str(refused.value)


@pytest.mark.parametrize("other", [{"collective_step_bytes": 1024}, {"collective_algorithm": "ring"}], ids=str)
def test_members_with_other_options_are_told_so(processes: Members, other: dict[str, int | str]) -> None:
    processes.run("from monarch_rdma import config; config.configure(**other)", [1], other=other)
    addresses = [child.address for child in processes.children[:2]]
    results = processes.run(
        "result = attempt(lambda: Group.form(members, engine=engine, timeout=20))", [0, 1], members=addresses
    )
    processes.run("config.configure(collective_step_bytes=512, collective_algorithm='auto')", [1])
    # Who is first to look says what is wrong; the other one has not found it any more.
    told = dict((kind, message) for kind, message, _ in results)
    assert "the same on all members" in told["ConfigError"], results


# --- failure

# What the others gave before they gave up may still be enough for one barrier, if the news is slower.
LATE = "result = attempt(group.barrier)[0] or attempt(group.barrier)[0]"


def test_a_killed_member_is_named_by_all_and_the_others_go_on(processes: Members) -> None:
    processes.form()
    processes.start("result = attempt(lambda: group.all_reduce(torch.ones(1000)))", [0, 2])
    processes.children[1].kill()
    for kind, message, _ in processes.finish([0, 2]):
        # Its connection told it, and not heartbeats after 3 s.
        assert kind == "PeerLost" and "rank 1" in message and "no sign of life" not in message, message
    results = processes.run(
        """
        group = group.shrink(timeout=30)
        check(group, torch.float32, 5000, "sum", 3, 1)
        result = group.rank, group.size
        """,
        [0, 2],
    )
    assert results == [(0, 2), (1, 2)]


def test_a_stopped_member_is_given_up(processes: Members, request: pytest.FixtureRequest) -> None:
    processes.form()
    stopped = processes.children[2]
    stopped.stop()
    request.addfinalizer(lambda: stopped.signal(signal.SIGCONT))
    results = processes.run("result = attempt(group.barrier)", [0, 1])
    for kind, message, seconds in results:
        assert kind == "PeerLost" and "rank 2" in message and seconds < 30
    assert any("no sign of life" in message for _, message, _ in results), results  # the other one may hear of it
    processes.run("group = group.shrink(timeout=30); check(group, torch.int32, 100, 'max', 1, 0)", [0, 1])
    stopped.signal(signal.SIGCONT)
    # It learns that the others have given it up, or lost it.
    assert processes.run(LATE, [2]) == ["PeerLost"]


def test_a_late_member_is_named_at_the_deadline(processes: Members) -> None:
    processes.form([0, 1])
    kind, message, seconds = processes.run("result = attempt(lambda: group.barrier(timeout=0.2))", [0])[0]
    assert kind == "TransferTimeout" and "rank 1" in message and 0.15 < seconds < 30
    assert processes.run(LATE, [1]) == ["TransferTimeout"]
    # Nobody is lost: both go on.
    assert processes.run("group = group.shrink(timeout=30); group.barrier(); result = group.size", [0, 1]) == [2, 2]


def test_what_a_member_has_given_stays_when_it_leaves(processes: Members) -> None:
    processes.form()
    processes.run(
        """
        group.broadcast(torch.full((100,), 7.0), 2)
        group.send(torch.full((200,), 8.0), 0, tag=5)
        group.close()
        """,
        [2],
    )
    processes.run(
        """
        tensor = torch.empty(100)
        group.broadcast(tensor, 2)
        assert tensor.eq(7).all()
        if rank == 0:
            message = torch.empty(200)
            assert group.receive(message, 2, tag=5) == 2 and message.eq(8).all()
        """,
        [0, 1],
    )
    # Only what needs more of it fails, at once.
    for call in ("group.receive(torch.empty(1), 2)", "group.send(torch.empty(1), 2)"):
        for kind, message, seconds in processes.run(f"result = attempt(lambda: {call})", [0, 1]):
            assert kind == "PeerLost" and "rank 2" in message and "has left" in message and seconds < 30
    to_each_other = """
        if rank == 0:
            group.send(torch.ones(1000), 1)
        else:
            assert group.receive(torch.empty(1000)) == 0
    """
    processes.run(to_each_other, [0, 1])
    processes.run("for each in range(9): group.broadcast(torch.ones(100), 0)", [0, 1])
    assert processes.run("result = group.failed_rank", [0, 1]) == [None, None]
    for kind, message, seconds in processes.run("result = attempt(group.barrier)", [0, 1]):
        assert kind == "PeerLost" and "rank 2" in message and "has left" in message and seconds < 30
    processes.run(to_each_other, [0, 1])
    assert processes.run("result = group.failed_rank", [0, 1]) == [2, 2]
    assert processes.run("result = group.shrink(timeout=30).size", [0, 1]) == [2, 2]


def test_who_waits_for_a_member_that_leaves_is_told(processes: Members) -> None:
    processes.form()
    processes.start("result = attempt(lambda: group.all_reduce(torch.ones(1000), timeout=300))", [0, 1])
    processes.run("group.close()", [2])
    for kind, message, seconds in processes.finish([0, 1]):
        assert kind == "PeerLost" and "rank 2" in message and seconds < 60


def test_ctrl_c_ends_a_wait(processes: Members) -> None:
    processes.form([0, 1])
    interrupted = processes.run(
        """
        import signal, threading
        signal.signal(signal.SIGINT, signal.default_int_handler)
        begin, result = time.monotonic(), None
        try:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
            group.barrier(timeout=60)
        except KeyboardInterrupt:
            result = time.monotonic() - begin
        """,
        [0],
    )
    assert interrupted[0] < 30
    assert processes.run(LATE, [1]) == ["Cancelled"]


def test_different_calls_are_told_on_both_sides(processes: Members) -> None:
    processes.form()
    results = processes.run("result = attempt(lambda: group.all_reduce(torch.ones(3 + rank)))")
    assert {kind for kind, _, _ in results} == {"ConfigError"}
    processes.form(name="again")
    results = processes.run(
        "result = attempt(lambda: group.all_reduce(torch.ones(3), algorithm=('doubling', 'ring', 'direct')[rank]))"
    )
    assert {kind for kind, _, _ in results} == {"ConfigError"}
    assert any("algorithm" in message for _, message, _ in results), results


def test_a_group_grows(processes: Members) -> None:
    processes.form([0, 1])
    addresses = [child.address for child in processes.children]
    processes.start("group = group.grow([newcomer], timeout=60); rank = group.rank", [0, 1], newcomer=addresses[2])
    processes.run("group = Group.form(members, engine=engine, timeout=60)", [2], members=addresses)
    processes.finish([0, 1])
    processes.run("check(group, torch.float32, 1000, 'sum', 1, 2)")


def test_each_epoch_of_a_membership_has_its_group(processes: Members) -> None:
    addresses = [child.address for child in processes.children]
    form = """
        from monarch_rdma.supervision.membership import Epoch, EpochId, MemberId
        members = tuple(MemberId(f"trainer {each}", 1) for each in range(len(addresses)))
        with Group.of_epoch(Epoch(EpochId(1, number), members, tuple(addresses)), engine=engine, timeout=60) as group:
            check(group, torch.float32, 1000, "sum", 1, 0)
            result = group.rank, group.size
    """
    assert processes.run(form, number=1, addresses=addresses) == [(0, 3), (1, 3), (2, 3)]
    assert processes.run(form, [2, 0], number=2, addresses=[addresses[2], addresses[0]]) == [(0, 2), (1, 2)]


def test_killed_or_stopped_at_random_moments_in_all_collectives(processes: Members) -> None:
    """Right results until then; then one error that names the rank, and the survivors go on. Nothing is left behind."""
    for round_number in range(ROUNDS):
        processes.replace_ended()
        processes.form()
        victim = round_number % 3
        survivors = [rank for rank in range(3) if rank != victim]
        before = processes.run("result = len(__import__('os').listdir('/proc/self/fd'))", survivors)
        processes.start("result = hammer(group, seed)", seed=round_number)
        time.sleep(0.02 + 0.05 * (round_number % 5))  # any moment is right
        child = processes.children[victim]
        child.stop() if round_number % 5 == 4 else child.kill()
        for kind, message, rank in processes.finish(survivors):
            assert (kind, rank) == ("PeerLost", victim), message
        child.kill()
        processes.run(
            """
            smaller = group.shrink(timeout=60)
            check(smaller, torch.float32, 1000, "avg", 1, 0)
            smaller.close()
            """,
            survivors,
        )
        after = processes.run("result = len(__import__('os').listdir('/proc/self/fd'))", survivors)
        assert all(b <= a + 8 for a, b in zip(before, after, strict=True)), (before, after)


def test_ended_members_leave_a_usable_error(processes: Members) -> None:
    processes.form()
    processes.children[0].close()
    processes.children[2].close()
    with pytest.raises(ChildError, match="PeerLost"):
        processes.run("group.barrier()", [1])


def test_who_waits_for_a_late_member_learns_that_another_is_lost(secret: Secret) -> None:
    """It may be the reason why the late one comes to another group."""
    with Engine(secret=secret) as here, Engine(secret=secret) as late:
        with Engine(secret=secret) as lost:
            members = [here.address, late.address, lost.address]
        with pytest.raises(MemberLost, match="rank 2 was lost") as caught:
            meet(here, members, "a group", 30)
        assert caught.value.rank == 2
