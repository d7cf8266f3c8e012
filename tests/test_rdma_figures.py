"""The verbs lane beside perftest in one machine, which emulates its processors: only ratios mean something.

The figures are left in build/rdma_vm/figures/figures.json. What is asserted here is the order of magnitude: other work
on this host disturbs both sides.
"""

from __future__ import annotations

import json
import os

import pytest
from rdma_vm.image import ROOT, Image
from rdma_vm.machine import Machine, empty_folder

from monarch_rdma import config

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif("verbs" not in config.LANES, reason="this version has no verbs lane"),
]
ROUNDS = 10 if os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long" else 2


def test_the_same_order_of_magnitude_as_perftest(rdma_image: Image) -> None:
    results = empty_folder(ROOT / "build/rdma_vm/figures")
    with Machine(rdma_image, results, limit=1200) as machine:
        said = machine.run(f"python tests/rdma_vm/guest/compare.py rxe0 {ROUNDS} 2> /results/progress", 1100).check()
    (results / "figures.json").write_text(said)
    figures = json.loads(said)
    for name, row in figures.items():
        print(f"{name:26} ours {row['ours']:.4g}  perftest {row['perftest']:.4g}  ratio {row['ratio']:.2f}")
    assert all(row["ratio"] > 0.1 for name, row in figures.items() if name.startswith("bandwidth"))
    assert all(row["ratio"] < 10 for name, row in figures.items() if name.startswith("latency"))
