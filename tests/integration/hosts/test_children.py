"""Children of the script, and of actors on other hosts, call over hosts as their parents do."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Place, free_address

CHILDREN = """
import multiprocessing

def in_child(method, function, *args):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs, function, *args), daemon=True)
    process.start()
    assert ours.poll(60), "no answer"
    found = ours.recv()
    process.join()
    return found

def answer(pipe, function, *args):
    pipe.send(outcome(lambda: function(*args)))

def pids(mesh):
    return mesh.pid.call().get(timeout=60).values()

def sizes(mesh, count):
    data = bytes(count)
    return [[len(each) for each in mesh.echo.call(data).get(timeout=60).values()] for _ in range(3)]

class Parent(Actor):
    @endpoint
    def of(self, method, mesh):
        return [in_child(method, pids, mesh), in_child(method, sizes, mesh, 1 << 20)]

def many(*workers):
    global hosts, echos, parents
    hosts = attach_to_workers(ca="trust_all_connections", workers=workers)
    procs = hosts.spawn_procs({"gpus": 4})
    echos, parents = procs.spawn("echos", Echo), procs.slice(gpus=0).spawn("parents", Parent)
    return len(set(pids(echos)))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_call_actors_on_other_hosts(place: Place, method: str) -> None:
    """By casts, which a mesh over hosts gets, and with plans that their parents have made."""
    path = place.folder / "client.py"
    head, _, loop = path.read_text().partition("for line in sys.stdin:")
    guard = "if __name__ == '__main__':\n    for line in sys.stdin:"
    path.write_text(head + CHILDREN + guard + loop.replace("\n    ", "\n        "))
    addresses = [free_address(), free_address()]
    for address in addresses:
        place.worker(address)
    client = place.client()
    assert client(f"many(*{addresses})") == 8
    expected = client("pids(echos)")
    for _ in range(2):  # the second time, the parents have used the handle more
        assert client(f"in_child({method!r}, pids, echos)") == expected
        assert client(f"in_child({method!r}, sizes, echos, 1 << 20)") == [[1 << 20] * 8] * 3
        found: Any = client(f"list(parents.of.call({method!r}, echos).get(timeout=120).values())")
        assert found == [[expected, [[1 << 20] * 8] * 3]] * 2
        assert client("sizes(echos, 10)") == [[10] * 8] * 3
