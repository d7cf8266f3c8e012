"""What a job asks of Kubernetes: manifests that its own schemas accept, and what pods are read as."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from monarch_rdma import cli
from monarch_rdma.errors import ConfigError
from monarch_rdma.job.kubernetes import ImageSpec, KubernetesJob
from monarch_rdma.job.kubernetes.manifests import manifests, secret_manifest
from monarch_rdma.job.kubernetes.pods import ailment_of, current, event_ailments, history_of, ordinal_of
from monarch_rdma.job.kubernetes.rbac import rbac_manifests
from monarch_rdma.job.kubernetes.spec import JobSpec, MeshSpec

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="install extra `test`: kubernetes-validate")
yaml = pytest.importorskip("yaml", reason="install extra `test`: PyYAML")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "kubernetes"
CUSTOM = {"MonarchMesh", "PodGroup"}  # kinds whose schemas come with what is installed in the cluster
FULL = ImageSpec(
    "registry/image:1",
    resources={"amd.com/gpu": 8, "rdma/hca": 2, "cpu": "500m", "memory": "512Gi"},
    shared_memory_size="64Gi",
    host_network=True,
    env={"NCCL_DEBUG": "INFO"},
    node_selector={"node.kubernetes.io/instance-type": "BM.GPU.MI300X.8"},
    tolerations=[{"key": "team", "operator": "Exists"}],
    run_as_user=1000,
    image_pull_policy="Always",
    image_pull_secrets=["registry"],
)


def job_of(*meshes: MeshSpec, **fields: Any) -> JobSpec:
    return JobSpec("exp", "team", **fields, meshes=meshes or (MeshSpec("trainers", 2, image_spec=FULL),))


def validate(found: list[dict[str, Any]], *versions: str) -> None:
    """Strictly: a field that is not in the schema is an error."""
    for manifest in found:
        for version in versions or ("1.25", "1.31", "1.37"):
            if manifest["kind"] not in CUSTOM:
                kubernetes_validate.validate(json.loads(json.dumps(manifest)), version, strict=True)


def by_kind(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {manifest["kind"]: manifest for manifest in found}


@pytest.mark.parametrize("workload", ["statefulset", "indexed_job", "monarchmesh"])
@pytest.mark.parametrize("queue", [{}, {"kueue_queue": "gpus"}, {"volcano_queue": "gpus"}])
@pytest.mark.parametrize("image", [ImageSpec("image"), FULL], ids=["least", "most"])
def test_kubernetes_own_schemas_accept_what_is_made(workload: str, queue: dict[str, str], image: ImageSpec) -> None:
    job = job_of(
        MeshSpec("trainers", 2, image_spec=image, labels={"a": "b"}, annotations={"c": "d"}), workload=workload, **queue
    )
    owner = {"metadata": {"name": "exp-secret", "uid": "1"}}
    found = [secret_manifest(job, b"s" * 32), *rbac_manifests(job), *manifests(job, owner, idle=60.0, linger=5.0)]
    validate(found)
    if workload == "monarchmesh":  # the pod template is Kubernetes' own
        template = by_kind(found)["MonarchMesh"]["spec"]["podTemplate"]
        validate([{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}])


def test_a_field_that_does_not_exist_is_noticed() -> None:
    found = by_kind(manifests(job_of()))["StatefulSet"]
    found["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagee"):
        validate([found])


def test_pods_get_what_was_asked_for() -> None:
    spec = by_kind(manifests(job_of()))["StatefulSet"]["spec"]["template"]["spec"]
    (worker,) = spec["containers"]
    assert worker["resources"]["limits"]["amd.com/gpu"] == "8"
    assert worker["resources"]["requests"] == worker["resources"]["limits"]
    assert worker["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"add": ["IPC_LOCK"]}}
    assert "ulimit -l" in worker["command"][2]
    shm = next(each for each in spec["volumes"] if each["name"] == "shared-memory")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in worker["volumeMounts"]
    assert spec["hostNetwork"] and spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert {each["key"] for each in spec["tolerations"]} == {"amd.com/gpu", "team"}
    assert spec["securityContext"]["fsGroup"] == 1000 and not spec["automountServiceAccountToken"]


@pytest.mark.parametrize(
    ("resources", "locks"),
    [({"rdma/hca": 1}, True), ({"openshift.io/rdma_ib": 1}, True), ({"nvidia.com/gpu": 8}, False), (None, False)],
)
def test_memory_may_be_locked_where_there_is_a_card(resources: dict[str, int] | None, locks: bool) -> None:
    assert ImageSpec("image", resources).locks_memory == locks
    assert ImageSpec("image", resources, lock_memory=not locks).locks_memory != locks


def test_the_secret_is_in_the_secret_alone() -> None:
    job, secret = job_of(), b"a secret of thirty-two bytes, so"
    manifest = secret_manifest(job, secret)
    assert base64.b64decode(manifest["data"]["secret"]) == secret
    rest = json.dumps([*manifests(job), *rbac_manifests(job)])
    assert secret.decode() not in rest and manifest["data"]["secret"] not in rest
    volume = by_kind(manifests(job))["StatefulSet"]["spec"]["template"]["spec"]["volumes"][-1]["secret"]
    assert volume["secretName"] == manifest["metadata"]["name"]
    assert volume["defaultMode"] == 0o440, "a user that is not root reads it by its group"


def test_what_the_secret_owns_goes_with_it() -> None:
    owner = {"metadata": {"name": "exp-secret", "uid": "17"}}
    for manifest in manifests(job_of(), owner):
        assert manifest["metadata"]["ownerReferences"][0]["uid"] == "17"


def test_a_pod_template_is_kept_and_gets_the_secret() -> None:
    given_template = {
        "metadata": {"labels": {"mine": "1"}},
        "spec": {"containers": [{"name": "side", "image": "a"}, {"name": "worker", "image": "b", "command": ["run"]}]},
    }
    before = json.dumps(given_template)
    found = by_kind(manifests(job_of(MeshSpec("m", 1, pod_template=given_template))))["StatefulSet"]
    validate([found])
    template = found["spec"]["template"]
    assert template["metadata"]["labels"]["mine"] == "1" and template["metadata"]["labels"]["monarch-rdma/mesh"] == "m"
    side, worker = template["spec"]["containers"]
    assert worker["command"] == ["run"] and worker["volumeMounts"][0]["mountPath"] == "/var/run/monarch-rdma"
    assert worker["env"][0]["name"] == "MONARCH_RDMA_SECRET_FILE" and "volumeMounts" not in side
    assert json.dumps(given_template) == before


def test_queues() -> None:
    job = by_kind(manifests(job_of(workload="indexed_job", kueue_queue="gpus")))["Job"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus" and job["spec"]["suspend"]
    found = by_kind(manifests(job_of(volcano_queue="gpus")))
    assert found["PodGroup"]["spec"] == {"minMember": 2, "queue": "gpus"}
    template = found["StatefulSet"]["spec"]["template"]
    assert template["spec"]["schedulerName"] == "volcano"
    assert template["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == found["PodGroup"]["metadata"]["name"]


def test_the_client_may_do_no_more_than_it_does() -> None:
    def allowed(job: JobSpec) -> set[tuple[str, str]]:
        rules = by_kind(rbac_manifests(job))["Role"]["rules"]
        assert not any("*" in rule["verbs"] + rule["resources"] + rule["apiGroups"] for rule in rules)
        for rule in rules:
            named = {"get", "delete"} & set(rule["verbs"]) and rule["resources"] != ["pods/log"]
            assert bool(rule.get("resourceNames")) == bool(named), rule
        return {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}

    found = JobSpec("exp", "team", meshes=(MeshSpec("trainers", 2),))
    attaching = {("pods", "list"), ("pods/log", "get"), ("events", "list"), ("secrets", "get")}
    assert allowed(found) == attaching
    making = {(kind, verb) for kind in ("statefulsets", "services") for verb in ("create", "get", "delete")}
    assert allowed(job_of()) == attaching | making | {("secrets", "create"), ("secrets", "delete")}


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ImageSpec(""), "image is ''"),
        (lambda: ImageSpec("a", {"cpu": "many"}), "resources['cpu'] is 'many'"),
        (lambda: ImageSpec("a", {"amd.com/gpu": -1}), "resources['amd.com/gpu'] is -1"),
        (lambda: ImageSpec("a", shared_memory_size="64 GB"), "shared_memory_size is '64 GB'"),
        (lambda: ImageSpec("a", image_pull_policy="Sometimes"), "image_pull_policy is 'Sometimes'"),
        (lambda: KubernetesJob().add_mesh("a-b", 1), "name is 'a-b'"),
        (lambda: KubernetesJob().add_mesh("Big", 1), "name is 'Big'"),
        (lambda: KubernetesJob().add_mesh("m", 0), "num_replicas of mesh 'm' is 0"),
        (lambda: KubernetesJob().add_mesh("m", True), "num_replicas of mesh 'm' is True"),
        (lambda: KubernetesJob().add_mesh("m", 1, port=0), "port of mesh 'm' is 0"),
        (lambda: KubernetesJob().add_mesh("m", 1, "a=b", image_spec=ImageSpec("a")), "image_spec and label_selector"),
        (lambda: KubernetesJob().add_mesh("m", 1, pod_rank_label="r", image_spec=ImageSpec("a")), "pod_rank_label"),
        (lambda: KubernetesJob(name="x" * 49).add_mesh("m", 1), "has 51 characters"),
        (lambda: KubernetesJob(name="Exp"), "name is 'Exp'"),
        (lambda: KubernetesJob(workload="deployment"), "workload is 'deployment'"),
        (lambda: KubernetesJob(kueue_queue="a", volcano_queue="b"), "kueue_queue and volcano_queue"),
        (lambda: KubernetesJob(idle_timeout=60.0), "workload='indexed_job'"),
        (
            lambda: KubernetesJob(attach_to="x").add_mesh("m", 1, image_spec=ImageSpec("a")),
            "attach_to uses what is there",
        ),
        (lambda: KubernetesJob(meshes=[{"name": "m", "pods": 2}]), "describes no mesh"),
        (lambda: manifests(job_of(MeshSpec("m", 1, pod_template={"spec": {}}))), "has no containers"),
    ],
)
def test_wrong_input_is_a_sentence_that_names_it(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        make()


def test_a_mesh_is_there_once() -> None:
    job = KubernetesJob()
    job.add_mesh("m", 1)
    with pytest.raises(ConfigError, match="has a mesh 'm' already"):
        job.add_mesh("m", 2)


def test_a_job_is_described_by_json_and_made_from_it() -> None:
    job = KubernetesJob("team", 60.0, workload="indexed_job", idle_timeout=90.0, kueue_queue="gpus")
    job.add_mesh("trainers", 2, image_spec=FULL)
    job.add_mesh("found", 3, "app=worker", "rank")
    again = KubernetesJob(**json.loads(json.dumps(job.spec())))
    assert again.spec() == job.spec() and again.manifests("x") == job.manifests("x")


# --- pods


def pod(name: str = "w-1", **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "team", **metadata}, "spec": {}, "status": {}}


INDEX = "apps.kubernetes.io/pod-index"


@pytest.mark.parametrize(
    ("found", "ordinal"),
    [
        (pod("w-7", labels={INDEX: "3"}), 3),
        (pod("w-7", labels={"other": "3"}), 7),  # before 1.28 there is no such label
        (pod("w-2-x7k2p", annotations={"batch.kubernetes.io/job-completion-index": "2"}), 2),
        (pod("w-2-x7k2p") | {"spec": {"hostname": "w-2"}}, 2),
        (pod("w-2-x7k2p"), None),
        (pod("worker"), None),
        (pod("w-1", labels={INDEX: "first"}), 1),
    ],
)
def test_which_host_of_its_mesh_a_pod_is(found: dict[str, Any], ordinal: int | None) -> None:
    assert ordinal_of(found, INDEX) == ordinal


def ready(name: str, created: str = "1", *, is_ready: bool = True, deleted: bool = False) -> dict[str, Any]:
    found = pod(name, creationTimestamp=created, **({"deletionTimestamp": "2"} if deleted else {}))
    conditions = [{"type": "Ready", "status": str(is_ready)}]
    return found | {"status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions}}


@given(
    st.permutations(
        [ready("w-0", "1", deleted=True), ready("w-0", "2"), ready("w-0", "3", is_ready=False), ready("w-9")]
    )
)
def test_of_several_pods_with_one_number_the_one_that_is_ready_counts(pods: list[dict[str, Any]]) -> None:
    found = current(pods, INDEX, 2)
    assert set(found) == {0} and found[0]["metadata"]["creationTimestamp"] == "2"


def waiting(reason: str, message: str = "", ended: dict[str, Any] | None = None) -> dict[str, Any]:
    state: dict[str, Any] = {"state": {"waiting": {"reason": reason, "message": message}}, "lastState": {}}
    state["lastState"] = {"terminated": ended} if ended else {}
    return pod() | {"status": {"containerStatuses": [state]}}


@pytest.mark.parametrize(
    ("found", "words", "is_final"),
    [
        (waiting("ErrImagePull", "manifest for a:1 not found"), "ErrImagePull: manifest for a:1 not found", True),
        (waiting("ImagePullBackOff", "Back-off pulling image"), "Back-off pulling image", False),
        (waiting("InvalidImageName", "couldn't parse"), "couldn't parse", True),
        (waiting("CrashLoopBackOff", "back-off 10s", {"exitCode": 2, "reason": "Error"}), "exit code 2 (Error)", True),
        (waiting("CreateContainerConfigError", 'secret "x" not found'), 'secret "x" not found', True),
    ],
)
def test_why_a_pod_does_not_run_is_told_in_the_clusters_words(found: Any, words: str, is_final: bool) -> None:
    ailment = ailment_of(found)
    assert ailment is not None and words in ailment.words and ailment.advice and ailment.is_final == is_final


def test_a_pod_that_just_starts_has_no_ailment() -> None:
    assert ailment_of(waiting("ContainerCreating")) is None
    assert ailment_of(pod()) is None and history_of(pod()) == ""


def test_what_the_scheduler_says() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    message = "0/2 nodes are available: 2 Insufficient amd.com/gpu."
    ailment = ailment_of(pod() | {"status": {"conditions": [condition | {"message": message}]}})
    assert ailment is not None and message in ailment.words and "ask for less" in ailment.advice
    gated = condition | {"reason": "SchedulingGated", "message": "gates"}
    ailment = ailment_of(pod() | {"status": {"conditions": [gated]}})
    assert ailment is not None and "queue" in ailment.advice


def test_events_of_pods_that_could_not_be_made() -> None:
    quota = {"type": "Warning", "reason": "FailedCreate", "message": "pods w-0 is forbidden: exceeded quota: gpus"}
    normal = {"type": "Normal", "reason": "SuccessfulCreate", "message": "create Pod"}
    (ailment,) = event_ailments([normal, quota, quota])
    assert "exceeded quota: gpus" in ailment.words and "quota" in ailment.advice and not ailment.is_final


def test_what_has_happened_to_a_pod() -> None:
    evicted = pod() | {"status": {"reason": "Evicted", "message": "the node was low on memory"}}
    assert history_of(evicted) == "pod w-1: Evicted: the node was low on memory"
    killed = {"state": {"running": {}}, "restartCount": 2}
    killed["lastState"] = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    said = history_of(pod() | {"status": {"containerStatuses": [killed]}})
    assert said == "pod w-1: its container ended with exit code 137 (OOMKilled) and was started again (2)"


# --- the command, and the example


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["k8s", "render", *arguments]) == 0
    return capsys.readouterr().out


def test_render_prints_what_a_job_creates(capsys: pytest.CaptureFixture[str]) -> None:
    printed = rendered(
        capsys,
        "--name",
        "exp",
        "--namespace",
        "team",
        "--mesh",
        "trainers=2",
        "--image",
        "a:1",
        "--gpu",
        "nvidia=8",
        "--rbac",
    )
    found = list(yaml.safe_load_all(printed))
    validate(found)
    job = KubernetesJob("team", name="exp")
    job.add_mesh("trainers", 2, image_spec=ImageSpec("a:1", {"nvidia.com/gpu": "8"}))
    assert [manifest for manifest in found if manifest["kind"] in ("Service", "StatefulSet")] == job.manifests()
    assert {"ServiceAccount", "Role", "RoleBinding"} < by_kind(found).keys()
    assert "Secret" not in by_kind(found) and "create secret generic exp-secret" in printed


def test_render_prints_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(rendered(capsys, "--image", "a", "--workload", "indexed_job", "--json"))
    assert found["kind"] == "List"
    validate(found["items"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--image", "a", "--gpu", "intel=1"], "'intel' is neither amd nor nvidia"),
        (["--image", "a", "--resource", "cpu"], "--resource is 'cpu'"),
        (["--image", "a", "--mesh", "m=many"], "'many' is no number of pods"),
        (["--image", "a", "--mesh", "m=0"], "num_replicas of mesh 'm' is 0"),
        ([], "nothing to print"),
    ],
)
def test_what_cannot_be_rendered_is_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert cli.main(["k8s", "render", *arguments]) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_the_examples_pods_are_what_render_prints(capsys: pytest.CaptureFixture[str], vendor: str) -> None:
    options = ["--mesh", "trainers=2", "--image", "monarch-rdma", "--gpu", f"{vendor}=8", "--resource", "rdma/hca=1"]
    printed = rendered(capsys, "--name", "hello", "--namespace", "monarch", *options, "--shared-memory", "64Gi")
    assert (EXAMPLES / vendor / "workers.yaml").read_text() == printed


def test_the_examples_client_has_the_rights_that_render_prints(capsys: pytest.CaptureFixture[str]) -> None:
    printed = rendered(capsys, "--name", "hello", "--namespace", "monarch", "--rbac")
    assert (EXAMPLES / "base" / "rbac.yaml").read_text() == printed


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_the_example_can_be_applied(vendor: str, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: what `kubectl apply -k` makes of the example is not checked")
    folder = shutil.copytree(EXAMPLES, tmp_path / "kubernetes")
    (folder / "base" / "job.secret").write_bytes(b"s" * 32)
    made = subprocess.run(
        ["kubectl", "kustomize", str(folder / vendor)], capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stderr
    found = list(yaml.safe_load_all(made.stdout))
    validate(found)
    assert {"Namespace", "Secret", "Service", "StatefulSet", "Job", "ConfigMap", "Role"} <= by_kind(found).keys()
    assert {each["metadata"].get("namespace") for each in found if each["kind"] != "Namespace"} == {"monarch"}
