"""What the page on healing promises of a GiB on one host: benchmarks/bench_healing.py, for those who have the time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "bench_healing.py"


@pytest.mark.skipif(not LONG, reason="takes a minute and 4 GiB: MONARCH_RDMA_TEST_ROUNDS=long")
@pytest.mark.timeout(600)
def test_a_state_of_a_gib_is_there_in_two_seconds_and_sooner_than_by_torchft(tmp_path: Path) -> None:
    """The copy includes checksums on both sides; TorchFT's transports make none."""
    pytest.importorskip("torchft")
    file = tmp_path / "seconds.json"
    command = [sys.executable, str(BENCHMARK), "--lanes", "shm", "--rounds", "5", "--json", str(file)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=580)
    assert done.returncode == 0, done.stdout
    seconds = {name: statistics.median(each) for name, each in json.loads(file.read_text())["shm"].items()}
    assert seconds["heal"] <= 2.0 and seconds["ours, copied"] <= 2.0, done.stdout
    assert seconds["ours, copied"] < min(seconds["HTTP"], seconds["PG over gloo"]), done.stdout
