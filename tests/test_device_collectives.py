"""Collectives of tensors on GPUs: real processes, whose emulated kernels meet in memory of the fake GPU runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from collective_programs import DTYPES, OPS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from members import Members, members

pytestmark = pytest.mark.timeout(300)  # the first test compiles the kernels
# Little room and a low limit, so that small tensors go in parts, and by both ways.
ENVIRONMENT = {
    "FAKE_GPU_TOUCHABLE": "1",
    "MONARCH_RDMA_COLLECTIVE_DEVICE_BYTES": "2048",
    "MONARCH_RDMA_COLLECTIVE_ONE_SHOT_BYTES": "512",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Members]:
    with members(
        3, environment=ENVIRONMENT, setup="from device_programs import *", heartbeat_interval=0.1
    ) as processes:
        yield processes


@pytest.fixture
def formed(pool: Members) -> Iterator[Members]:
    """A group of three, of which nothing is left open when it is closed."""
    pool.replace_ended()
    pool.form()
    yield pool
    alive = [rank for rank, child in enumerate(pool.children) if child.process.poll() is None]
    pool.run("group.close()", alive)
    pool.run("wait_until_none_is('opened')", alive)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(OPS),
    count=st.one_of(st.integers(0, 40), st.integers(0, 1500)),
    seed=st.integers(0, 1000),
    root=st.integers(0, 2),
    offset=st.sampled_from([0, 0, 1, 3]),
)
def test_every_collective(
    formed: Members, dtype: torch.dtype, op: str, count: int, seed: int, root: int, offset: int
) -> None:
    names = {"dtype": dtype, "op": op, "count": count, "seed": seed, "root": root, "offset": offset}
    formed.run("check(group, dtype, count, op, seed, root, offset)", **names)


def test_members_that_do_not_call_the_same(formed: Members) -> None:
    for call in (
        "group.all_reduce(on_gpu(torch.ones(100 + rank // 2)))",
        "group.all_reduce(on_gpu(torch.ones(8)), op='sum' if rank < 2 else 'max')",
        "group.all_reduce(on_gpu(torch.ones(8, dtype=torch.int32 if rank == 2 else torch.float32)))",
    ):
        for kind, message, _ in formed.run(f"result = attempt(lambda: {call})"):
            assert kind == "ConfigError" and "but rank 2 all_reduce" in message
    formed.run("check(group, torch.float32, 300, 'sum', 1, 0, 0)")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("group.all_reduce(on_gpu(torch.ones(4, 4)).t())", "not contiguous"),
        ("group.all_gather([on_gpu(torch.ones(4))] * 3, on_gpu(torch.ones(5)))", "must be alike"),
        ("group.all_gather([torch.ones(4)] * 3, on_gpu(torch.ones(4)))", "must be alike"),
        ("group.all_to_all([on_gpu(torch.ones(4))] * 3, [on_gpu(torch.ones(4))] * 3)", "backend='nccl'"),
        ("group.send(on_gpu(torch.ones(4)), 1)", "pass tensor.cpu()"),
    ],
)
def test_what_is_refused_changes_nothing(formed: Members, wrong: str, says: str) -> None:
    for kind, message, _ in formed.run(f"result = attempt(lambda: {wrong})"):
        assert kind == "ConfigError" and says in message, message
    formed.run("check(group, torch.float16, 20, 'sum', 1, 0, 0)")


def test_a_member_that_dies_while_kernels_wait_for_it(formed: Members) -> None:
    """Their waits end with one error that names it, and the survivors go on without it."""
    formed.run("check(group, torch.float32, 300, 'sum', 1, 0, 0)")
    formed.start("next_kernel['die'] = 1; group.all_reduce(on_gpu(torch.ones(300)))", [1])
    formed.start("result = attempt(lambda: group.all_reduce(on_gpu(torch.ones(300))))", [0, 2])
    for kind, message, _ in formed.finish([0, 2]):
        assert kind == "PeerLost" and "rank 1" in message, (kind, message)
    formed.run(
        "smaller = group.shrink(timeout=30); group.close(); group = smaller; rank, size = group.rank, group.size",
        [0, 2],
    )
    formed.run("check(group, torch.float32, 700, 'sum', 1, 0, 0)", [0, 2])


def test_kernels_that_do_not_end_in_time(formed: Members) -> None:
    """The deadline ends the waits; which member tells the others first does not matter."""
    formed.run("group.barrier(); next_kernel['sleep'] = 4.0 if rank == 1 else 0.0")
    formed.run("group.all_reduce(on_gpu(torch.ones(0)))")  # they have met, and nothing was launched
    results = formed.run("result = attempt(lambda: group.all_reduce(on_gpu(torch.ones(30)), timeout=1.0))")
    assert {kind for kind, _, _ in results} <= {"TransferTimeout", "Cancelled"}
    assert "TransferTimeout" in {kind for kind, _, _ in results}
    for kind, _, _ in formed.run("result = attempt(lambda: group.all_reduce(torch.ones(3)))"):
        assert kind == "Cancelled"  # the group has failed


def test_a_member_that_does_not_come(formed: Members) -> None:
    results = formed.run("result = attempt(lambda: group.all_reduce(on_gpu(torch.ones(30)), timeout=1.0))", [0, 2])
    assert {kind for kind, _, _ in results} <= {"TransferTimeout", "Cancelled"}
    assert any("rank 1" in message for kind, message, _ in results if kind == "TransferTimeout")


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        ("fail('IpcGetMemHandle', 801, 1)", "the memory of rank 1"),
        ("fail('IpcOpenMemHandle', 801, 1)", "rank 1: the memory of rank 0"),
        ("fail('Malloc', 2, 1)", "rank 1: "),
        ("import monarch_rdma.collectives.device as d; kept, d.native = d.native, lambda name, device: None",
         "rank 1: the package was built without kernels for its GPU"),
    ],
)  # fmt: skip
def test_a_member_that_cannot_take_part(formed: Members, break_it: str, says: str) -> None:
    """All members say why, and by what else; host memory goes on as before."""
    formed.run("tensor, kept = on_gpu(torch.ones(30)), None")
    formed.run(break_it, [1])
    for _ in range(2):  # once found out, it stays
        for kind, message, _ in formed.run("result = attempt(lambda: group.all_reduce(tensor))"):
            assert kind == "ConfigError" and says in message and "backend='nccl'" in message, message
    formed.run("if kept: d.native = kept", [1])
    formed.run("host = torch.ones(4); group.all_reduce(host); assert host.tolist() == [3.0] * 4")


@pytest.mark.parametrize("backend", ["cpu:monarch_rdma", "cuda:monarch_rdma"])
def test_through_torch_distributed(pool: Members, backend: str) -> None:
    pool.replace_ended()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, child in enumerate(pool.children):
        child.start("through_torch(backend, port, rank, 3)", backend=backend, port=store.port, rank=rank)
    pool.finish()
