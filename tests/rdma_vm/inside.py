"""pytest in the machine: what it says of each function, and failures there as failures here."""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from xml.etree import ElementTree

import pytest

from rdma_vm.machine import Machine

__all__ = ["LIMIT", "Cases", "fail_as_inside", "run_inside"]

LIMIT = 1000  # seconds; reached only where something hangs
Cases = dict[str, list[ElementTree.Element]]


def run_inside(machine: Machine, report: str, *arguments: str) -> Cases:
    """JUnit's elements by file and function."""
    rounds = {"MONARCH_RDMA_TEST_ROUNDS": os.environ.get("MONARCH_RDMA_TEST_ROUNDS", "")}
    ended = machine.run(f"python -m pytest -q --junitxml=/results/{report} {shlex.join(arguments)}", LIMIT, **rounds)
    file = machine.results / report
    assert file.exists(), ended.output
    found = defaultdict(list)
    for case in ElementTree.parse(file).iter("testcase"):
        module = case.attrib["classname"].rpartition(".")[2]
        found[f"{module}.py::{case.attrib['name'].partition('[')[0]}"].append(case)
    return found


def fail_as_inside(cases: list[ElementTree.Element]) -> None:
    troubles = [
        f"{case.attrib['name']}: {trouble.text or trouble.attrib['message']}"
        for case in cases
        for trouble in (*case.iter("failure"), *case.iter("error"))
    ]
    if troubles:
        pytest.fail("in the machine:\n" + "\n".join(troubles), pytrace=False)
