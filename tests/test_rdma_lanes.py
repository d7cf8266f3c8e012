"""The lanes' conformance suite in a machine with RDMA devices."""

from __future__ import annotations

import pytest
from rdma_vm.image import ROOT, Image
from rdma_vm.inside import LIMIT, fail_as_inside, run_inside
from rdma_vm.machine import Machine, empty_folder


@pytest.mark.timeout(LIMIT + 100)
def test_what_every_lane_must_do_on_verbs(rdma_image: Image) -> None:
    """The suite of tests/test_lanes.py with its tensors, but for what moves gigabytes or takes 64 processes."""
    wanted = "verbs and not 4_gib and not 64_peers"
    arguments = ("--confcutdir=tests", "--timeout=400", "tests/test_lanes.py", "-k", wanted)
    with Machine(rdma_image, empty_folder(ROOT / "build/rdma_vm/lanes"), limit=LIMIT + 50) as machine:
        cases = run_inside(machine, "lanes.xml", *arguments)
    assert len(cases) >= 20
    fail_as_inside([case for some in cases.values() for case in some])
