"""Defining actors: kinds, endpoint options, construction, concurrency."""

import asyncio
import functools
import logging
import threading

import pytest

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_rank,
    endpoint,
    send,
    this_host,
    this_proc,
)

WAIT = 60


def one(procs):
    return procs.slice(**dict.fromkeys(procs.sizes, 0))


# --- the base class ------------------------------------------------------------------------------


class NoSuperInit(Actor):
    def __init__(self, base):
        self.base = base

    @endpoint
    def add(self, x):
        return self.base + x


def test_a_subclass_needs_no_super_init(pair):
    mesh = pair.spawn("adders", NoSuperInit, 10)
    assert mesh.add.call(1).get(timeout=WAIT).values() == [11, 11]


class Bare(Actor):
    pass


@pytest.mark.parametrize("member", ["_ndslice", "_labels", "initialized"])
def test_mesh_properties_of_an_instance_are_not_implemented(member):
    with pytest.raises(NotImplementedError, match="actor implementations are not meshes"):
        getattr(Bare(), member)


@pytest.mark.parametrize(
    "use",
    [
        lambda actor: actor._new_with_shape(None),
        lambda actor: actor.stop(),
        lambda actor: actor.slice(gpus=0),
    ],
    ids=["_new_with_shape", "stop", "slice"],
)
def test_mesh_methods_of_an_instance_are_not_implemented(use):
    with pytest.raises(NotImplementedError, match="actor implementations are not meshes"):
        use(Bare())


class Logs(Actor):
    @endpoint
    def facts(self):
        return self.logger.name, self.logger.level, self.logger is self.logger

    @endpoint
    def same_as_logging(self):
        return self.logger is logging.getLogger("Logs")


def test_logger_is_named_after_the_class_and_at_debug_level(pair):
    mesh = one(pair).spawn("logs", Logs)
    assert mesh.facts.call_one().get(timeout=WAIT) == ("Logs", logging.DEBUG, True)
    assert mesh.same_as_logging.call_one().get(timeout=WAIT) is True


def test_base_undeliverable_hook_says_not_handled():
    assert Bare()._handle_undeliverable_message(None) is False


# --- kinds ---------------------------------------------------------------------------------------


class SyncKind(Actor):
    def __init__(self):
        self.init_thread = threading.get_ident()
        self.local = threading.local()
        self.local.value = "from init"
        self.init_has_loop = _has_loop()

    @endpoint
    def facts(self):
        return {
            "same thread": threading.get_ident() == self.init_thread,
            "local": getattr(self.local, "value", None),
            "loop": _has_loop(),
            "init loop": self.init_has_loop,
            "context": context().actor_instance.name,
        }


class AsyncKind(SyncKind):
    @endpoint
    async def facts(self):
        return {
            "same thread": threading.get_ident() == self.init_thread,
            "local": getattr(self.local, "value", None),
            "loop": _has_loop(),
            "init loop": self.init_has_loop,
            "context": context().actor_instance.name,
            "context in to_thread": await asyncio.to_thread(lambda: context().actor_instance.name),
        }


def _has_loop():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def test_sync_actor_has_a_thread_of_its_own_without_loop(pair):
    mesh = one(pair).spawn("kind", SyncKind)
    for _ in range(2):
        assert mesh.facts.call_one().get(timeout=WAIT) == {
            "same thread": True,
            "local": "from init",
            "loop": False,
            "init loop": False,
            "context": "kind",
        }


def test_async_actor_has_a_loop_of_its_own(pair):
    mesh = one(pair).spawn("kind", AsyncKind)
    for _ in range(2):
        assert mesh.facts.call_one().get(timeout=WAIT) == {
            "same thread": True,
            "local": "from init",
            "loop": True,
            "init loop": True,
            "context": "kind",
            "context in to_thread": "kind",
        }


class LoopId(Actor):
    @endpoint
    async def loop(self):
        return id(asyncio.get_running_loop()), threading.get_ident()


def test_async_actors_of_a_proc_have_different_loops_and_threads(pair):
    first = one(pair).spawn("first", LoopId).loop.call_one().get(timeout=WAIT)
    second = one(pair).spawn("second", LoopId).loop.call_one().get(timeout=WAIT)
    assert first[0] != second[0]
    assert first[1] != second[1]


class Blocker(Actor):
    @endpoint
    def block(self, port):
        gate, receiver = Channel.open()
        port.send(gate)
        return receiver.recv().get(timeout=WAIT)


class Opener(Actor):
    @endpoint
    def ping(self):
        return "pong"


