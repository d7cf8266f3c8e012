"""Option allow_ptrace, where Yama keeps siblings from each other's memory: this kernel has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from child import Child

from monarch_rdma.rdma import Secret

SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
# Root without the one right that Yama lets pass.
INSIDE = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
READ = """
got = bytearray(8)
future = RDMABuffer.from_bytes(blob, engine=engine).read_into(got)
future.get(20)
report = future.explain()
result = bytes(got), report.lane, report.skipped
"""


@pytest.fixture
def only_descendants() -> Iterator[None]:
    before = SCOPE.read_text()
    SCOPE.write_text("1")
    yield
    SCOPE.write_text(before)


@pytest.mark.parametrize(("allowed", "lane"), [("no", "tcp"), ("job", "shm-process_vm"), ("any", "shm-process_vm")])
def test_siblings_read_each_other_where_they_are_allowed(allowed: str, lane: str, only_descendants: None) -> None:
    secret = Secret.generate()
    lanes = "shm,tcp"
    with (
        Child(secret, inside=INSIDE, lanes=lanes, allow_ptrace=allowed) as owner,
        Child(secret, inside=INSIDE, lanes=lanes) as first,
        Child(secret, inside=INSIDE, lanes=lanes) as second,
    ):
        blob = owner.run("data = bytearray(b'content!'); result = RDMABuffer(data, engine=engine).to_bytes()")
        for reader in (first, second, first):  # one process is named at a time: for two, where they meet in the tree
            got, used, skipped = reader.run(READ, blob=blob)
            assert (got, used) == (b"content!", lane), skipped
            assert ("allow_ptrace" in skipped) is (allowed == "no")
