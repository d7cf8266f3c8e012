"""What every lane must do (test_lanes.py), on the verbs lane at every size: over a libibverbs whose cards are memory.

tests/fake_verbs stands first where the library is looked for, in processes of their own.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4
from xml.etree import ElementTree

import pytest

from monarch_rdma import config

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif("verbs" not in config.LANES, reason="this version has no verbs lane"),
]


@pytest.fixture(scope="module")
def fake_library() -> Path:
    """Its folder; compiled where it is not there yet."""
    with open(ROOT / "build/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-C", ROOT / "csrc", "--no-print-directory", "fake_verbs"], check=True, timeout=120)
    return ROOT / "build/core/fake_verbs"


def test_on_cards_of_memory(fake_library: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, (str(fake_library), os.environ.get("LD_LIBRARY_PATH"))))
    environment = os.environ | {"LD_LIBRARY_PATH": paths, "FAKE_VERBS_FABRIC": str(uuid4())}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--junitxml={tmp_path}/report.xml", "tests/test_lanes.py", "-k", "verbs"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = list(ElementTree.parse(tmp_path / "report.xml").iter("testcase"))
    assert len(cases) >= 40
    assert not [case.attrib["name"] for case in cases if case.find("skipped") is not None]