def test_a_blocking_endpoint_does_not_block_other_actors_of_the_proc(pair):
    blocker = one(pair).spawn("blocker", Blocker)
    opener = one(pair).spawn("opener", Opener)
    port, gates = Channel.open()
    blocked = blocker.block.call_one(port)
    gate = gates.recv().get(timeout=WAIT)
    assert opener.ping.call_one().get(timeout=WAIT) == "pong"
    gate.send("released")
    assert blocked.get(timeout=WAIT) == "released"


class Mixed(Actor):
    @endpoint
    def a_sync_one(self):
        pass

    @endpoint
    async def an_async_one(self):
        pass


class MixedByInheritance(SyncKind):
    @endpoint
    async def other(self):
        pass


class SyncWithAsyncCleanup(Actor):
    @endpoint
    def ping(self):
        pass

    async def __cleanup__(self, exc):
        pass


class AsyncWithSyncCleanup(Actor):
    @endpoint
    async def ping(self):
        pass

    def __cleanup__(self, exc):
        pass


class SyncWithAsyncSupervise(Actor):
    @endpoint
    def ping(self):
        pass

    async def __supervise__(self, failure):
        return True


class SyncWithAsyncUndeliverable(Actor):
    @endpoint
    def ping(self):
        pass

    async def _handle_undeliverable_message(self, message):
        return True


@pytest.mark.parametrize(
    ("cls", "fragment"),
    [
        (Mixed, r"both async and sync endpoints"),
        (MixedByInheritance, r"both async and sync endpoints"),
        (SyncWithAsyncCleanup, r"sync endpoints, but an async __cleanup__"),
        (AsyncWithSyncCleanup, r"async endpoints, but a synchronous __cleanup__"),
        (SyncWithAsyncSupervise, r"sync endpoints, but an async __supervise__"),
        (SyncWithAsyncUndeliverable, r"async _handle_undeliverable_message"),
    ],
)
def test_mixed_kinds_are_refused_by_spawn(pair, cls, fragment):
    with pytest.raises(ValueError, match=fragment) as caught:
        pair.spawn("mixed", cls)
    assert str(caught.value).startswith(str(cls))


def test_the_refusal_lists_both_names(pair):
    with pytest.raises(ValueError, match="a_sync_one") as caught:
        pair.spawn("mixed", Mixed)
    assert "an_async_one" in str(caught.value)


class AsyncWithSyncHooks(Actor):
    @endpoint
    async def ping(self):
        return "pong"

    def __supervise__(self, failure):
        return True

    def _handle_undeliverable_message(self, message):
        return True


def test_an_async_actor_may_have_sync_hooks(pair):
    mesh = one(pair).spawn("hooks", AsyncWithSyncHooks)
    assert mesh.ping.call_one().get(timeout=WAIT) == "pong"


class SyncNested(Actor):
    @endpoint
    def relay(self, target):
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = target.ping.call_one().get(timeout=WAIT)
        return value, [str(w.message) for w in caught]


class AsyncNested(Actor):
    @endpoint
    async def relay(self, target):
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = target.ping.call_one().get(timeout=WAIT)
        return value, [(w.category.__name__, str(w.message)) for w in caught]

    @endpoint
    async def await_relay(self, target):
        return await target.ping.call_one()


def test_get_inside_a_sync_endpoint_is_fine(pair):
    target = pair.slice(gpus=1).spawn("target", Opener)
    nested = pair.slice(gpus=0).spawn("nested", SyncNested)
    assert nested.relay.call_one(target).get(timeout=WAIT) == ("pong", [])


def test_get_inside_an_async_endpoint_works_and_warns(pair):
    target = pair.slice(gpus=1).spawn("target", Opener)
    nested = pair.slice(gpus=0).spawn("nested", AsyncNested)
    value, warned = nested.relay.call_one(target).get(timeout=WAIT)
    assert value == "pong"
    assert any(kind == "UserWarning" and "event loop" in text for kind, text in warned), warned


def test_await_inside_an_async_endpoint(pair):
    target = pair.slice(gpus=1).spawn("target", Opener)
    nested = pair.slice(gpus=0).spawn("nested", AsyncNested)
    assert nested.await_relay.call_one(target).get(timeout=WAIT) == "pong"


# --- @endpoint -----------------------------------------------------------------------------------


def propagator(*args):
    return args


class Options(Actor):
    @endpoint
    def bare(self):
        return "bare"

    @endpoint()
    def called(self):
        return "called"

    @endpoint(instrument=False)
    def quiet(self):
        return "quiet"

    @endpoint(propagate=propagator)
    def propagated(self, x):
        return x

    @endpoint(propagate="inspect")
    def inspected(self, x):
        return x

    @endpoint(explicit_response_port=True)
    def ported(self, port, x, y=2):
        port.send((x, y))

    @endpoint
    def calls_itself(self):
        try:
            self.bare()
        except TypeError:
            return "TypeError", type(self).bare._method(self)
        return "no error", None

    @endpoint
    def instance_access(self):
        return self.bare is type(self).bare


