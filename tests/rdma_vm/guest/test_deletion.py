"""A card that is taken out while it is in use. Here nobody else may have it open: so it is not in test_lane.py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from child import Child
from rails import sent_packets, until

from monarch_rdma import config
from monarch_rdma.rdma import Engine, RDMABuffer, Secret

if "verbs" not in config.LANES:
    pytest.skip("this version has no verbs lane", allow_module_level=True)

SIZE = 8 << 20
CONTENT = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]


def test_a_device_that_is_deleted_under_traffic_and_made_again(
    secret: Secret, child_process: Callable[..., Child], whole_machine: Callable[[str], str]
) -> None:
    """Soft-RoCE's deletion waits until nobody has the device open: engines let go of it, and open the new one."""
    owner = child_process(name="owner", lanes="verbs,tcp")
    with Engine(secret=secret, name="reader", lanes="verbs,tcp") as reader:
        blob = owner.run(
            "data = bytearray(content); result = RDMABuffer(data, engine=engine).to_bytes()", content=CONTENT
        )
        buffer = RDMABuffer.from_bytes(blob, engine=reader)

        def read_by_verbs() -> bool:
            got = bytearray(SIZE)
            future = buffer.read_into(got)
            future.get(60)
            assert got == CONTENT
            return future.explain().lane == "verbs"

        until(read_by_verbs)
        got = bytearray(SIZE)
        future = buffer.read_into(got)
        with subprocess.Popen(["rdma", "link", "delete", "rxe0"]) as deletion:
            for _ in range(3):
                future.get(60)
                assert got == CONTENT
                got = bytearray(SIZE)
                future = buffer.read_into(got)
            future.get(60)
            assert deletion.wait(60) == 0
        until(read_by_verbs)  # over the other one
        whole_machine("rdma link add rxe0 type rxe netdev rail0")

        def uses_it() -> bool:
            before = sent_packets(0)
            return read_by_verbs() and sent_packets(0) - before >= 100

        until(uses_it, 60)
