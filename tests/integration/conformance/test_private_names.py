"""Private names that public programs import, each used as the program that its test names does."""

import asyncio
import concurrent.futures
import functools
import os

import pytest

from monarch._rust_bindings.monarch_hyperactor.pytokio import PythonTask
from monarch._src.actor.concurrent import _explicit_response_signature
from monarch._src.spmd.actor import SPMDActor
from monarch.actor import (
    Actor,
    ActorError,
    Future,
    concurrent_endpoint,
    context,
    endpoint,
)

WAIT = 60


def in_bytes(torch, storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage)


# --- verl: codecs of its own ---------------------------------------------------------------------

CODEC = """
import pickle
import torch
from monarch._src.actor import pickle as messages

USED = []
before = None

def install():
    global before
    kind = torch.storage.UntypedStorage
    messages._ensure_torch_pickle()
    messages._Pickler._init_torch_dispatch()
    before = before or messages._Pickler._dispatch_table[kind]
    messages._Pickler._dispatch_table[kind] = reduce
    messages._TorchPickler.dispatch_table[kind] = reduce

def reduce(storage):
    if storage.device.type != "cpu":
        return before(storage)
    USED.append("sent")
    data = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
    return rebuild, (storage.nbytes(), pickle.PickleBuffer(memoryview(data)))

def rebuild(nbytes, data):
    USED.append("received")
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        memoryview(tensor.numpy())[:] = memoryview(data).cast("B")
    return tensor.untyped_storage()
"""

BOOTSTRAP = """
import runpy
from storage_codec import install

if __name__ == "__main__":
    install()
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__")
"""

WITH_CODEC = """
import os
import torch, storage_codec
from monarch.actor import Actor, default_bootstrap_cmd, endpoint, this_host

class Echo(Actor):
    @endpoint
    def echo(self, value):
        return value, list(storage_codec.USED)

storage_codec.install()
default = default_bootstrap_cmd()
command = type(default)(
    default.program, default.arg0, ["-m", "storage_bootstrap"], dict(default.env)
).with_env({"PYTHONPATH": f"{os.getcwd()}:{os.environ.get('PYTHONPATH', '')}"})
procs = this_host().spawn_procs(per_host={"procs": 1}, bootstrap_command=command)
procs.initialized.get(timeout=60)
for size in (0, 100, 8192, 200_000):
    source = (torch.arange(size) % 251).to(torch.uint8).untyped_storage()
    echo = procs.spawn(f"echo{size}", Echo)
    storage_codec.USED.clear()
    back, used = echo.echo.call_one({"storages": [source]}).get(timeout=60)
    [storage] = back["storages"]
    same = torch.equal(*(torch.empty(0, dtype=torch.uint8).set_(s) for s in (source, storage)))
    print(type(storage).__name__, same, used[-1], storage_codec.USED)
procs.stop().get()
"""


def test_a_codec_of_the_bootstrap_serves_all_messages(program, tmp_path):
    """verl replaces that of storages at the start of each worker, before it becomes one."""
    pytest.importorskip("torch")
    (tmp_path / "storage_codec.py").write_text(CODEC)
    (tmp_path / "storage_bootstrap.py").write_text(BOOTSTRAP)
    done = program(WITH_CODEC)
    assert done.stdout.splitlines() == ["UntypedStorage True received ['sent', 'received']"] * 4


class Reference:
    """What verl's store gives out: sent by a reducer for exactly this class."""

    def __init__(self, store, key):
        self.store, self.key = store, key

    def __reduce__(self):
        raise TypeError("sent without its reducer")


class Plain:
    key = "plain"


def reduce_reference(reference):
    return Reference, (reference.store, reference.key)


class Keys(Actor):
    @endpoint
    def key(self, references):
        return [reference.key for reference in references]


def test_a_codec_for_a_class_of_the_program(single):
    pytest.importorskip("torch")
    import monarch._src.actor.pickle as native_pickle

    native_pickle._ensure_torch_pickle()
    native_pickle._TorchPickler.dispatch_table[Reference] = reduce_reference
    native_pickle._Pickler._dispatch_table[Reference] = reduce_reference
    try:
        references = [Reference("store", key) for key in "ab"]
        mesh = single.spawn("keys", Keys)
        assert mesh.key.call_one(references).get(timeout=WAIT) == ["a", "b"]
        saved, buffer = native_pickle.flatten(references, lambda part: part == "a")
        assert saved == ["a"]
        first, second = native_pickle.unflatten(buffer.freeze().read(), ["A"])
        assert (first.key, second.key) == ("A", "b")
    finally:
        del native_pickle._TorchPickler.dispatch_table[Reference]
        del native_pickle._Pickler._dispatch_table[Reference]


def test_a_codec_of_flatten_is_none_of_messages(single):
    pytest.importorskip("torch")
    from monarch._src.actor import pickle as native_pickle

    native_pickle._Pickler._dispatch_table[Plain] = lambda plain: (str, ("reduced",))
    try:
        _, buffer = native_pickle.flatten([Plain()], lambda part: False)
        assert native_pickle.unflatten(buffer.freeze(), []) == ["reduced"]
        assert single.spawn("keys", Keys).key.call_one([Plain()]).get(timeout=WAIT) == ["plain"]
    finally:
        del native_pickle._Pickler._dispatch_table[Plain]


