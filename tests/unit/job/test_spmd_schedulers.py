"""The job of a scheduler for a command of several hosts, by the role of its description."""

from __future__ import annotations

from typing import Any

import pytest

from monarch.job.spmd.schedulers import job_of

pytest.importorskip("kubernetes", reason="needs the client of Kubernetes")
from monarch.job.kubernetes import KubernetesJob


@pytest.mark.parametrize("amounts", [{}, {"cpu": 2, "memMB": 512}, {"gpu": 8}])
def test_pods_have_the_resources_of_the_role(
    monkeypatch: pytest.MonkeyPatch, amounts: dict[str, int]
) -> None:
    added: list[Any] = []
    monkeypatch.setattr(
        KubernetesJob,
        "add_mesh",
        lambda _, name, count, *, image_spec: added.append((count, image_spec)),
    )
    role = {"image": "train:1", "num_replicas": 3, "resource": amounts}
    job_of("kubernetes", {}, role)
    ((count, image),) = added
    assert (count, image.image) == (3, "train:1")
    expected = {"cpu": 2, "memory": "512M"} if "cpu" in amounts else {"nvidia.com/gpu": 8}
    assert image.resources == (expected if amounts else None)


def test_an_option_that_pods_do_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"kubernetes has no option queue; there are .*namespace"):
        job_of("kubernetes", {"queue": "x"}, {"image": "train:1"})
