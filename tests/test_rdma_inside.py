"""The tests of tests/rdma_vm/guest, which run in the machine: one item here for each function there."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rdma_vm.image import ROOT, Image
from rdma_vm.machine import Machine, empty_folder

GUEST = ROOT / "tests/rdma_vm/guest"
LIMIT = 600  # seconds
pytestmark = pytest.mark.timeout(LIMIT + 300)


def functions() -> list[str]:
    return [
        f"{file.name}::{node.name}"
        for file in sorted(GUEST.glob("test_*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


@pytest.fixture(scope="module")
def cases(rdma_image: Image, request: pytest.FixtureRequest) -> dict[str, list[ElementTree.Element]]:
    """JUnit's elements of the functions that are wanted, which were run in one machine."""
    results = empty_folder(ROOT / "build/rdma_vm/inside")
    wanted = [
        f"{GUEST}/{item.callspec.params['function']}"
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_inside
    ]
    with Machine(rdma_image, results, limit=LIMIT + 60) as machine:
        ended = machine.run(f"python -m pytest -q --junitxml=/results/junit.xml {' '.join(wanted)}", LIMIT)
    report = results / "junit.xml"
    assert report.exists(), ended.output
    found = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        file = Path(case.attrib["classname"].replace(".", "/")).name + ".py"
        found[f"{file}::{case.attrib['name'].partition('[')[0]}"].append(case)
    return found


@pytest.mark.parametrize("function", functions())
def test_inside(cases: dict[str, list[ElementTree.Element]], function: str) -> None:
    assert cases[function], f"{function} did not run; see build/rdma_vm/inside"
    troubles = [
        f"{case.attrib['name']}: {trouble.text or trouble.attrib['message']}"
        for case in cases[function]
        for trouble in (*case.iter("failure"), *case.iter("error"))
    ]
    if troubles:
        pytest.fail("in the machine:\n" + "\n".join(troubles), pytrace=False)
    skipped = [case.find("skipped") for case in cases[function]]
    if all(why is not None for why in skipped):
        pytest.skip(f"in the machine: {skipped[0].attrib['message']}")