def test_every_spelling_of_the_decorator_works(pair):
    mesh = one(pair).spawn("options", Options)
    assert mesh.bare.call_one().get(timeout=WAIT) == "bare"
    assert mesh.called.call_one().get(timeout=WAIT) == "called"
    assert mesh.quiet.call_one().get(timeout=WAIT) == "quiet"
    assert mesh.propagated.call_one(5).get(timeout=WAIT) == 5
    assert mesh.inspected.call_one(6).get(timeout=WAIT) == 6
    assert mesh.ported.call_one(1).get(timeout=WAIT) == (1, 2)
    assert mesh.ported.call_one(1, y=3).get(timeout=WAIT) == (1, 3)


def test_attributes_of_the_descriptor():
    from monarch._src.actor.endpoint import EndpointProperty

    assert isinstance(Options.bare, EndpointProperty)
    assert Options.bare._method.__name__ == "bare"
    assert Options.bare._propagator is None
    assert Options.bare._explicit_response_port is False
    assert Options.bare._instrument is True
    assert Options.quiet._instrument is False
    assert Options.propagated._propagator is propagator
    assert Options.inspected._propagator == "inspect"
    assert Options.ported._explicit_response_port is True


def test_an_instance_sees_the_descriptor_and_cannot_call_it(pair):
    assert Options().bare is Options.bare
    with pytest.raises(TypeError, match="not callable"):
        Options().bare()
    mesh = one(pair).spawn("options", Options)
    assert mesh.calls_itself.call_one().get(timeout=WAIT) == ("TypeError", "bare")
    assert mesh.instance_access.call_one().get(timeout=WAIT) is True


class Parent(Actor):
    @endpoint
    def name(self):
        return "parent"

    @endpoint
    def inherited(self):
        return f"inherited by {type(self).__name__}"

    @endpoint
    def hidden(self):
        return "parent"

    def helper(self):
        return "parent helper"

    @endpoint
    def via_helper(self):
        return self.helper()


class Child(Parent):
    @endpoint
    def name(self):
        return "child of " + Parent.name._method(self)

    def hidden(self):
        return "plain"

    def helper(self):
        return "child helper"

    @endpoint
    def own(self):
        return "own"


def test_endpoints_are_inherited_and_overridden(pair):
    mesh = one(pair).spawn("child", Child)
    assert mesh.name.call_one().get(timeout=WAIT) == "child of parent"
    assert mesh.inherited.call_one().get(timeout=WAIT) == "inherited by Child"
    assert mesh.via_helper.call_one().get(timeout=WAIT) == "child helper"
    assert mesh.own.call_one().get(timeout=WAIT) == "own"


def test_an_undecorated_override_is_no_endpoint(pair):
    mesh = one(pair).spawn("child", Child)
    with pytest.raises(RuntimeError, match="not annotated as an endpoint"):
        mesh.hidden()
    assert not hasattr(mesh.hidden, "call")


class Mixin:
    @endpoint
    def mixed_in(self):
        return "mixed in"


class WithMixin(Mixin, Actor):
    @endpoint
    def own(self):
        return "own"


def test_endpoints_come_from_mixins_too(pair):
    mesh = one(pair).spawn("mixin", WithMixin)
    assert mesh.mixed_in.call_one().get(timeout=WAIT) == "mixed in"


def _class_with_endpoint(name):
    def method(self):
        return name

    method.__name__ = name
    return type("Collides", (Actor,), {name: endpoint(method)})


@pytest.mark.parametrize(
    "name",
    ["slice", "size", "sizes", "extent", "split", "flatten", "rename", "stop", "initialized"],
)
def test_an_endpoint_must_not_hide_an_attribute_of_the_mesh(pair, name):
    with pytest.raises(ValueError, match="collides with an endpoint name") as caught:
        pair.spawn("collides", _class_with_endpoint(name))
    assert f"attribute={name}" in str(caught.value)


@pytest.mark.parametrize("name", ["get", "put", "items", "values", "item", "send", "name"])
def test_other_names_are_free_for_endpoints(pair, name):
    mesh = one(pair).spawn("free", _class_with_endpoint(name))
    assert getattr(mesh, name).call_one().get(timeout=WAIT) == name


class Defaults(Actor):
    @endpoint
    def all_kinds(self, a, /, b, *rest, c=3, **more):
        return a, b, rest, c, more


def test_every_kind_of_parameter(pair):
    mesh = one(pair).spawn("defaults", Defaults)
    got = mesh.all_kinds.call_one(1, 2, 9, 8, c=4, d=5).get(timeout=WAIT)
    assert got == (1, 2, (9, 8), 4, {"d": 5})
    assert mesh.all_kinds.call_one(1, b=2).get(timeout=WAIT) == (1, 2, (), 3, {})