@pytest.mark.ours("there a buffer has to be frozen")
def test_a_codec_in_the_table_of_flatten_is_none_of_cloudpickle():
    import cloudpickle

    from monarch._src.actor import pickle as native_pickle

    native_pickle._Pickler.dispatch_table[Plain] = lambda plain: (str, ("reduced",))
    try:
        assert isinstance(cloudpickle.loads(cloudpickle.dumps(Plain())), Plain)
        saved, buffer = native_pickle.flatten([Plain()], lambda part: False)
        assert native_pickle.unflatten(buffer, saved) == ["reduced"]
    finally:
        del native_pickle._Pickler.dispatch_table[Plain]


def test_an_object_is_taken_apart_into_its_storages(single):
    """verl copies them into one piece of shared memory; references to actors stay as they are."""
    torch = pytest.importorskip("torch")
    from monarch._src.actor.actor_mesh import ActorMesh
    from monarch._src.actor.pickle import flatten, unflatten

    typed, untyped = torch.storage.TypedStorage, torch.storage.UntypedStorage
    base = torch.arange(6.0)
    mesh = single.spawn("keys", Keys)
    value = {"whole": base, "part": base[2:4], "bare": base.untyped_storage(), "to": mesh, "n": 1}
    saved, buffer = flatten(value, lambda part: type(part) in (typed, untyped, ActorMesh))
    data = buffer.freeze().read()

    copies = {}
    values = []
    for item in saved:
        if type(item) is ActorMesh:
            values.append(item)
            continue
        storage = item._untyped_storage if type(item) is typed else item
        copy = copies.setdefault(id(storage), storage.clone())
        values.append(
            copy
            if type(item) is untyped
            else typed(wrap_storage=copy, dtype=item.dtype, _internal=True)
        )
    found = unflatten(data, values)

    assert len(data) < 1000
    assert len(copies) == 1
    assert found["to"] is mesh
    assert torch.equal(found["whole"], base)
    found["part"][0] = 9
    assert found["whole"].tolist() == [0, 1, 9, 3, 4, 5]
    assert in_bytes(torch, found["bare"]).view(torch.float32)[2] == 9
    assert base[2] == 2


@pytest.mark.ours("there a missing value ends the iteration, or worse")
def test_too_few_values_are_an_error():
    from monarch._src.actor.pickle import flatten, unflatten

    _, buffer = flatten([1, 2, 3], lambda part: part in (1, 3))
    with pytest.raises(ValueError, match="there are only 1"):
        unflatten(buffer.freeze(), ["one"])


def test_a_codec_is_tried_without_an_actor():
    torch = pytest.importorskip("torch")
    from monarch._rust_bindings.monarch_hyperactor import pickle as monarch_pickle

    source = {"weights": torch.arange(5000.0), "name": "layer"}
    message = monarch_pickle.pickle(source)
    restored = message.unpickle()
    assert torch.equal(restored["weights"], source["weights"])
    restored["weights"][0] = 7
    assert source["weights"][0] == 0


@pytest.mark.ours("the reference cannot load a bare storage")
def test_a_bare_storage_is_tried_without_an_actor():
    torch = pytest.importorskip("torch")
    from monarch._rust_bindings.monarch_hyperactor import pickle as monarch_pickle

    source = torch.arange(8192, dtype=torch.uint8).untyped_storage()
    restored = monarch_pickle.pickle(source).unpickle()
    assert isinstance(restored, torch.storage.UntypedStorage)
    assert bytes(restored) == bytes(source)


# --- verl: tasks ---------------------------------------------------------------------------------


class Store(Actor):
    """Has endpoints that are handled one after the other, until they are wrapped."""

    def __init__(self):
        self.values = {}
        self.changed = asyncio.Event()

    @endpoint
    async def get(self, key, *, wait=False):
        if wait:
            await self.changed.wait()
        return self.values[key]

    @endpoint
    async def put(self, key, value):
        self.values[key] = value
        self.changed.set()


def wrap(name, original):
    """Return an endpoint that answers by a port, so that others are handled meanwhile."""
    method = original._method

    @functools.wraps(method)
    async def run(self, port, *args, **kwargs):
        try:
            response = port.resolve_and_send(await method(self, *args, **kwargs))
            if isinstance(response, PythonTask):
                await Future._from_coro(response)
            else:
                await response
        except Exception as error:
            actor = context().actor_instance
            port.exception(ActorError(error, f"Actor call {actor.name}.{name} failed."))

    run.__signature__ = _explicit_response_signature(method, already_explicit=False)
    wrapped = concurrent_endpoint(
        run,
        propagate=original._propagator,
        explicit_response_port=True,
        instrument=original._instrument,
    )
    wrapped.__set_name__(Store, name)
    return wrapped


for _name in ("get", "put"):
    setattr(Store, _name, wrap(_name, Store.__dict__[_name]))


