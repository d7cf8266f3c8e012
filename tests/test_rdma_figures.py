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
ROUNDS = 10 if os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long" else 1


def table(figures: dict[str, dict[str, float]]) -> str:
    lines = [f"{'':26} {'ours':>10} {'other':>10}      {'ratio':>6}  goal"]
    for name, row in figures.items():
        is_latency = name.startswith("latency")
        factor, unit = (1e6, "us") if is_latency else (1e-6, "MB/s")
        met = row["ratio"] <= row["goal"] if is_latency else row["ratio"] >= row["goal"]
        goal = f"{'<=' if is_latency else '>='} {row['goal']:.2f} {'met' if met else 'MISSED'} ({unit})"
        lines.append(
            f"{name:26} {row['ours'] * factor:10.2f} {row['other'] * factor:10.2f} {row['ratio']:6.2f}  {goal}"
        )
    return "\n".join(lines)


def test_the_same_order_of_magnitude_as_perftest(rdma_image: Image) -> None:
    """And as one rail, with two. `-s` shows the table."""
    results = empty_folder(ROOT / "build/rdma_vm/figures")
    with Machine(rdma_image, results, limit=1200) as machine:
        said = machine.run(f"python tests/rdma_vm/guest/compare.py rxe0 {ROUNDS} 2> /results/progress", 1100).check()
    (results / "figures.json").write_text(said)
    figures = json.loads(said)
    print("\n" + table(figures))
    assert all(row["ratio"] < 10 if name.startswith("latency") else row["ratio"] > 0.1 for name, row in figures.items())