def wrapped(function):
    @functools.wraps(function)
    def inner(self, *args, **kwargs):
        return "wrapped " + function(self, *args, **kwargs)

    return inner


class Decorated(Actor):
    @endpoint
    @wrapped
    def hello(self, name):
        return f"hello {name}"


def test_endpoint_on_top_of_another_decorator(pair):
    mesh = one(pair).spawn("decorated", Decorated)
    assert mesh.hello.call_one("x").get(timeout=WAIT) == "wrapped hello x"
    with pytest.raises(TypeError):
        mesh.hello.call_one()


# --- explicit response ports ---------------------------------------------------------------------


class Ported(Actor):
    def __init__(self):
        self.kept = None

    @endpoint(explicit_response_port=True)
    def later(self, port, value):
        threading.Timer(0.01, port.send, args=[value]).start()
        return "ignored"

    @endpoint(explicit_response_port=True)
    def raise_it(self, port):
        port.exception(KeyError("through the port"))

    @endpoint(explicit_response_port=True)
    def park(self, port):
        self.kept = port

    @endpoint(explicit_response_port=True)
    def unpark(self, port, value):
        self.kept.send(value)
        port.send("unparked")

    @endpoint(explicit_response_port=True)
    def twice(self, port):
        port.send(1)
        try:
            port.send(2)
        except RuntimeError as error:
            self.second = str(error)
        else:
            self.second = "accepted"

    @endpoint
    def second_result(self):
        return self.second

    @endpoint(explicit_response_port=True)
    def several(self, port, n):
        for i in range(n):
            port.send(i)


def test_another_thread_may_answer(pair):
    mesh = pair.spawn("ported", Ported)
    assert mesh.later.call(7).get(timeout=WAIT).values() == [7, 7]


def test_the_answer_may_come_from_a_later_message(pair):
    mesh = one(pair).spawn("ported", Ported)
    parked = mesh.park.call_one()
    assert mesh.unpark.call_one("value").get(timeout=WAIT) == "unparked"
    assert parked.get(timeout=WAIT) == "value"


def test_port_exception_is_raised_at_the_caller(pair):
    mesh = one(pair).spawn("ported", Ported)
    with pytest.raises((KeyError, ActorError)) as caught:
        mesh.raise_it.call_one().get(timeout=WAIT)
    assert "through the port" in str(caught.value)
    assert mesh.later.call_one(1).get(timeout=WAIT) == 1


def test_the_response_port_of_a_call_takes_one_answer(pair):
    mesh = pair.spawn("ported", Ported)
    assert mesh.twice.call().get(timeout=WAIT).values() == [1, 1]
    for second in mesh.second_result.call().get(timeout=WAIT).values():
        assert "OncePortRef already used" in second


@pytest.mark.parametrize("adverb", ["call_one", "choose"])
def test_a_single_result_is_the_first_answer(pair, adverb):
    """The reference silently drops the second answer; refusing it is correct, too."""
    mesh = one(pair).spawn("ported", Ported)
    assert getattr(mesh.twice, adverb)().get(timeout=WAIT) == 1
    second = mesh.second_result.call_one().get(timeout=WAIT)
    assert second == "accepted" or "OncePortRef already used" in second


def test_stream_takes_as_many_answers_as_there_are_actors(pair):
    mesh = pair.spawn("ported", Ported)
    got = [future.get(timeout=WAIT) for future in mesh.several.stream(3)]
    assert len(got) == 2
    assert set(got) <= {0, 1, 2}


def test_send_with_a_channel_port_takes_every_answer(pair):
    mesh = one(pair).spawn("ported", Ported)
    port, receiver = Channel.open()
    assert send(mesh.several, (3,), {}, port) is None
    assert [receiver.recv().get(timeout=WAIT) for _ in range(3)] == [0, 1, 2]


class PortedRaises(Actor):
    @endpoint(explicit_response_port=True)
    def escape(self, port):
        raise ValueError("escaped")

    @endpoint
    def ping(self):
        return "pong"


def test_an_escaping_exception_kills_the_actor(fresh, faults):
    mesh = fresh().spawn("ported", PortedRaises)
    assert mesh.ping.call_one().get(timeout=WAIT) == "pong"
    with pytest.raises(SupervisionError, match="escaped"):
        mesh.escape.call_one().get(timeout=WAIT)
    assert "escaped" in faults.next().report()
    with pytest.raises(SupervisionError):
        mesh.ping.call_one().get(timeout=WAIT)


# --- the mesh as the user sees it ----------------------------------------------------------------


