"""What a host reports of its ranks, and in which order."""

from __future__ import annotations

import itertools
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.spmd.host_ranks import Exited, HostRanks, Output, _Pipe, _Process
from monarch.spmd.torchrun import Launch

SAID = b"last words"


def test_the_exit_of_a_rank_is_reported_after_all_that_it_wrote() -> None:
    """The exit may be read first: it comes by another connection."""
    reported: list[Any] = []
    ranks: Any = object.__new__(HostRanks)
    ranks._port = SimpleNamespace(send=reported.append)
    ranks._changing = threading.Lock()
    process, other = (_Process(key, 0, key, key, None) for key in (0, 1))
    ranks._processes = {0: process, 1: other}
    ranks._pipes = {}
    for writer in (process, other):
        read, write = os.pipe()
        os.set_blocking(read, False)
        ranks._pipes[read] = _Pipe(writer, 1, True, None)
        os.write(write, SAID)
        os.close(write)
    ranks._exited(0, 9)
    assert reported == [Output(0, 0, 1, SAID, True), Exited(0, 0, 9)]
    assert process.exited.is_set()
    for read in ranks._pipes:
        os.close(read)


def test_hidden_output_is_sent_only_of_stderr() -> None:
    """The launch says the last lines of stderr when a rank fails, though it showed none."""
    reported: list[Any] = []
    ranks: Any = object.__new__(HostRanks)
    ranks._port = SimpleNamespace(send=reported.append)
    ranks._pipes = {}
    process = _Process(0, 0, 0, 0, None)
    for stream in (1, 2):
        read, write = os.pipe()
        ranks._pipes[read] = _Pipe(process, stream, False, None)
        os.write(write, SAID)
        os.close(write)
        assert ranks._read_pipe(read)
        os.close(read)
    assert reported == [Output(0, 0, 2, SAID, False)]


@pytest.mark.parametrize(("kind", "count"), [("script", 3), ("module", 3), ("command", 2)])
def test_a_command_gets_its_output_and_no_connection_to_the_host(kind: str, count: int) -> None:
    given: list[int] = []
    ranks: Any = object.__new__(HostRanks)
    ranks._launch = Launch(("train",), kind=kind)
    ranks._keys = itertools.count()
    ranks._pipes, ranks._controls = {}, {}
    woken, ranks._waking = os.pipe()
    ranks._fork = lambda process, *more: given.extend(more[-1])
    ranks._start_process(0, SimpleNamespace(rank=0, local_rank=0), {})
    assert len(given) == count
    assert len(ranks._controls) == count - 2
    for process in ranks._controls.values():
        process.control.close()
    for fd in (*ranks._pipes, woken, ranks._waking):
        os.close(fd)
