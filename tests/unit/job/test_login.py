"""Hosts to which one logs in: their names are words of a command line, and a kill ends them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch.job import login
from monarch.job.login import Host, check_hosts


@pytest.mark.parametrize("host", ["", "-oProxyCommand=x", "a b", "a\n"])
def test_what_is_no_name_of_a_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is no name of a host"):
        check_hosts(["node1", host])


def test_names_of_hosts() -> None:
    check_hosts(["node1", "ann@node-2.example.org", "10.0.0.1"])
    with pytest.raises(TypeError, match="must be a list of names"):
        check_hosts("node1")


@pytest.mark.parametrize("ends", [True, False])
def test_a_kill_leaves_the_hosts_before_it_ends_their_processes(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """So the script takes their end for no loss."""
    done: list[Any] = []
    process: Any = SimpleNamespace(pid=4711)
    job: Any = SimpleNamespace(
        _hosts={"hosts": [Host("node1", "tcp://node1:26600", process)]},
        _folder="/job",
        _end_hosts=lambda processes: done.append(("end", processes)),
    )
    monkeypatch.setattr(login, "leave", lambda addresses: done.append(("leave", addresses)))
    monkeypatch.setattr(login, "wait_for", lambda processes, _: [] if ends else processes)
    monkeypatch.setattr(login, "remove_folder", lambda folder: done.append(("remove", folder)))
    if ends:
        login.LoginJob._kill(job)
    else:
        with pytest.raises(RuntimeError, match=r"do not end: \[4711\]"):
            login.LoginJob._kill(job)
    assert done == [("leave", ["tcp://node1:26600"]), ("end", [process]), ("remove", "/job")]
    assert (job._hosts, job._folder) == ({}, "")