class Plain(Actor):
    """An actor with public names that are not endpoints."""

    constant = 5

    def __init__(self):
        self.instance_attribute = 1

    @endpoint
    def ping(self):
        return "pong"

    def plain(self, x=0):
        return ("plain", x, current_rank().rank)

    async def coroutine(self):
        return "coroutine"

    @property
    def prop(self):
        return 1

    @classmethod
    def class_method(cls):
        return 1

    @staticmethod
    def static_method():
        return 1


@pytest.mark.parametrize("name", ["plain", "prop", "class_method"])
def test_public_names_that_are_no_endpoints_cannot_be_called(pair, name):
    mesh = pair.spawn("plain", Plain)
    with pytest.raises(RuntimeError, match="not annotated as an endpoint") as caught:
        getattr(mesh, name)()
    assert f".{name} " in str(caught.value)


@pytest.mark.parametrize("name", ["nosuch", "instance_attribute"])
def test_unknown_names_are_attribute_errors(pair, name):
    mesh = pair.spawn("plain", Plain)
    with pytest.raises(AttributeError, match=name):
        getattr(mesh, name)


def test_as_endpoint_calls_a_plain_method(pair):
    mesh = pair.spawn("plain", Plain)
    assert as_endpoint(mesh.plain).call(3).get(timeout=WAIT).values() == [
        ("plain", 3, 0),
        ("plain", 3, 1),
    ]
    assert as_endpoint(one(mesh).plain).call_one(x=4).get(timeout=WAIT) == ("plain", 4, 0)


def test_wrong_arguments_of_as_endpoint_are_a_type_error_here_or_there(pair):
    mesh = one(pair).spawn("plain", Plain)
    with pytest.raises((TypeError, ActorError), match=r"TypeError|arguments"):
        as_endpoint(mesh.plain).call_one(1, 2, 3).get(timeout=WAIT)
    assert mesh.ping.call_one().get(timeout=WAIT) == "pong"


@pytest.mark.parametrize("wrong", [3, len, Plain.plain], ids=["int", "builtin", "function"])
def test_as_endpoint_wants_a_method_of_a_mesh(wrong):
    with pytest.raises(ValueError, match="spawned actor"):
        as_endpoint(wrong)


def test_as_endpoint_of_a_coroutine_on_a_sync_actor_is_a_type_error(pair):
    mesh = one(pair).spawn("plain", Plain)
    with pytest.raises(ActorError, match="async def") as caught:
        as_endpoint(mesh.coroutine).call_one().get(timeout=WAIT)
    assert isinstance(caught.value.exception, TypeError)
    assert mesh.ping.call_one().get(timeout=WAIT) == "pong"


class AsyncPlain(Actor):
    @endpoint
    async def ping(self):
        return "pong"

    def plain(self):
        return _has_loop()

    async def coroutine(self):
        return _has_loop()

    def ported(self, port, x):
        port.send(x)


def test_as_endpoint_on_an_async_actor(pair):
    mesh = one(pair).spawn("plain", AsyncPlain)
    assert as_endpoint(mesh.plain).call_one().get(timeout=WAIT) is False
    assert as_endpoint(mesh.coroutine).call_one().get(timeout=WAIT) is True


def test_as_endpoint_with_an_explicit_port(pair):
    mesh = one(pair).spawn("plain", AsyncPlain)
    ported = as_endpoint(mesh.ported, explicit_response_port=True)
    assert ported.call_one(4).get(timeout=WAIT) == 4


class Dispatches(Actor):
    """Has one endpoint, with a name of verl's."""

    @concurrent_endpoint
    async def __monarch_call__(self, method_name, args, kwargs):
        return getattr(self, method_name)(*args, **kwargs)

    def add(self, x, *, to=0):
        return x + to, context().actor_instance.rank.rank

    def __hidden__(self, x):
        return "hidden", x

    def _helper(self, x):
        return "helper", x

    __table__ = ()


class AsksOther(Actor):
    @endpoint
    async def ask(self, mesh):
        return await mesh.__monarch_call__.call_one("add", (1,), {})


def test_an_endpoint_with_two_underscores_is_called_as_any_other(pair):
    mesh = pair.spawn("dispatches", Dispatches)
    flat = mesh.flatten("rank")
    assert flat.slice(rank=1).__monarch_call__.call_one("add", (3,), {"to": 4}).get(
        timeout=WAIT
    ) == (7, 1)
    run = flat.slice(rank=slice(0, 2)).__monarch_call__
    assert run.call("add", (3,), {}).get(timeout=WAIT).values() == [(3, 0), (3, 1)]
    with pytest.raises(TypeError):
        run.call("add").get(timeout=WAIT)
    with pytest.raises(ValueError, match="spawned actor"):
        as_endpoint(mesh.__monarch_call__)


