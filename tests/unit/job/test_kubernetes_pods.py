"""From events of a watch to the pods that serve: any order of events, any time of a new list."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

pytest.importorskip("kubernetes", reason="needs the client of Kubernetes")

from monarch.job.kubernetes.cluster import Cluster, ClusterError
from monarch.job.kubernetes.manifests import SECRET
from monarch.job.kubernetes.pods import MeshPods, read_pod

RANK = "rank"


def pod(name: str, rank: object = None, **more: Any) -> dict[str, Any]:
    """Return a pod as the API has it; `more` may have ready, ip, born, leaving, version, port."""
    metadata: dict[str, Any] = {"name": name, "uid": f"uid-of-{name}", "labels": {}}
    if rank is not None:
        metadata["labels"][RANK] = str(rank)
    metadata["creationTimestamp"] = more.get("born", "2024-01-01T00:00:00Z")
    metadata["resourceVersion"] = str(more.get("version", 1))
    if more.get("leaving"):
        metadata["deletionTimestamp"] = "2024-01-01T00:00:01Z"
    status: dict[str, Any] = {"phase": "Pending"}
    if more.get("ip"):
        status["podIP"] = more["ip"]
    ready = "True" if more.get("ready") else "False"
    status["conditions"] = [{"type": "Ready", "status": ready}]
    env = [{"name": "MONARCH_PORT", "value": more["port"]}] if "port" in more else []
    return {"metadata": metadata, "spec": {"containers": [{"env": env}]}, "status": status}


def serving(pods: MeshPods) -> dict[int, str]:
    return {rank: each.name for rank, each in pods.serving.items()}


def test_a_pod_serves_once_it_is_ready_and_has_an_address() -> None:
    pods = MeshPods(2, RANK, 26600)
    pods.listed([pod("a", 0, ready=True, ip="10.0.0.1"), pod("b", 1, ready=True)], "5")
    assert pods.missing == [1]
    pods.event("MODIFIED", pod("b", 1, ready=True, ip="fd00::1", version=7))
    assert pods.missing == []
    assert [each.address for each in pods.serving.values()] == [
        "tcp://10.0.0.1:26600",
        "tcp://[fd00::1]:26600",
    ]
    assert pods.version == "7"


def test_a_pod_that_is_deleted_serves_no_longer() -> None:
    pods = MeshPods(1, RANK, 26600)
    pods.listed([pod("a", 0, ready=True, ip="10.0.0.1")], "5")
    pods.event("MODIFIED", pod("a", 0, ready=True, ip="10.0.0.1", leaving=True))
    assert pods.missing == [0]
    assert pods.obstacles() == "a: it is being deleted"
    pods.event("DELETED", pod("a", 0, ready=True, ip="10.0.0.1"))
    assert pods.missing == [0]
    assert pods.obstacles() == ""


def test_the_younger_of_two_pods_of_a_rank_counts() -> None:
    pods = MeshPods(1, RANK, 26600)
    old = pod("z", 0, ready=True, ip="10.0.0.1", born="2024-01-01T00:00:00Z")
    new = pod("a", 0, ready=True, ip="10.0.0.2", born="2024-01-02T00:00:00Z")
    for order in ([old, new], [new, old]):
        pods.listed(order, "1")
        assert serving(pods) == {0: "a"}


def test_the_port_of_a_pod() -> None:
    assert read_pod(pod("a", 0, port="4444"), RANK, 26600).port == 4444
    assert read_pod(pod("a", 0, port="no number"), RANK, 26600).port == 26600
    assert read_pod(pod("a", 0), RANK, 26600).port == 26600


def test_pods_without_a_rank_of_the_mesh_are_reported_once() -> None:
    pods = MeshPods(2, RANK, 26600)
    wrong = [pod("a"), pod("b", "x", ready=True, ip="10.0.0.1"), pod("c", 2), pod("d", "-1")]
    pods.listed(wrong, "1")
    assert pods.strange() == [
        "pod a has no number in its label rank",
        "pod b has no number in its label rank",
        "pod c has rank 2, and the mesh 2 hosts",
        "pod d has no number in its label rank",
    ]
    pods.listed(wrong, "2")
    assert pods.strange() == []
    assert pods.missing == [0, 1]


def test_an_error_asks_for_a_new_list() -> None:
    pods = MeshPods(1, RANK, 26600)
    pods.listed([], "5")
    pods.event("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    assert pods.version == "9"
    pods.event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
    assert pods.version == ""


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"phase": "Pending"}, "Pending"),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]},
            "ErrImagePull",
        ),
        (
            {
                "initContainerStatuses": [
                    {"state": {"terminated": {"reason": "Error", "exitCode": 2}}}
                ]
            },
            "Error: exit status 2",
        ),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes:\n no GPU",
                    }
                ]
            },
            "Unschedulable: 0/3 nodes: no GPU",
        ),
        ({}, "not ready"),
    ],
)
def test_why_a_pod_does_not_serve(status: dict[str, Any], why: str) -> None:
    found = {**pod("a", 0), "status": status}
    assert read_pod(found, RANK, 1).obstacle == why


JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(),
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
    max_leaves=5,
)
NAMES = ("metadata", "status", "spec", "labels", "conditions", "containers", "state", "env", RANK)


@hypothesis.given(
    strategies.recursive(
        JSON,
        lambda j: strategies.dictionaries(strategies.sampled_from(NAMES), j | strategies.lists(j)),
        max_leaves=12,
    )
)
def test_no_answer_of_the_api_is_more_than_a_pod_that_does_not_serve(found: Any) -> None:
    pods = MeshPods(1, RANK, 1)
    pods.event("ADDED", found if isinstance(found, dict) else {})
    assert pods.missing == [0]


EVENTS = strategies.lists(
    strategies.tuples(
        strategies.sampled_from("abcd"),
        strategies.sampled_from([None, 0, 1, 2]),
        strategies.booleans(),  # ready
        strategies.booleans(),  # exists after the event
        strategies.booleans(),  # the watch expired before the event: a new list
    ),
    max_size=20,
)


@hypothesis.given(EVENTS)
def test_events_and_lists_lead_to_the_same_as_the_last_state(
    events: list[tuple[str, int | None, bool, bool, bool]],
) -> None:
    """The model is a table of the pods there are; it serves what is ready, the younger first."""
    there: dict[str, dict[str, Any]] = {}
    pods = MeshPods(2, RANK, 26600)
    pods.listed([], "0")
    for number, (name, rank, ready, exists, expired) in enumerate(events):
        known = there.get(name)
        born = known["metadata"]["creationTimestamp"] if known else f"{number:09}"
        found = pod(name, rank, ready=ready, ip="10.0.0.1", born=born, version=number + 1)
        kind = "DELETED" if not exists else "MODIFIED" if known else "ADDED"
        if exists:
            there[name] = found
        else:
            there.pop(name, None)
        if expired:
            pods.event("ERROR", {"code": 410})
            assert pods.version == ""
            pods.listed(there.values(), str(number + 1))
        else:
            pods.event(kind, found)
        assert pods.version == str(number + 1)
        expected: dict[int, str] = {}
        for each in sorted(there.values(), key=lambda each: each["metadata"]["creationTimestamp"]):
            label = each["metadata"]["labels"].get(RANK)
            is_ready = each["status"]["conditions"][0]["status"] == "True"
            if label in ("0", "1") and is_ready:
                expected[int(label)] = each["metadata"]["name"]
        assert serving(pods) == expected
        assert pods.missing == [rank for rank in (0, 1) if rank not in expected]


@pytest.mark.parametrize("reason", ["NotFound", "Conflict", "Forbidden"])
def test_an_object_that_cannot_be_deleted_is_an_error_unless_it_is_gone(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ClusterError("no", 400, reason)

    cluster = object.__new__(Cluster)
    monkeypatch.setattr(cluster, "_object", refuse)
    if reason == "Forbidden":
        with pytest.raises(ClusterError, match="no"):
            cluster.delete(SECRET, "a", "uid")
    else:
        assert not cluster.delete(SECRET, "a", "uid")
