"""Modules of tests/ that do not need torch, here too; and a machine that each test leaves as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from child import Child, maker_of_children
from rails import BOTH, present, until

from monarch_rdma import config
from monarch_rdma.rdma import Engine, Secret


def shell(command: str) -> str:
    """Its output. CalledProcessError where it fails."""
    return subprocess.run(["bash", "-ec", command], check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture
def whole_machine() -> Iterator[Callable[[str], str]]:
    """Runs shell commands; both rails and their devices are there again after the test."""
    yield shell
    for rail in (0, 1):
        link = f"rdma link show rxe{rail}/1 || rdma link add rxe{rail} type rxe netdev rail{rail}"
        shell(f"ip link set rail{rail} up; {link}")
    until(lambda: present() == BOTH)


@pytest.fixture(autouse=True)
def own_options() -> Iterator[None]:
    yield
    config.clear_runtime_config()


@pytest.fixture(scope="module")
def secret() -> Secret:
    return Secret.generate()


@pytest.fixture
def child_process(secret: Secret) -> Iterator[Callable[..., Child]]:
    """Makes owners in processes of their own; they end with the test."""
    with maker_of_children(secret) as make:
        yield make


@pytest.fixture(scope="module")
def owner(secret: Secret) -> Iterator[Child]:
    """One owner for a module's tests: a process takes ten seconds to start here."""
    with Child(secret, name="owner", lanes="verbs") as child:
        yield child


@pytest.fixture(scope="module")
def reader(secret: Secret) -> Iterator[Engine]:
    with Engine(secret=secret, name="reader", lanes="verbs") as engine:
        yield engine