def test_a_received_mesh_has_such_an_endpoint_too(pair):
    mesh = one(pair).spawn("dispatches", Dispatches)
    asks = one(pair).spawn("asks", AsksOther)
    assert asks.ask.call_one(mesh).get(timeout=WAIT) == (1, 0)


@pytest.mark.parametrize("name", ["__hidden__", "_helper"])
def test_as_endpoint_calls_a_private_method(pair, name):
    mesh = one(pair).spawn("dispatches", Dispatches)
    method = getattr(mesh, name)
    assert as_endpoint(method).call_one(5).get(timeout=WAIT) == (name.strip("_"), 5)
    with pytest.raises(RuntimeError, match="not annotated as an endpoint"):
        method(5)


@pytest.mark.ours("there a private attribute of the class is an object as well")
@pytest.mark.parametrize("name", ["__table__", "__wrapped__", "__deepcopy__", "_nothing"])
def test_other_private_names_are_attribute_errors(pair, name):
    """Python and its libraries ask objects for such names."""
    mesh = pair.spawn("dispatches", Dispatches)
    with pytest.raises(AttributeError):
        getattr(mesh, name)


# --- construction --------------------------------------------------------------------------------


class Keywords(Actor):
    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs

    @endpoint
    def show(self):
        return self.args, self.kwargs


def test_constructor_arguments_arrive(pair):
    mesh = one(pair).spawn("keywords", Keywords, 1, [2], a="b")
    assert mesh.show.call_one().get(timeout=WAIT) == ((1, [2]), {"a": "b"})


def test_the_parameters_of_spawn_have_names(pair):
    mesh = pair.spawn(name="keywords", Class=Keywords, a="b")
    assert mesh.show.call().get(timeout=WAIT).values() == [((), {"a": "b"})] * 2


@pytest.mark.parametrize("keyword", ["name", "Class"])
def test_the_parameters_of_spawn_are_no_constructor_keywords(pair, keyword):
    with pytest.raises(TypeError, match=keyword):
        pair.spawn("keywords", Keywords, **{keyword: 1})


class Strict(Actor):
    def __init__(self, a, *, b):
        self.sum = a + b

    @endpoint
    def get(self):
        return self.sum


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1,), {}), ((1, 2), {"b": 3}), ((1,), {"b": 2, "c": 3})]
)
def test_constructor_arguments_are_checked_by_spawn(pair, args, kwargs):
    with pytest.raises(TypeError):
        pair.spawn("strict", Strict, *args, **kwargs)


class UsesContext(Actor):
    def __init__(self):
        me = context()
        self.facts = {
            "rank": dict(current_rank()),
            "same": me.message_rank == me.actor_instance.rank,
            "proc size": this_proc().size(),
            "host": this_host().size(),
            "name": me.actor_instance.name,
        }
        self.child = this_proc().spawn("helper", Opener)
        self.facts["child"] = self.child.ping.call_one().get(timeout=WAIT)

    @endpoint
    def show(self):
        return self.facts


def test_the_constructor_may_use_the_whole_interface(pair):
    mesh = pair.spawn("uses", UsesContext)
    for point, facts in mesh.show.call().get(timeout=WAIT).items():
        assert facts == {
            "rank": {"gpus": point["gpus"]},
            "same": True,
            "proc size": 1,
            "host": 1,
            "name": "uses",
            "child": "pong",
        }


class SpawnsProcs(Actor):
    def __init__(self):
        self.procs = this_host().spawn_procs({"k": 2})
        self.workers = self.procs.spawn("workers", Opener)

    @endpoint
    def ping_all(self):
        return self.workers.ping.call().get(timeout=WAIT).values()


def test_the_constructor_may_spawn_procs(fresh):
    mesh = fresh().spawn("spawner", SpawnsProcs)
    assert mesh.ping_all.call_one().get(timeout=WAIT) == ["pong", "pong"]


class FailingInit(Actor):
    def __init__(self, rank_that_fails=None):
        if rank_that_fails is None or current_rank().rank == rank_that_fails:
            raise RuntimeError("no luck in init")

    @endpoint
    def ping(self):
        return "pong"


def test_a_failing_constructor_is_a_failure_of_the_mesh(fresh, faults):
    mesh = fresh().spawn("failing", FailingInit)
    with pytest.raises(SupervisionError, match="no luck in init"):
        mesh.ping.call_one().get(timeout=WAIT)
    failure = faults.next()
    assert "no luck in init" in failure.report()
    assert "no luck in init" in str(failure)
    assert failure.mesh_name.startswith("failing-")


