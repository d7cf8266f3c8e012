"""Whole programs that use most of the API: they print the same here as with Monarch, and end by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from knocks import without_knocks

PROGRAMS = Path(__file__).parent / "actor_programs"


@pytest.mark.parametrize("expected", sorted((PROGRAMS / "expected").glob("*.txt")), ids=lambda path: path.stem)
def test_a_program_prints_what_it_should(expected: Path) -> None:
    if "torch" in (program := PROGRAMS / f"{expected.stem}.py").read_text():
        pytest.importorskip("torch")
    command = [sys.executable, "-W", "error::ResourceWarning", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == expected.read_text().splitlines()
    assert (without_knocks(done.stderr), done.returncode) == ("", 0)


REPL = """
from monarch_rdma.actor import Actor, endpoint, this_host
class Adder(Actor):
    def __init__(self, start):
        self.start = start
    @endpoint
    def add(self, x):
        return helper(self.start, x)

def helper(a, b):
    return a + b

procs = this_host().spawn_procs({"gpus": 2})
adders = procs.spawn("adders", Adder, 10)
print("first", adders.add.call(1).get().values())
adders.slice(gpus=0).add.call_one("x").get()
print("goes on", adders.add.call(2).get().values())
class Adder(Actor):
    @endpoint
    def add(self, x):
        return -x

print("defined anew", procs.spawn("anew", Adder).add.call(1).get().values())
"""
RUNNING_LOOP = """
from monarch_rdma.actor import Actor, endpoint, this_host
class Adder(Actor):
    @endpoint
    async def add(self, x):
        return x + 1

adders = this_host().spawn_procs({"gpus": 2}).spawn("adders", Adder)
print("awaited", (await adders.add.call(1)).values(), [await each for each in adders.add.stream(2)])
"""


def test_a_repl_is_a_client() -> None:
    """Its classes and functions have no file; an error leaves it usable; a class may be defined anew."""
    done = subprocess.run([sys.executable, "-i", "-q"], input=REPL, capture_output=True, text=True, timeout=60)
    assert [line for line in done.stdout.splitlines() if line] == [
        "first [11, 11]",
        "goes on [12, 12]",
        "defined anew [-1, -1]",
    ]
    assert "TypeError: unsupported operand" in done.stderr and done.returncode == 0


def test_a_repl_with_a_running_loop_is_a_client() -> None:
    """As a notebook has: `await` at the top level."""
    command = [sys.executable, "-m", "asyncio"]
    done = subprocess.run(command, input=RUNNING_LOOP, capture_output=True, text=True, timeout=60)
    assert "awaited [2, 2] [3, 3]" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr and done.returncode == 0
