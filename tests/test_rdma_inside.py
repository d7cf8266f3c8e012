"""Tests that run in the machine: those of tests/rdma_vm/guest, an item here for each function there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from rdma_vm.image import ROOT, Image
from rdma_vm.inside import LIMIT, Cases, fail_as_inside, run_inside
from rdma_vm.machine import Machine, empty_folder

GUEST = ROOT / "tests/rdma_vm/guest"
pytestmark = pytest.mark.timeout(LIMIT + 100)


def functions() -> list[str]:
    return [
        f"{file.name}::{node.name}"
        for file in sorted(GUEST.glob("test_*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


@pytest.fixture(scope="module")
def machine(rdma_image: Image) -> Iterator[Machine]:
    with Machine(rdma_image, empty_folder(ROOT / "build/rdma_vm/inside"), limit=LIMIT + 50) as booted:
        yield booted


@pytest.fixture(scope="module")
def cases(machine: Machine, request: pytest.FixtureRequest) -> Cases:
    """Of the functions in guest/ that are wanted, which are run together."""
    wanted = [
        f"{GUEST}/{item.callspec.params['function']}"
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_inside
    ]
    return run_inside(machine, "guest.xml", *wanted)


@pytest.mark.parametrize("function", functions())
def test_inside(cases: Cases, function: str) -> None:
    assert cases[function], f"{function} did not run; see build/rdma_vm/inside"
    fail_as_inside(cases[function])
    skipped = [case.find("skipped") for case in cases[function]]
    if all(why is not None for why in skipped):
        pytest.skip(f"in the machine: {skipped[0].attrib['message']}")
