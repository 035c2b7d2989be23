"""Workers that a scheduler starts: where they listen, and what they say if they cannot."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from typing import Any

import pytest

from monarch._spi import SecretError
from monarch.job import nodes, pod_worker
from monarch.job.node import SECRET_VARIABLE
from monarch.job.pod import PORT_VARIABLE
from monarch.job.slurm import node as slurm_node

TAKEN = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
OPTIONS = argparse.Namespace(
    python="{}.{}".format(*sys.version_info[:2]), port=26600, bind_to="", name=[]
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back the name of the secret's file, which a node sets for its process."""
    monkeypatch.setenv("MONARCH_JOB_SECRET_FILE", "")


def cannot(error: Exception) -> Any:
    def serve(*_: object, **__: object) -> None:
        raise error

    return serve


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TAKEN, r"it cannot listen at \* port 26600 \(Address already in use\)"),
        (SecretError("the secret is too short"), "the secret is too short"),
    ],
)
def test_a_node_of_slurm_says_why_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "k" * 64)
    monkeypatch.setattr(slurm_node, "_node_address", lambda node: node)
    monkeypatch.setattr(slurm_node, "serve_host", cannot(error))
    with pytest.raises(slurm_node._CannotStart, match=says):
        slurm_node._serve("n0", OPTIONS)


def test_a_node_of_slurm_without_the_secret_names_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(slurm_node._CannotStart, match=f"{SECRET_VARIABLE} did not reach it"):
        slurm_node._serve("n0", OPTIONS)


@pytest.mark.parametrize(
    ("address", "where"), [("10.0.0.7", "10.0.0.7"), ("fd00::7", "[fd00::7]"), ("n0.local", "*")]
)
def test_a_node_of_slurm_listens_at_its_own_address_if_that_is_a_number(
    monkeypatch: pytest.MonkeyPatch, address: str, where: str
) -> None:
    served: list[str] = []
    monkeypatch.setenv(SECRET_VARIABLE, "k" * 64)
    monkeypatch.setattr(slurm_node, "_node_address", lambda _: address)
    monkeypatch.setattr(slurm_node, "serve_host", lambda at, *_, **__: served.append(at))
    slurm_node._serve("n0", OPTIONS)
    assert served == [f"tcp://{where}:26600"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TAKEN, "cannot listen at tcp://.*: Address already in use"),
        (SecretError("the secret is too short"), "monarch worker: the secret is too short"),
    ],
)
def test_a_pod_says_why_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    monkeypatch.setenv(PORT_VARIABLE, "26600")
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.setattr(pod_worker, "serve_host", cannot(error))
    with pytest.raises(SystemExit, match=says):
        pod_worker.main()


def test_a_host_of_a_launcher_says_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    rank: Any = None
    monkeypatch.setattr(nodes, "serve", cannot(SecretError("the secret is too short")))
    with pytest.raises(SystemExit, match=r"monarch worker on .*: the secret is too short"):
        nodes._serve("n0", "tcp://*:0", rank, 60.0)
    monkeypatch.setattr(nodes, "serve", lambda *_, **__: None)
    with pytest.raises(SystemExit) as ended:
        nodes._serve("n0", "tcp://*:0", rank, 60.0)
    assert ended.value.code == 0
