"""Tests that run in the machine: those of tests/rdma_vm/guest, an item here for each function there, and the lanes'."""

from __future__ import annotations

import ast
import shlex
from collections import defaultdict
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
from rdma_vm.image import ROOT, Image
from rdma_vm.machine import Machine, empty_folder

GUEST = ROOT / "tests/rdma_vm/guest"
LIMIT = 600  # seconds
pytestmark = pytest.mark.timeout(2 * LIMIT + 100)


def functions() -> list[str]:
    return [
        f"{file.name}::{node.name}"
        for file in sorted(GUEST.glob("test_*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


Cases = dict[str, list[ElementTree.Element]]


@pytest.fixture(scope="module")
def machine(rdma_image: Image) -> Iterator[Machine]:
    with Machine(rdma_image, empty_folder(ROOT / "build/rdma_vm/inside"), limit=2 * LIMIT) as booted:
        yield booted


def run_inside(machine: Machine, report: str, *arguments: str) -> Cases:
    """JUnit's elements by file and function."""
    ended = machine.run(f"python -m pytest -q --junitxml=/results/{report} {shlex.join(arguments)}", LIMIT)
    file = machine.results / report
    assert file.exists(), ended.output
    found = defaultdict(list)
    for case in ElementTree.parse(file).iter("testcase"):
        module = case.attrib["classname"].rpartition(".")[2]
        found[f"{module}.py::{case.attrib['name'].partition('[')[0]}"].append(case)
    return found


@pytest.fixture(scope="module")
def cases(machine: Machine, request: pytest.FixtureRequest) -> Cases:
    """Of the functions in guest/ that are wanted, which are run together."""
    wanted = [
        f"{GUEST}/{item.callspec.params['function']}"
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_inside
    ]
    return run_inside(machine, "guest.xml", *wanted)


def fail_as_inside(cases: list[ElementTree.Element]) -> None:
    troubles = [
        f"{case.attrib['name']}: {trouble.text or trouble.attrib['message']}"
        for case in cases
        for trouble in (*case.iter("failure"), *case.iter("error"))
    ]
    if troubles:
        pytest.fail("in the machine:\n" + "\n".join(troubles), pytrace=False)


@pytest.mark.parametrize("function", functions())
def test_inside(cases: Cases, function: str) -> None:
    assert cases[function], f"{function} did not run; see build/rdma_vm/inside"
    fail_as_inside(cases[function])
    skipped = [case.find("skipped") for case in cases[function]]
    if all(why is not None for why in skipped):
        pytest.skip(f"in the machine: {skipped[0].attrib['message']}")


def test_what_every_lane_must_do_on_verbs(machine: Machine) -> None:
    """The suite of tests/test_lanes.py with its tensors, but for what moves gigabytes or takes 64 processes."""
    wanted = "verbs and not 4_gib and not 64_peers"
    cases = run_inside(machine, "lanes.xml", "--confcutdir=tests", "--timeout=200", "tests/test_lanes.py", "-k", wanted)
    assert len(cases) >= 20
    fail_as_inside([case for some in cases.values() for case in some])
