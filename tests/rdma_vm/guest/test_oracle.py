"""pyverbs, which is not ours, at the other end of our queue pair: it reads and writes our memory, and we its."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyverbs.device", reason="pyverbs of the distribution is for another Python than this one")

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

PROGRAM = Path(os.environ["RDMA_VM_PROGRAMS"]) / "verbs_peer"
GID_INDEX = 1  # RoCE v2, the interface's IPv4 address
SIZE = 1 << 20
ALL = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_ATOMIC


def pattern(begin: int, length: int) -> bytes:
    first = begin % 251
    return (bytes(range(251)) * (length // 251 + 2))[first : first + length]


class Ours:
    """verbs_peer.cc: our end, in a process of its own."""

    def __init__(self, device: str) -> None:
        command = [str(PROGRAM), device, str(GID_INDEX), str(SIZE)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.end: dict[str, Any] = json.loads(self._answer())

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def show(self, offset: int, length: int) -> bytes:
        return bytes.fromhex(self.ask("show", offset, length))

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(20) == 0
        self.process.stdout.close()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


class Theirs:
    """An end made by pyverbs, with memory of its own."""

    def __init__(self, context: Context, access: int = ALL) -> None:
        self.context = context
        self.pd = PD(context)
        self.cq = CQ(context, 16)
        self.mr = MR(self.pd, SIZE, access)
        cap = QPCap(max_send_wr=16, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap), QPAttr())
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = access & ~e.IBV_ACCESS_LOCAL_WRITE
        self.qp.to_init(attr)

    def connect(self, end: dict[str, Any]) -> None:
        gid = ":".join(end["gid"][i : i + 4] for i in range(0, 32, 4))
        route = GlobalRoute(dgid=GID(gid), sgid_index=GID_INDEX)
        attr = QPAttr(port_num=1)
        attr.path_mtu, attr.dest_qp_num = e.IBV_MTU_1024, end["number"]
        attr.rq_psn, attr.sq_psn = end["psn"], 77
        attr.max_dest_rd_atomic = attr.max_rd_atomic = 8
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.qp.to_rts(attr)

    def post(self, opcode: int, offset: int, length: int, end: dict[str, Any], at: int, *atomic: int) -> int:
        """The status of one request between our offset and their `at`."""
        request = SendWR(opcode=opcode, num_sge=1, sg=[SGE(self.mr.buf + offset, length, self.mr.lkey)])
        if atomic:
            request.set_wr_atomic(end["key"], end["address"] + at, *atomic)
        else:
            request.set_wr_rdma(end["key"], end["address"] + at)
        self.qp.post_send(request)
        while True:
            count, completions = self.cq.poll()
            if count:
                return int(completions[0].status)

    def close(self) -> None:
        self.qp.close()
        self.mr.close()
        self.cq.close()
        self.pd.close()


@contextmanager
def connected(device: str, access: int = ALL) -> Iterator[tuple[Ours, Theirs]]:
    with Context(name=device) as context:
        ours, theirs = Ours(device), Theirs(context, access)
        theirs.connect(ours.end)
        gid = context.query_gid(1, GID_INDEX).gid.replace(":", "")
        assert ours.ask("connect", theirs.qp.qp_num, 77, gid, 1024) == "done"
        yield ours, theirs
        theirs.close()
        ours.close()


@pytest.fixture(scope="module", params=["rxe0", "rxe1"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Ours, Theirs]]:
    with connected(request.param) as both:
        yield both


SIZES = [1, 7, 1023, 1024, 1025, 4097, 256 << 10, SIZE - 13]


@pytest.mark.parametrize("size", SIZES)
def test_it_reads_our_memory(ends: tuple[Ours, Theirs], size: int) -> None:
    ours, theirs = ends
    begin = SIZE - size - 3 if size < SIZE - 3 else 5
    theirs.mr.write(b"\xee" * SIZE, SIZE)
    assert theirs.post(e.IBV_WR_RDMA_READ, 11, size, ours.end, begin) == e.IBV_WC_SUCCESS
    assert theirs.mr.read(size, 11) == ours.show(begin, size)
    assert theirs.mr.read(11, 0) == b"\xee" * 11 and theirs.mr.read(1, 11 + size) == b"\xee"


@pytest.mark.parametrize("size", SIZES)
def test_it_writes_our_memory(ends: tuple[Ours, Theirs], size: int) -> None:
    ours, theirs = ends
    ours.ask("fill", 0, SIZE, 0xEE)
    theirs.mr.write(pattern(17, size), size)
    assert theirs.post(e.IBV_WR_RDMA_WRITE, 0, size, ours.end, 9) == e.IBV_WC_SUCCESS
    assert ours.show(0, size + 10) == b"\xee" * 9 + pattern(17, size) + b"\xee"


@pytest.mark.parametrize("size", SIZES)
def test_we_read_its_memory(ends: tuple[Ours, Theirs], size: int) -> None:
    ours, theirs = ends
    ours.ask("fill", 0, SIZE, 0xEE)
    theirs.mr.write(pattern(3, size), size)
    assert ours.ask("read", 9, size, theirs.mr.buf, theirs.mr.rkey) == "done"
    assert ours.show(0, size + 10) == b"\xee" * 9 + pattern(3, size) + b"\xee"


@pytest.mark.parametrize("size", SIZES)
def test_we_write_its_memory(ends: tuple[Ours, Theirs], size: int) -> None:
    ours, theirs = ends
    ours.ask("fill", 0, SIZE, 0xAB)
    theirs.mr.write(b"\xee" * SIZE, SIZE)
    assert ours.ask("write", 1, size, theirs.mr.buf + 11, theirs.mr.rkey) == "done"
    assert theirs.mr.read(size + 12, 0) == b"\xee" * 11 + b"\xab" * size + b"\xee"


def test_atomics_of_both_sides(ends: tuple[Ours, Theirs]) -> None:
    ours, theirs = ends
    ours.ask("fill", 0, 64, 0)
    theirs.mr.write(bytes(64), 64)
    for value in (0, 5):
        assert theirs.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 8, ours.end, 16, 5) == e.IBV_WC_SUCCESS
        assert int.from_bytes(theirs.mr.read(8, 8), "little") == value
        assert ours.ask("fetch_add", 40, theirs.mr.buf + 32, theirs.mr.rkey, 5) == "done"
        assert int.from_bytes(ours.show(40, 8), "little") == value
    assert ours.ask("compare_and_swap", 40, theirs.mr.buf + 32, theirs.mr.rkey, 10, 1 << 40) == "done"
    assert int.from_bytes(theirs.mr.read(8, 32), "little") == 1 << 40
    assert theirs.post(e.IBV_WR_ATOMIC_CMP_AND_SWP, 8, 8, ours.end, 16, 11, 3) == e.IBV_WC_SUCCESS
    assert int.from_bytes(ours.show(16, 8), "little") == 10


@pytest.mark.parametrize("opcode", [e.IBV_WR_RDMA_READ, e.IBV_WR_RDMA_WRITE])
def test_it_gets_nothing_once_our_memory_is_not_registered_any_more(opcode: int) -> None:
    with connected("rxe0") as (ours, theirs):
        before = ours.show(0, 64)
        assert ours.ask("deregister") == "done"
        assert theirs.post(opcode, 0, 64, ours.end, 0) == e.IBV_WC_REM_ACCESS_ERR
        assert ours.show(0, 64) == before


def test_it_gets_nothing_past_the_end_of_our_memory() -> None:
    with connected("rxe0") as (ours, theirs):
        assert theirs.post(e.IBV_WR_RDMA_READ, 0, 64, ours.end, SIZE - 63) == e.IBV_WC_REM_ACCESS_ERR


@pytest.mark.parametrize("verb", ["read", "write"])
def test_we_hear_that_its_memory_is_not_for_us(verb: str) -> None:
    """Memory that it registered for itself only."""
    with connected("rxe0", access=e.IBV_ACCESS_LOCAL_WRITE) as (ours, theirs):
        assert ours.ask(verb, 0, 64, theirs.mr.buf, theirs.mr.rkey) in (
            "failed: remote access error",
            "failed: remote invalid request",
        )
