"""Definitions of scripts travel: objects, classes, functions and errors of ``__main__``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import get_active_mesh, inspect, remote
from monarch._tensors.errors import RemoteException
from monarch.actor import Channel, send

pytestmark = pytest.mark.torch

SCRIPT = """
import dataclasses
import typing
import torch
from monarch import call_on_shard_and_fetch, inspect, remote
from monarch.actor import this_host
from monarch.common.pipe import remote_generator
from monarch.opaque_object import OpaqueObject

@dataclasses.dataclass(frozen=True)
class Settings:
    factor: int

class Box:
    def __init__(self, settings):
        self.settings = settings
    def get(self):
        return self.settings

class Pair(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

class Strange(Exception):
    pass

def pairs(pipe, settings):
    while True:
        pipe.send(Pair(torch.full((2,), float(settings.factor)), torch.zeros(1)))

@remote_generator(pairs)
def pairs_of(pipe, settings):
    while True:
        yield Pair(torch.empty(2), torch.empty(1))

def times(x, settings):
    return x * settings.factor

def fail(x):
    raise Strange("so")

three = Settings(3)
procs = this_host().spawn_procs({"gpus": 2})
with procs.activate():
    x = torch.ones(2)
    found = [
        inspect(remote(times)(x, three)).tolist(),
        inspect(remote(times, propagate=lambda x, settings: x.clone())(x, three)).tolist(),
        remote(lambda x, settings: settings.factor).call(x, three).get().item(gpus=1),
        remote(lambda: Settings(4)).choose().get(),
        remote(lambda: lambda: 5).choose().get()(),
        call_on_shard_and_fetch(remote(lambda settings: settings), three).result(),
        OpaqueObject(Box, three).call_method_on_shard_and_fetch("get").result(),
        inspect(pairs_of(three).recv().x).tolist(),
        inspect({"settings": three, "x": x})["settings"],
    ]
    try:
        inspect(remote(fail, propagate=lambda x: x.clone())(x))
    except Exception as error:
        found.append(type(error.original) is Strange)
assert found == [
    [3.0, 3.0], [3.0, 3.0], 3, Settings(4), 5, three, three, [3.0, 3.0], three, True
], found
procs.stop().get()
print("all of it")
"""


def test_objects_that_the_script_defines_travel(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.stdout == "all of it\n", ended.stderr
    assert ended.returncode == 0


class Unreadable:
    """An object whose pickle cannot be read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_an_argument_that_the_processes_cannot_read_is_an_error_of_that_call(active: Any) -> None:
    first = remote(lambda _: torch.ones(1), propagate=lambda _: torch.ones(1))
    with pytest.raises(RemoteException, match="invalid literal for int"):
        inspect(first(Unreadable()))
    with pytest.raises(RemoteException, match="invalid literal for int"):
        remote(lambda _: 1).choose(Unreadable()).get(timeout=60)
    assert inspect(torch.ones(1)).item() == 1


def test_a_remote_function_answers_to_a_port(active: Any) -> None:
    port, receiver = Channel[Any].open()
    x = torch.ones(2) * get_active_mesh().rank("gpu")
    send(remote(lambda x: x.sum().item()), (x,), {}, port)
    assert [receiver.recv().get(timeout=60) for _ in range(4)] == [0, 2, 0, 2]
    with get_active_mesh().slice(host=1, gpu=1).activate():
        send(remote(lambda x: x.sum().item()), (), {"x": x}, port, "choose")
    assert receiver.recv().get(timeout=60) == 2

    def fail(x: Any) -> None:
        raise LookupError("no such thing")

    send(remote(fail), (x,), {}, port, "choose")
    with pytest.raises(RemoteException, match="no such thing"):
        receiver.recv().get(timeout=60)
    with pytest.raises(ValueError, match="selection must be"):
        send(remote(fail), (x,), {}, port, "some")  # type: ignore[arg-type]


def test_an_error_of_a_broadcast_is_not_lost(mesh: Any) -> None:
    def fail() -> None:
        raise LookupError("nobody waits for this")

    with mesh.slice(host=1).activate():
        remote(fail).broadcast()
    with pytest.raises(RemoteException, match="nobody waits") as raised:
        mesh.client.sync()
    assert raised.value.ranks == [2, 3]


DEBUGGED = """
import os, socket
import torch
from monarch import inspect, remote
from monarch.actor import debug_controller, this_host

def stop(x):
    import pdb
    pdb.set_trace()
    return x + 1

os.environ["MONARCH_DEBUG_SERVER_PORT"] = "0"
procs = this_host().spawn_procs({"gpus": 1})
with procs.activate():
    y = remote(stop, propagate=lambda x: x.clone())(torch.ones(1))
    y * 2
    remote(lambda: 1).choose()  # sends what was issued
    debug_controller().wait_pending_session.call_one().get(timeout=120)
    with socket.create_connection(debug_controller().address.call_one().get(timeout=60)) as person:
        person.sendall(b"continue\\nquit\\n")
        while person.recv(4096):
            pass
    print(inspect(y).item())
procs.stop().get()
"""


def test_set_trace_of_pdb_reaches_the_debugger(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DEBUGGED)
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.stdout.splitlines()[-1] == "2.0", ended.stderr
    assert ended.returncode == 0
