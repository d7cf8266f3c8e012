"""Engines in this process, and owners in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import hypothesis
import pytest
import slurm_cluster
from actor_client import Faults, client_of_its_own, faults_recorded
from child import Child, maker_of_children
from hosts.network import Host, Network, network_of
from rdma_vm.image import Image, Unavailable, prepare

from monarch_rdma import config
from monarch_rdma.actor import HostMesh, ProcMesh
from monarch_rdma.rdma import Engine, Secret

# A case, and making it up, may take long where others use the processors: pytest's time limit is enough.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")

# A shell's background jobs ignore Ctrl-C, and with them all programs that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def untouched_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Options that a test sets end with it; those of the environment are not seen."""
    for variable in [name for name in os.environ if name.startswith("MONARCH_RDMA_") and "_TEST_" not in name]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr("monarch_rdma.rdma.secret._from_fd", None)
    config.clear_runtime_config()
    yield
    config.clear_runtime_config()


@pytest.fixture
def secret() -> Secret:
    return Secret.generate()


@pytest.fixture
def owner(secret: Secret) -> Iterator[Engine]:
    """The engine that has the memory."""
    with Engine(secret=secret, name="owner") as engine:
        yield engine


@pytest.fixture
def reader(secret: Secret) -> Iterator[Engine]:
    """Another engine of the same job, in the same process."""
    with Engine(secret=secret, name="reader") as engine:
        yield engine


@pytest.fixture
def child_process(secret: Secret) -> Iterator[Callable[..., Child]]:
    """Makes owners in processes of their own; they end with the test."""
    with maker_of_children(secret) as make:
        yield make


@pytest.fixture
def make_network() -> Iterator[Callable[[int], Network]]:
    """Makes networks of so many hosts on this machine; they end with the test. See tests/hosts/network.py."""
    with ExitStack() as networks:
        yield lambda count: networks.enter_context(network_of(count))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    """A SLURM of several nodes on this host. See tests/slurm_cluster.py."""
    try:
        cluster = slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm"))
    except slurm_cluster.Unavailable as why:
        pytest.skip(str(why))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
    assert cluster.processes() == []


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two hosts for all tests of a module."""
    with network_of(2) as network:
        yield network


@pytest.fixture
def hosts(network: Network) -> Iterator[tuple[Host, Host]]:
    """Both, and their cables as new again afterwards."""
    yield (network.hosts[0], network.hosts[1])
    network.shape()
    for host in network.hosts:
        host.mend()


@pytest.fixture
def gpus_left_clean() -> Iterator[None]:
    """The fake GPU runtime is in this process from now on; what the test uses of it is given back."""
    from gpu_owners import nothing_left

    with nothing_left():
        yield


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest) -> Iterator[HostMesh]:
    """This process as the client of a module's actors; when they are done, nothing of it may be left.

    Its processes import torch beforehand only if the module uses it, whatever other modules have imported: this takes
    longer than most modules' tests.
    """
    with pytest.MonkeyPatch.context() as patch, client_of_its_own() as host:
        if not hasattr(request.module, "torch"):
            patch.setattr("monarch_rdma.actor.hosting.spawning._PRELOAD_WITH_TORCH", ())
        yield host


@pytest.fixture
def faults(client: HostMesh) -> Iterator[Faults]:
    """Failures that reach the client in this test. Those that it does not take from here fail it."""
    with faults_recorded() as recorded:
        yield recorded


@pytest.fixture(scope="module")
def procs(client: HostMesh) -> ProcMesh:
    """Two processes, `gpus` 0 and 1."""
    return client.spawn_procs({"gpus": 2})


@pytest.fixture(scope="session")
def rdma_image() -> Image:
    """What the virtual machines of the RDMA tests boot; made the first time, which takes a minute."""
    try:
        return prepare()
    except Unavailable as why:
        pytest.skip(str(why))
