"""Descriptions of meshes of pods, and the objects that are made of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

client = pytest.importorskip("kubernetes.client", reason="needs the client of Kubernetes")
yaml = pytest.importorskip("yaml")

from monarch.job import pod  # noqa: E402
from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob, manifests  # noqa: E402
from monarch.job.kubernetes.specification import Mesh, check_name  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
IMAGE = ImageSpec("train:1", {"cpu": 4, "nvidia.com/gpu": 8}, True, "16Gi")
CLASSES = {
    "Secret": "V1Secret",
    "Service": "V1Service",
    "StatefulSet": "V1StatefulSet",
    "Role": "V1Role",
    "RoleBinding": "V1RoleBinding",
    "ServiceAccount": "V1ServiceAccount",
    "Job": "V1Job",
    "Pod": "V1Pod",
}


def job(**options: Any) -> Any:
    return KubernetesJob("ml", **options)


def mesh_of(job: Any, name: str = "trainers") -> Mesh:
    mesh: Mesh = job._meshes[name]
    return mesh


def checked(kind: str, body: dict[str, Any]) -> None:
    """Compare an object with what the client's class of it keeps: unknown fields are lost."""
    api = client.ApiClient(client.Configuration())
    found = api.sanitize_for_serialization(getattr(client, kind).from_dict(body))
    assert body == found


# -- names and arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "trainers", "a1", "x" * 63])
def test_names(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["1a", "a-b", "a_b", "A", "trainErs", "x" * 64, "ä", "a ", "a\n"])
def test_invalid_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"^Mesh name '{re.escape(name)}' is invalid\\. [A-Z]"):
        job().add_mesh(name, 1)


def test_an_empty_name() -> None:
    with pytest.raises(ValueError, match=r"^Empty mesh name is invalid\.$"):
        job().add_mesh("", 1)