def test_each_failing_rank_is_one_failure(fresh, faults):
    mesh = fresh({"gpus": 2}).spawn("failing", FailingInit)
    with pytest.raises(SupervisionError):
        mesh.ping.call().get(timeout=WAIT)
    crashed = sorted(str(faults.next()).partition("crashed_ranks=")[2][:3] for _ in range(2))
    assert crashed == ["[0]", "[1]"]


class NoInit(Actor):
    @endpoint
    def ping(self):
        return "pong"


def test_initialized_means_created_not_constructed(fresh, faults):
    mesh = fresh().spawn("failing", FailingInit)
    assert mesh.initialized.get(timeout=WAIT) is None
    assert "no luck in init" in faults.next().report()


def test_arguments_for_a_class_without_constructor_fail_remotely(fresh, faults):
    mesh = fresh().spawn("noinit", NoInit, 1)
    with pytest.raises(SupervisionError, match="TypeError"):
        mesh.ping.call_one().get(timeout=WAIT)
    assert "TypeError" in faults.next().report()


class AsyncInit(Actor):
    async def __init__(self):
        pass

    @endpoint
    async def ping(self):
        return "pong"


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_an_async_constructor_is_a_failure(fresh, faults):
    mesh = fresh().spawn("asyncinit", AsyncInit)
    with pytest.raises(SupervisionError, match="should return None"):
        mesh.ping.call_one().get(timeout=WAIT)
    assert "should return None" in faults.next().report()


class NeverReady(Actor):
    def __init__(self, port):
        port.send(current_rank().rank)
        threading.Event().wait()

    @endpoint
    def ping(self):
        return "pong"


def test_a_constructor_that_never_returns_can_be_stopped(fresh):
    port, receiver = Channel.open()
    mesh = fresh({"gpus": 2}).spawn("never", NeverReady, port)
    assert {receiver.recv().get(timeout=WAIT) for _ in range(2)} == {0, 1}
    mesh.stop().get(timeout=WAIT)


# --- concurrent_endpoint -------------------------------------------------------------------------


class Concurrent(Actor):
    def __init__(self):
        self.events = {}
        self.log = []

    @concurrent_endpoint
    async def wait(self, key):
        self.log.append(("start", key))
        event = self.events.setdefault(key, asyncio.Event())
        await event.wait()
        self.log.append(("end", key))
        return f"waited for {key}"

    @endpoint
    async def set(self, key):
        self.events.setdefault(key, asyncio.Event()).set()

    @concurrent_endpoint
    async def fail(self, error):
        await asyncio.sleep(0)
        raise error

    @concurrent_endpoint
    async def cancel_me(self):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    @concurrent_endpoint(explicit_response_port=True)
    async def ported(self, port, x):
        await asyncio.sleep(0)
        port.send(x)

    @concurrent_endpoint
    async def rank(self):
        await asyncio.sleep(0)
        return dict(current_rank()), context().actor_instance.name

    @concurrent_endpoint
    async def call_self(self, mesh, x):
        return await mesh.ported.call_one(x)

    @endpoint
    async def get_log(self):
        return self.log


class InheritsConcurrent(Concurrent):
    @concurrent_endpoint
    async def own(self):
        return "own"


def test_a_concurrent_endpoint_lets_later_messages_in(pair):
    mesh = one(pair).spawn("concurrent", Concurrent)
    first, second = mesh.wait.call_one("a"), mesh.wait.call_one("b")
    mesh.set.call_one("b").get(timeout=WAIT)
    assert second.get(timeout=WAIT) == "waited for b"
    mesh.set.call_one("a").get(timeout=WAIT)
    assert first.get(timeout=WAIT) == "waited for a"
    assert mesh.get_log.call_one().get(timeout=WAIT) == [
        ("start", "a"),
        ("start", "b"),
        ("end", "b"),
        ("end", "a"),
    ]


def test_bodies_start_in_send_order(pair):
    mesh = one(pair).spawn("concurrent", Concurrent)
    waiting = [mesh.wait.call_one(i) for i in range(100)]
    for i in range(100):
        mesh.set.broadcast(i)
    assert [f.get(timeout=WAIT) for f in waiting] == [f"waited for {i}" for i in range(100)]
    log = mesh.get_log.call_one().get(timeout=WAIT)
    assert [key for what, key in log if what == "start"] == list(range(100))


def test_concurrent_endpoints_with_every_adverb(pair):
    mesh = pair.spawn("concurrent", InheritsConcurrent)
    values = mesh.rank.call().get(timeout=WAIT).values()
    assert values == [({"gpus": 0}, "concurrent"), ({"gpus": 1}, "concurrent")]
    assert sorted(f.get(timeout=WAIT)[0]["gpus"] for f in mesh.rank.stream()) == [0, 1]
    assert mesh.own.choose().get(timeout=WAIT) == "own"
    assert mesh.own.broadcast() is None
    assert one(mesh).own.call_one().get(timeout=WAIT) == "own"
    assert one(mesh).ported.call_one(3).get(timeout=WAIT) == 3


