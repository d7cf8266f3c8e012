"""Jobs on Kubernetes: kmock plays the API server, processes of this host the pods; agents and calls are real."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from actor_client import Faults, faults_recorded, traces, wait_until
from programs import LIMIT

from monarch_rdma import config
from monarch_rdma.actor import Actor, SupervisionError, endpoint
from monarch_rdma.actor.runtime.proc import close_current
from monarch_rdma.errors import ConfigError, JobEnded, TransferTimeout
from monarch_rdma.job import command
from monarch_rdma.job.kubernetes import ImageSpec, KubernetesJob
from monarch_rdma.job.kubernetes.cluster import Cluster
from monarch_rdma.rdma import default_engine
from monarch_rdma.supervision.events import Recording
from monarch_rdma.supervision.policy import Backoff

pytest.importorskip("kmock", reason="install extra `test`: kmock, which needs Python 3.11")
pytest.importorskip("kubernetes", reason="install extra `test`: kubernetes")
from fake_cluster import FakeCluster, fake_cluster

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "kubernetes"
IMAGE = ImageSpec("image:1", resources={"amd.com/gpu": 8})
PATIENT: dict[str, Any] = {"restart": "always", "max_restarts": None, "backoff": Backoff(0.2, factor=1.0)}


class Guest(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """This process uses it as `kubectl` would. Nothing may be left of it, nor of what used it."""
    before = traces()
    config.configure(job_dir=str(tmp_path / "jobs"))
    monkeypatch.chdir(tmp_path)
    with fake_cluster(tmp_path) as cluster:
        kubeconfig = cluster.kubeconfig()
        monkeypatch.setenv("KUBECONFIG", kubeconfig)
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", kubeconfig)  # read at import
        yield cluster
    wait_until(lambda: not traces() - before, lambda: f"left behind: {dict(traces() - before)}")


@pytest.fixture
def client(cluster: FakeCluster) -> Iterator[Faults]:
    """This process is the client of a job."""
    with faults_recorded() as faults:
        yield faults
        close_current()
        default_engine().close()


def job_of(count: int = 2, **options: Any) -> KubernetesJob:
    job = KubernetesJob(timeout=LIMIT, **{"name": "exp", **options})
    job.add_mesh("trainers", count, image_spec=IMAGE)
    return job


def waited_in_vain(job: KubernetesJob, why: str) -> str:
    """What a wait for its meshes says, as soon as the cluster has told why."""
    said = ""

    def says_why() -> bool:
        nonlocal said
        with pytest.raises(TransferTimeout) as caught:
            job.state(timeout=2.0)
        said = str(caught.value)
        return why in said

    wait_until(says_why, lambda: said)
    return said


def is_empty(cluster: FakeCluster) -> bool:
    kinds = ("Pod", "Secret", "Service", "StatefulSet", "Job", "PodGroup", "MonarchMesh")
    return not any(cluster.objects(kind) for kind in kinds)


def answers(guests: Any) -> list[int] | None:
    try:
        return list(guests.pid.call().get(LIMIT).values())
    except SupervisionError:
        return None


def test_pods_attach_answer_and_are_given_back(cluster: FakeCluster, client: Faults) -> None:
    job = job_of(workload="indexed_job")
    hosts = job.state().trainers
    assert hosts.sizes == {"hosts": 2}
    assert len(set(hosts.spawn_procs({"gpus": 2}).spawn("guests", Guest).pid.call().get(LIMIT).values())) == 4
    status = job.status()
    assert status.phase == "running" and len(status.hosts) == 2
    job.kill()
    assert is_empty(cluster) and not job.active
    wait_until(lambda: not cluster.pods, "pods are left")


def test_the_command_shows_what_pods_print(
    cluster: FakeCluster, client: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of()
    job.state()
    job.dump("state")
    name = job.facts["name"]
    cluster.server.logs = {f"{name}-trainers-0": "one\ntwo\n", f"{name}-trainers-1": "three"}
    assert command.logs("state", follow=False) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"[{name}-trainers-{line}" for line in ("0] one", "0] two", "1] three")
    ]
    (following,) = job._logs(follow=True)
    assert len(following.read(to_its_end=True)) == 3
    cluster.server.logs[f"{name}-trainers-0"] += "four\n"
    cluster.server.logs[f"{name}-trainers-1"] = ""  # another container took its place
    assert following.read(to_its_end=True) == [f"[{name}-trainers-0] four"]
    job.kill()


def test_a_pod_that_is_replaced_attaches_again(cluster: FakeCluster, client: Faults) -> None:
    cluster.labels_index = False  # as before Kubernetes 1.28
    job = job_of()
    with Recording() as events:
        guests = job.state().trainers.spawn_procs(**PATIENT).spawn("guests", Guest)
        before = answers(guests)
        lost = cluster.objects("Pod")["exp-trainers-1"]["status"]["podIP"]
        cluster.evict("exp-trainers-1")
        events.wait("job.host_lost", LIMIT, mesh="trainers", rank=1)
        wait_until(lambda: answers(guests) not in (None, before), "nothing came back")
        after = answers(guests)
        assert before is not None and after is not None and before[0] == after[0]
        assert cluster.objects("Pod")["exp-trainers-1"]["status"]["podIP"] != lost, "the test wants another address"
        job.kill()
    assert is_empty(cluster)


def test_a_container_that_is_started_again_attaches_again(cluster: FakeCluster, client: Faults) -> None:
    job = KubernetesJob(timeout=LIMIT, workload="monarchmesh")
    job.add_mesh("trainers", 1, image_spec=IMAGE)
    with Recording() as events:
        guests = job.state().trainers.spawn_procs(**PATIENT).spawn("guests", Guest)
        before = answers(guests)
        cluster.pods["trainers-0"].kill()
        wait_until(lambda: answers(guests) not in (None, before), "nothing came back")
        wait_until(lambda: "exit code 137" in job.status().message, "the status does not tell")
        wait_until(lambda: any("exit code 137" in each.fields.get("message", "") for each in events.events), "no event")
        job.kill()


def test_a_job_that_somebody_deletes_has_ended(cluster: FakeCluster, client: Faults) -> None:
    job = job_of(1)
    guests = job.state(cached_path=None).trainers.spawn_procs().spawn("guests", Guest)
    assert answers(guests)
    cluster.delete("StatefulSet", "exp-trainers")
    failures = {failure.kind: failure for failure in (client.next(), client.next())}
    assert failures.keys() == {"process", "job"}
    assert "StatefulSet exp-trainers was deleted" in failures["job"].message
    with pytest.raises(JobEnded, match="was deleted"):
        job.state()
    job.kill()
    assert is_empty(cluster)


def test_a_job_that_others_have_made_is_attached_to_and_left(cluster: FakeCluster, client: Faults) -> None:
    maker = job_of()
    maker.apply()
    job = KubernetesJob(attach_to="exp", timeout=LIMIT)
    job.add_mesh("trainers", 2)
    guests = job.state().trainers.spawn_procs().spawn("guests", Guest)
    assert answers(guests)
    before = {name: process.pid for name, process in cluster.pods.items()}
    job.kill()
    assert {name: process.pid for name, process in cluster.pods.items()} == before
    assert all(process.poll() is None for process in cluster.pods.values())
    maker.kill()
    assert is_empty(cluster)


def test_the_examples_client_runs_on_the_examples_pods(cluster: FakeCluster, tmp_path: Path) -> None:
    maker = KubernetesJob(name="hello")
    maker.add_mesh("trainers", 2, image_spec=IMAGE)
    maker.apply()
    environment = {**os.environ, "PODS": "2", "GPUS": "1", "MONARCH_RDMA_JOB_DIR": str(tmp_path / "client")}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "base" / "client.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert [line.rpartition(": ")[2] for line in ran.stdout.splitlines()] == ["499500", "499501"]
    maker.kill()


# --- what does not come: in the cluster's own words, and what to try


def test_an_image_that_is_not_there(cluster: FakeCluster) -> None:
    message = 'Failed to pull image "image:1": manifest for image:1 not found'
    waiting = {"waiting": {"reason": "ErrImagePull", "message": message}}
    cluster.on_schedule = lambda pod: {"phase": "Pending", "containerStatuses": [{"name": "worker", "state": waiting}]}
    job = job_of()
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        job.state()
    assert "image_pull_secrets" in str(caught.value) and "will never run" in str(caught.value)
    assert not job.active and is_empty(cluster), "what will never run is left"


def test_a_worker_that_ends_at_once(cluster: FakeCluster) -> None:
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    last = {"terminated": {"exitCode": 127, "reason": "Error"}}
    status = {"phase": "Running", "containerStatuses": [{"name": "worker", "state": state, "lastState": last}]}
    cluster.on_schedule = lambda pod: status
    cluster.server.logs["exp-trainers-0"] = "sh: 1: exec: python3: not found\n"
    with pytest.raises(ConfigError, match="exit code 127") as caught:
        job_of(1).state()
    assert "python3: not found" in str(caught.value)


def test_pods_for_which_there_is_no_room(cluster: FakeCluster) -> None:
    message = "0/2 nodes are available: 2 Insufficient amd.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    cluster.on_schedule = lambda pod: {"phase": "Pending", "conditions": [condition]}
    job, told = job_of(), []
    job.on_progress = told.append
    said = waited_in_vain(job, message)
    assert "ask for less" in said and "stays in the queue" in said
    assert message in told[-1].message
    job.kill()
    assert is_empty(cluster)


def test_a_quota_that_is_used_up(cluster: FakeCluster) -> None:
    message = "pods is forbidden: exceeded quota: gpus, requested: amd.com/gpu=8, used: 16, limited: 16"
    cluster.server.refusals["POST", "pods"] = (403, "Forbidden", message)
    cluster.warn("exp-trainers", "FailedCreate", message)
    job = job_of()
    assert "have it raised" in waited_in_vain(job, message)
    job.kill()


def test_a_queue_that_is_full(cluster: FakeCluster) -> None:
    job = job_of(workload="indexed_job", kueue_queue="gpus")
    with pytest.raises(TransferTimeout, match="queue gpus"):
        job.state(timeout=0.3)
    job.kill()
    assert is_empty(cluster)


@pytest.mark.parametrize(
    ("refusal", "advice"),
    [
        ((403, "Forbidden", 'secrets is forbidden: User "me" cannot create resource "secrets"'), "render --rbac"),
        ((401, "Unauthorized", "Unauthorized"), "log in to the cluster again"),
        ((404, "NotFound", 'namespaces "team" not found'), "create the namespace first"),
        ((500, "InternalError", "etcd is tired"), "etcd is tired"),
    ],
)
def test_what_the_api_server_refuses(cluster: FakeCluster, refusal: tuple[int, str, str], advice: str) -> None:
    cluster.server.refusals["POST", "secrets"] = refusal
    job = job_of()
    with pytest.raises(ConfigError, match=re.escape(refusal[2])) as caught:
        job.state()
    assert advice in str(caught.value) and not job.active


@pytest.mark.parametrize(
    ("workload", "plural", "missing"),
    [("monarchmesh", "monarchmeshes", "the Monarch operator"), ("statefulset", "podgroups", "Volcano")],
)
def test_what_is_not_installed_in_the_cluster(cluster: FakeCluster, workload: str, plural: str, missing: str) -> None:
    cluster.server.refusals["POST", plural] = (404, "NotFound", "the server could not find the requested resource")
    with pytest.raises(ConfigError, match=f"is {missing} installed"):
        job_of(workload=workload, volcano_queue="gpus" if missing == "Volcano" else None).state()
    assert is_empty(cluster), "what was made before the refusal is left"


def test_an_api_server_that_hesitates_is_asked_again(cluster: FakeCluster) -> None:
    cluster.on_schedule = lambda pod: {"phase": "Pending"}
    job = job_of()
    job.apply()
    cluster.server.hiccups["GET", "statefulsets"] = 2
    assert job.status().phase == "queued" and not cluster.server.hiccups["GET", "statefulsets"]
    job.kill()


def test_a_name_that_is_taken(cluster: FakeCluster) -> None:
    cluster.on_schedule = lambda pod: {"phase": "Pending"}
    first = job_of()
    first.apply()
    with pytest.raises(ConfigError, match="give this one another name"):
        job_of().apply()
    assert cluster.objects("Secret") and cluster.objects("StatefulSet"), "the other job's objects are gone"
    first.kill()


def test_a_cluster_that_cannot_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.configure(job_dir=str(tmp_path / "jobs"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(ConfigError, match="no access to a Kubernetes cluster.*KUBECONFIG"):
        job_of(kubeconfig=str(tmp_path / "missing")).apply()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"API server {url} does not answer.*refused"):
            job_of(kubeconfig=FakeCluster.write_kubeconfig(tmp_path, url)).apply()
    assert list((tmp_path / "jobs").iterdir()) == [], "a secret is left"


def test_in_a_pod_its_own_account_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kubernetes.config.incluster_config as inside

    for name, text in {"token": "of the pod", "ca.crt": "a certificate", "namespace": "team"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(inside, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(inside, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr("monarch_rdma.job.kubernetes.cluster._NAMESPACE_FILE", str(tmp_path / "namespace"))
    monkeypatch.setattr(
        "kubernetes.client.rest.RESTClientObject.__init__", lambda self, _: setattr(self, "pool_manager", None)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        patch.setenv("KUBERNETES_SERVICE_PORT", "443")
        cluster = Cluster()
    assert (cluster.server, cluster.namespace) == ("https://10.0.0.1:443", "team")
    assert cluster._headers()["authorization"] == "bearer of the pod"


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config.configure(job_dir=str(tmp_path / "jobs"))
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'monarch-rdma[kubernetes]'")):
        job_of().apply()


def test_what_this_job_does_not_do(cluster: FakeCluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runs no client_script"):
        job_of().apply(["python", "client.py"])
    with pytest.raises(ConfigError, match="has no mesh"):
        KubernetesJob().apply()
    found = KubernetesJob()
    found.add_mesh("trainers", 1, "app=mine")
    with pytest.raises(ConfigError, match="secret_file"):
        found.apply()
    stranger = KubernetesJob(attach_to="nobody")
    stranger.add_mesh("trainers", 1)
    with pytest.raises(ConfigError, match="no job 'nobody' to attach to"):
        stranger.apply()
    late = job_of()
    late.apply()
    with pytest.raises(ConfigError, match="comes too late"):
        late.add_mesh("more", 1)
    late.kill()
