"""The variables that a launch from the command line gives its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from monarch.spmd import command
from monarch.spmd.torchrun import Launch


@pytest.mark.parametrize(
    ("per_host", "environ", "threads"),
    [(2, {}, "1"), (1, {}, None), (2, {"OMP_NUM_THREADS": "3"}, None)],
)
def test_ranks_that_share_cores_have_one_thread_each(
    per_host: int, environ: dict[str, str], threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def run(asked: Launch, hosts: Any, show: Any, **more: Any) -> Any:
        given.update(more, hosts=hosts)

    def connect(*_: Any) -> None:
        raise AssertionError("nothing is started here for other hosts")

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "connect", connect)
    monkeypatch.setattr(command.Screen, "end", lambda self, result: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    hosts: Any = object()
    command.launch(Launch(("train",), per_host=per_host), hosts, environ={"A": "1", **environ})
    assert given["hosts"] is hosts
    assert given["variables"].get("OMP_NUM_THREADS") == threads