def test_a_concurrent_endpoint_may_await_its_own_actor(pair):
    mesh = one(pair).spawn("concurrent", Concurrent)
    assert mesh.call_self.call_one(mesh, 8).get(timeout=WAIT) == 8


class Base(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [ValueError("bad"), Base("base"), SystemExit(3)], ids=["Exception", "Base", "exit"]
)
def test_a_concurrent_failure_goes_to_the_caller_and_the_actor_lives(pair, error):
    mesh = one(pair).spawn("concurrent", Concurrent)
    with pytest.raises(ActorError) as caught:
        mesh.fail.call_one(error).get(timeout=WAIT)
    assert "failed" in caught.value.message
    assert ("BaseException" in caught.value.message) == (not isinstance(error, Exception))
    assert mesh.rank.call_one().get(timeout=WAIT)


def test_a_cancelled_body_answers_its_caller(pair):
    mesh = one(pair).spawn("concurrent", Concurrent)
    with pytest.raises(ActorError, match="CancelledError"):
        mesh.cancel_me.call_one().get(timeout=WAIT)
    assert mesh.rank.call_one().get(timeout=WAIT)


def test_arguments_of_concurrent_endpoints_are_checked_by_the_caller(pair):
    mesh = one(pair).spawn("concurrent", Concurrent)
    with pytest.raises(TypeError):
        mesh.wait.call_one()
    with pytest.raises(TypeError):
        mesh.wait.call_one(1, 2)


def test_the_descriptor_of_a_concurrent_endpoint_has_an_explicit_port():
    assert Concurrent.wait._explicit_response_port is True
    assert Concurrent.ported._explicit_response_port is True


def test_concurrent_endpoint_wants_a_coroutine():
    with pytest.raises(ValueError, match="concurrent_endpoint can only wrap async"):

        class _Wrong(Actor):
            @concurrent_endpoint
            def plain(self):
                pass


def test_concurrent_endpoint_is_not_stacked_on_endpoint():
    with pytest.raises(ValueError, match="does not wrap @endpoint"):

        class _Wrong(Actor):
            @concurrent_endpoint
            @endpoint
            async def stacked(self):
                pass


def test_concurrent_endpoint_has_its_own_module():
    import monarch.actor.concurrent

    assert monarch.actor.concurrent.concurrent_endpoint is monarch.actor.concurrent_endpoint


class ConcurrentPortedRaises(Actor):
    @concurrent_endpoint(explicit_response_port=True)
    async def escape(self, port):
        raise ValueError("escaped")


def test_an_exception_escaping_a_concurrent_ported_body_kills_the_actor(fresh, faults):
    mesh = fresh().spawn("ported", ConcurrentPortedRaises)
    with pytest.raises(SupervisionError, match="escaped"):
        mesh.escape.call_one().get(timeout=WAIT)
    assert "escaped" in faults.next().report()


class CancelOnStop(Actor):
    def __init__(self, port):
        self.port = port
        self.cancelled = []

    @concurrent_endpoint
    async def forever(self, key):
        self.port.send(("started", key))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise

    async def __cleanup__(self, exc):
        self.port.send(("cleanup", sorted(self.cancelled)))


def test_outstanding_bodies_are_cancelled_before_cleanup(fresh):
    port, receiver = Channel.open()
    mesh = fresh().spawn("cancel", CancelOnStop, port)
    waiting = [mesh.forever.call_one(key) for key in (1, 2)]
    assert {receiver.recv().get(timeout=WAIT) for _ in range(2)} == {("started", 1), ("started", 2)}
    mesh.stop().get(timeout=WAIT)
    assert receiver.recv().get(timeout=WAIT) == ("cleanup", [1, 2])
    for future in waiting:
        with pytest.raises((SupervisionError, ActorError)):
            future.get(timeout=WAIT)


class Flood(Actor):
    def __init__(self):
        self.handled = 0
        self.task_saw = None

    @endpoint
    async def start(self):
        async def look():
            await asyncio.sleep(0)
            self.task_saw = self.handled

        self.task = asyncio.ensure_future(look())

    @endpoint
    async def handle(self):
        self.handled += 1

    @endpoint
    async def saw(self):
        return self.task_saw, self.handled


def test_a_queue_of_messages_does_not_starve_tasks(pair):
    mesh = one(pair).spawn("flood", Flood)
    mesh.start.broadcast()
    for _ in range(500):
        mesh.handle.broadcast()
    saw, handled = mesh.saw.call_one().get(timeout=WAIT)
    assert handled == 500
    assert saw is not None
    assert saw <= 500