@hypothesis.given(strategies.text(max_size=70))
def test_names_are_those_of_the_resource(name: str) -> None:
    valid = re.fullmatch("[a-z][a-z0-9]{0,62}", name, re.ASCII) is not None
    try:
        check_name(name)
    except ValueError:
        assert not valid
    else:
        assert valid


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"image_spec": IMAGE, "pod_template": {}}, "image_spec or a pod_template"),
        ({"image_spec": IMAGE, "label_selector": "a=b"}, "label_selector is for pods that exist"),
        ({"image_spec": IMAGE, "pod_rank_label": "r"}, "pod_rank_label is for pods that exist"),
        ({"labels": {"a": "b"}}, "labels are for objects that the job creates"),
        ({"annotations": {"a": "b"}}, "annotations are for objects that the job creates"),
        ({"num_replicas": 0}, "num_replicas must be at least 1"),
        ({"port": 65536}, "port must be between 1 and 65535"),
        ({"pod_template": {"spec": {}}}, "must be a kubernetes.client.V1PodTemplateSpec"),
    ],
)
def test_arguments_that_make_no_mesh(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        job().add_mesh("trainers", **{"num_replicas": 1, **more})


def test_options_that_make_no_job() -> None:
    with pytest.raises(ValueError, match="namespace must be"):
        KubernetesJob("")
    with pytest.raises(ValueError, match="timeout must be"):
        job(timeout=0)
    with pytest.raises(ValueError, match="two ways to the pods"):
        job(attach_to="tcp://a:1", port_forward=True)
    with pytest.raises(ValueError, match=r"At least one mesh must be added using add_mesh\(\)"):
        job().apply()
    with pytest.raises(ValueError, match="not both"):
        KubeConfig(Path("x"), client.Configuration())
    twice = job()
    twice.add_mesh("a", 1)
    with pytest.raises(ValueError, match="a mesh 'a' already"):
        twice.add_mesh("a", 1)
    with pytest.raises(RuntimeError, match="batch-mode"):
        twice.apply("train.py")


def test_kube_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = KubeConfig.from_path("~/config")
    assert (config.local, config.out_of_cluster) == (tmp_path / "config", True)
    with pytest.raises(RuntimeError, match=r"^Failed to load kubeconfig file '.*config': .+$"):
        config.load()
    (tmp_path / "config").write_text("{ no: [yaml")
    with pytest.raises(RuntimeError, match=r"^Failed to load kubeconfig file '.*config': .+$"):
        config.load()
    assert not KubeConfig().out_of_cluster
    with pytest.raises(RuntimeError, match="Failed to load in-cluster Kubernetes config"):
        KubeConfig().load()
    made = client.Configuration(api_key={"authorization": "token-of-the-test"})
    assert KubeConfig.from_config(made).load() is made
    assert "token-of-the-test" not in repr(KubeConfig.from_config(made))


# -- objects ---------------------------------------------------------------------------------------


def test_the_template_of_an_image() -> None:
    template = manifests.template_of(IMAGE, 4444, "key")
    checked("V1PodTemplateSpec", template)
    (container,) = template["spec"]["containers"]
    assert container["command"][:3] == ["python", "-u", "-c"]
    amounts = {"cpu": "4", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    assert container["securityContext"] == {"privileged": True}
    env = {variable["name"]: variable for variable in container["env"]}
    assert env["MONARCH_PORT"]["value"] == "4444"
    assert env["PYTHONSAFEPATH"]["value"] == "1"
    key = {"secretKeyRef": {"name": "key", "key": "secret"}}
    assert env["MONARCH_JOB_SECRET"]["valueFrom"] == key
    path = "metadata.labels['apps.kubernetes.io/pod-index']"
    rank = env["MONARCH_SERVICE_PROC_RANK"]["valueFrom"]
    assert rank == {"fieldRef": {"fieldPath": path}}
    plain = manifests.template_of(ImageSpec("x"), 1, "key")["spec"]
    assert "volumes" not in plain
    assert "resources" not in plain["containers"][0]


def test_service_ids_are_found_where_they_were_put() -> None:
    template = manifests.template_of(IMAGE, 4444, "key")
    named = manifests.with_ids(template, '["service<1>"]')
    assert template == manifests.template_of(IMAGE, 4444, "key")
    for place in ("podTemplate", "template"):
        found = {"spec": {"replicas": 1, place: named}}
        assert manifests.ids_of(found, 1) == '["service<1>"]'
        assert manifests.ids_of(found, 2) is None
    assert manifests.ids_of({"spec": {"replicas": 1, "template": template}}, 1) is None
    assert manifests.ids_of({}, 1) is None


def test_the_objects_of_a_mesh_are_those_of_the_api() -> None:
    described = job()
    described.add_mesh("trainers", 3, image_spec=IMAGE, labels={"a": "b"}, annotations={"c": "d"})
    mesh = mesh_of(described)
    made = manifests.objects_of(mesh, "ml", operator=False)
    assert [(kind.name, body["metadata"]["name"]) for kind, body in made] == [
        ("Service", "trainers-svc"),
        ("StatefulSet", "trainers"),
    ]
    for kind, body in made:
        checked(CLASSES[kind.name], body)
    stateful = made[1][1]
    labels = stateful["spec"]["selector"]["matchLabels"]
    assert labels.items() <= stateful["spec"]["template"]["metadata"]["labels"].items()
    assert mesh.selector == ",".join(f"{name}={value}" for name, value in labels.items())
    assert stateful["metadata"]["labels"]["a"] == "b"
    ((kind, custom),) = manifests.objects_of(mesh, "ml", operator=True)
    assert kind.plural == "monarchmeshes"
    assert custom == {
        "apiVersion": "monarch.pytorch.org/v1alpha1",
        "kind": "MonarchMesh",
        "metadata": {
            "name": "trainers",
            "namespace": "ml",
            "labels": {"a": "b"},
            "annotations": {"c": "d"},
        },
        "spec": {"replicas": 3, "port": 26600, "podTemplate": mesh.template},
    }
    checked("V1Secret", manifests.secret("trainers-secret", "ml", "trainers", "s" * 64))


def test_a_template_of_the_user_is_used_as_it_is() -> None:
    template = client.V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(labels={"team": "vision"}),
        spec=client.V1PodSpec(
            containers=[client.V1Container(name="w", image="train:1", command=["x"])],
            node_selector={"gpu": "h100"},
        ),
    )
    described = job()
    described.add_mesh("trainers", 1, pod_template=template)
    expected = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "containers": [{"name": "w", "image": "train:1", "command": ["x"]}],
            "nodeSelector": {"gpu": "h100"},
        },
    }
    assert mesh_of(described).template == expected
    stateful = manifests.stateful_set(mesh_of(described), "ml")
    assert stateful["spec"]["template"]["metadata"]["labels"]["team"] == "vision"
    as_json = job()
    as_json.add_mesh("trainers", 1, pod_template=expected)
    assert as_json._meshes == described._meshes


@hypothesis.given(strategies.text(strategies.characters(codec="ascii"), min_size=1))
def test_a_secret_is_read_as_it_was_written(content: str) -> None:
    made = manifests.secret("a-secret", "ml", "a", content)
    assert manifests.content_of(made) == (content.strip() or None)


@pytest.mark.parametrize("data", [None, {}, {"secret": "!"}, {"secret": 3}, {"secret": "/w=="}, []])
def test_a_secret_of_something_else(data: Any) -> None:
    assert manifests.content_of({"data": data}) is None


def test_forwarded_addresses_are_loopback_and_differ() -> None:
    addresses = {pod.forwarded_host("ml", f"trainers-{rank}") for rank in range(100)}
    assert len(addresses) == 100
    for address in addresses:
        numbers = [int(number) for number in address.split(".")]
        assert numbers[0] == 127
        assert 0 < numbers[1] < 256
        assert 0 < numbers[3] < 255


def test_the_manifests_of_the_documents() -> None:
    text = (ROOT / "docs/jobs/kubernetes.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = [each for block in blocks for each in yaml.safe_load_all(block)]
    assert {"Role", "RoleBinding", "ServiceAccount", "StatefulSet"} <= {b["kind"] for b in found}
    for body in found:
        checked(CLASSES[body["kind"]], json.loads(json.dumps(body)))


def test_without_the_client_the_import_names_the_extra() -> None:
    program = "import sys; sys.modules['kubernetes'] = None; import monarch.job.kubernetes"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: monarch.job.kubernetes needs the client of Kubernetes")
    assert last.endswith("pip install 'pymonarch[kubernetes]'")


def test_a_pod_needs_no_client() -> None:
    program = "import sys; sys.modules['kubernetes'] = None; import monarch.job.pod_worker"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
