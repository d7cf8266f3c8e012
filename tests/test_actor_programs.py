"""Whole programs that use most of the API: they print the same here as with Monarch, and end by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "actor_programs"


@pytest.mark.parametrize("expected", sorted((PROGRAMS / "expected").glob("*.txt")), ids=lambda path: path.stem)
def test_a_program_prints_what_it_should(expected: Path) -> None:
    if "torch" in (program := PROGRAMS / f"{expected.stem}.py").read_text():
        pytest.importorskip("torch")
    command = [sys.executable, "-W", "error::ResourceWarning", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == expected.read_text().splitlines()
    assert (done.stderr, done.returncode) == ("", 0)