@pytest.mark.ours("verl pins a later release")
def test_endpoints_of_another_package_are_wrapped_to_overlap(single):
    store = single.spawn("store", Store)
    waits = store.get.call_one("a", wait=True)
    store.put.call_one("a", 5).get(timeout=WAIT)
    assert waits.get(timeout=WAIT) == 5
    with pytest.raises(ActorError, match=r"store\.get failed") as caught:
        store.get.call_one("b").get(timeout=WAIT)
    assert isinstance(caught.value.exception, KeyError)
    with pytest.raises((TypeError, ActorError)):
        store.get.call_one("a", 1, 2).get(timeout=WAIT)


@pytest.mark.ours("verl pins a later release")
def test_a_finaliser_starts_the_stop_of_a_mesh_and_close_waits_for_it(fresh):
    procs = fresh()
    keys = procs.spawn("keys", Keys)
    assert keys.key.call_one([]).get(timeout=WAIT) == []
    released = [procs.stop()._take_inner().spawn_handle()]
    while released:
        released[-1].get(timeout=WAIT)
        released.pop()
    with pytest.raises(Exception, match=r".") as caught:
        keys.key.call_one([]).get(timeout=WAIT)
    assert not isinstance(caught.value, TimeoutError)


@pytest.mark.ours("verl pins a later release")
def test_a_future_awaits_a_task(fresh):
    async def stop():
        task = fresh().stop()._take_inner()
        assert isinstance(task, PythonTask)
        await Future._from_coro(task)
        return "stopped"

    assert asyncio.run(stop()) == "stopped"


# --- other programs ------------------------------------------------------------------------------


class Threads(Actor):
    @endpoint
    def names(self):
        from monarch._src.actor.actor_mesh import _set_context

        here = context()

        def name():
            return context().actor_instance.name

        def name_there():
            _set_context(here)
            return name()

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return [pool.submit(work).result() == name() for work in (name, name_there)]


def test_a_thread_acts_for_the_actor_that_started_it(single):
    assert single.spawn("threads", Threads).names.call_one().get(timeout=WAIT) == [False, True]


def test_forge_configures_tcp_before_it_attaches_to_workers(program):
    done = program(
        """
        from monarch._rust_bindings.monarch_hyperactor.channel import ChannelTransport
        from monarch._src.actor.actor_mesh import configure
        from monarch.config import get_runtime_config

        configure(default_transport=ChannelTransport.TcpWithHostname)
        print(get_runtime_config()["default_transport"])
        """
    )
    assert done.stdout == "tcp(Hostname)\n"


class Trainer(SPMDActor):
    @endpoint
    def run(self, master_addr, master_port):
        self._setup_env(master_addr, master_port)
        return [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")]


def test_the_trainers_of_forge_set_the_variables_of_torchrun(pair):
    trainers = pair.spawn("trainers", Trainer)
    assert trainers.run.call("127.0.0.1", 1234).get(timeout=WAIT).values() == [
        ["127.0.0.1", "1234", "0", "2"],
        ["127.0.0.1", "1234", "1", "2"],
    ]


def test_torchstore_asks_for_rdma_before_it_makes_buffers(single):
    from monarch._rust_bindings.rdma import rdma_supported
    from monarch.config import configured

    with configured(rdma_disable_ibverbs=True, rdma_allow_tcp_fallback=True):
        assert rdma_supported() is True
    with configured(rdma_disable_ibverbs=True, rdma_allow_tcp_fallback=False):
        assert rdma_supported() is False


@pytest.mark.ours("it is of early releases only")
def test_the_replicas_of_torchft_set_the_variables_of_torchrun(single):
    pytest.importorskip("torch")
    from monarch.utils import setup_env_for_distributed

    class Variables(Actor):
        @endpoint
        def rank(self):
            return os.environ["RANK"], os.environ["WORLD_SIZE"]

    asyncio.run(setup_env_for_distributed(single))
    assert single.spawn("env", Variables).rank.call_one().get(timeout=WAIT) == ("0", "1")


def test_a_job_of_processes(faults):
    from monarch._src.job.process import ProcessJob

    job = ProcessJob({"hosts": 1})
    try:
        procs = job.state(cached_path=None).hosts.spawn_procs({"gpus": 2})
        keys = procs.spawn("keys", Keys)
        assert keys.key.call([]).get(timeout=WAIT).values() == [[], []]
    finally:
        job.kill()


class Dies(Actor):
    @endpoint
    def die(self):
        os._exit(1)


def test_a_fault_hook_counts_and_reports_the_failures_of_meshes(fresh, faults, monkeypatch):
    import monarch.actor
    from monarch._rust_bindings.monarch_hyperactor.telemetry import instant_event
    from monarch._src.actor.supervision import MeshFailure

    kinds = []

    def hook(failure):
        kinds.append(isinstance(failure, MeshFailure))
        instant_event(f"unhandled failure: {failure}")
        faults(failure)

    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", hook)
    fresh().spawn("dies", Dies).die.broadcast()
    while "dies" not in str(faults.next()):
        pass
    assert set(kinds) == {True}
