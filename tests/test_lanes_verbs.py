"""What every lane must do (test_lanes.py), on the verbs lane at every size: over a libibverbs whose cards are memory.

tests/fake_verbs stands first where the library is looked for, in processes of their own.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4
from xml.etree import ElementTree

import pytest
from child import Child
from knocks import without_knocks

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


@pytest.fixture
def environment(fake_library: Path) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(fake_library), os.environ.get("LD_LIBRARY_PATH"))))
    return {**os.environ, "LD_LIBRARY_PATH": paths, "FAKE_VERBS_FABRIC": str(uuid4())}


def test_on_cards_of_memory(environment: dict[str, str], tmp_path: Path) -> None:
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


def test_the_end_of_a_killed_owner_is_told_though_cards_try_for_ever(
    environment: dict[str, str], child_process: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the cards nor the heartbeat end what is on its way: the control stream does."""
    for name in ("LD_LIBRARY_PATH", "FAKE_VERBS_FABRIC"):
        monkeypatch.setenv(name, environment[name])
    owner = child_process(lanes="verbs")
    reader = child_process(lanes="verbs", verbs_retries=7, verbs_rnr_retries=7, verbs_timeout=0, heartbeat_timeout=600)
    handle = owner.run("data = bytearray(1 << 20); result = RDMABuffer(data, engine=engine).to_bytes()")
    reader.run("remote = RDMABuffer.from_bytes(handle, engine=engine); remote[:8].read_into(bytearray(8)).get(60)",
               handle=handle)  # fmt: skip
    owner.stop()
    reader.run(
        """
        large, small = bytearray(1 << 20), bytearray(8)
        futures = [remote.read_into(large), remote[:8].read_into(small), remote.write_from(bytes(1 << 20))]
        result = [future.done() for future in futures]
        """
    )
    owner.signal(signal.SIGKILL)
    errors = reader.run("result = [(type(e).__name__, str(e)) for e in (f.exception(120) for f in futures)]")
    assert [kind for kind, _ in errors] == ["PeerLost"] * 3
    assert all("has ended" in text or "it ended" in text for _, text in errors), errors


PROGRAM = """
from monarch_rdma.rdma import Engine, RDMABuffer, Secret
secret = Secret.generate()
owner, reader = (Engine(secret=secret, name=name, lanes="verbs") for name in ("owner", "reader"))
data, got = bytearray(b"word" * 50000), bytearray(200000)
RDMABuffer.from_bytes(RDMABuffer(data, engine=owner).to_bytes(), engine=reader).read_into(got).get(30)
print(got == data, flush=True)
"""


@pytest.mark.parametrize("held", ["destroy_qp", "dereg_mr"])
def test_a_program_ends_though_the_kernel_holds_calls(environment: dict[str, str], held: str) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=environment | {"FAKE_VERBS_HOLD": held},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout, without_knocks(done.stderr)) == (0, "True\n", "")
    assert time.monotonic() - began < 40  # both engines close, one after the other
