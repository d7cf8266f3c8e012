"""The final loss of a training under faults beside that of trainings without, of five seeds: a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from monarch_rdma.ft import History, Measured, Struck

LONG = os.environ.get("MONARCH_RDMA_TEST_ROUNDS") == "long"
ROOT = Path(__file__).resolve().parent.parent
KINDS = 5


@pytest.mark.skipif(not LONG, reason="takes ten minutes: MONARCH_RDMA_TEST_ROUNDS=long")
@pytest.mark.timeout(1000)
def test_faults_change_the_final_loss_by_no_more_than_another_seed(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "examples.llama_diloco.seeds", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900)
    assert done.returncode == 0, done.stdout
    assert done.stdout.index("Tolerance, from here on fixed") < done.stdout.index("FAULT")
    tolerance, faulted = (json.loads((tmp_path / name).read_text()) for name in ("tolerance.json", "faulted.json"))
    assert len(tolerance["losses"]) == 5 and tolerance["low"] <= faulted["loss"] <= tolerance["high"]
    assert faulted["faults"] >= 20 and len(faulted["kinds"]) >= KINDS, faulted
    assert faulted["steps"] >= tolerance["steps"]


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.llama_diloco import seeds

    return seeds


@pytest.mark.parametrize(("loss", "faults", "code"), [(2.9, 20, 0), (3.3, 20, 1), (2.7, 20, 1), (3.0, 0, 1)])
def test_what_is_within_the_tolerance(
    seeds: ModuleType, loss: float, faults: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the disk before the run under faults begins. That of 2.9, 3.0 and 3.1 is 2.8 to 3.2."""

    def played(setting: Any, rounds: int, title: str, fault_every: float | None) -> History:
        if fault_every is None:
            assert not (tmp_path / "tolerance.json").exists()
            return History([Measured(0.0, 0, 1, 1, "held out", 2.9 + setting.model_seed / 10)])
        fixed = json.loads((tmp_path / "tolerance.json").read_text())
        assert (fixed["low"], fixed["high"]) == pytest.approx((2.8, 3.2))
        struck = [Struck(0.0, 0, f"kind {number % KINDS}", "trainers0/0") for number in range(faults)]
        return History([Measured(0.0, 0, 1, 1, "held out", loss)], struck)

    monkeypatch.setattr(seeds, "run", played)
    assert seeds.compare(seeds.Setting(output=tmp_path), rounds=3, seeds=3) == code
