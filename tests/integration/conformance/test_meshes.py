"""Meshes: the common geometry, and value, actor, proc and host meshes."""

import asyncio
import os
import pickle
import re
from collections.abc import Mapping

import cloudpickle
import pytest

from monarch._rust_bindings.monarch_hyperactor.shape import Extent as BoundExtent
from monarch._rust_bindings.monarch_hyperactor.shape import Point as BoundPoint
from monarch._rust_bindings.monarch_hyperactor.shape import Region, Shape, Slice
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    Actor,
    ActorError,
    Extent,
    HostMesh,
    Point,
    ProcMesh,
    ValueMesh,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)


def shape(**sizes):
    return Shape(list(sizes), Slice.new_row_major(list(sizes.values())))


def letters():
    return ValueMesh(shape(h=2, g=3), list("abcdef"))


class Echo(Actor):
    def __init__(self, value=None):
        self.value = value

    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def rank(self):
        return dict(current_rank())

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def get(self):
        return self.value


class Uses(Actor):
    """An actor that uses the meshes that it receives in messages."""

    @endpoint
    def ping(self, mesh):
        return mesh.rank.call().get().values()

    @endpoint
    def spawn_on(self, procs):
        self.child = procs.spawn("child", Echo, "spawned by reference")
        return self.child.get.call().get().values()

    @endpoint
    def give(self, mesh):
        return mesh

    @endpoint
    def child_procs(self):
        self.procs = this_host().spawn_procs({"k": 2})
        return self.procs

    @endpoint
    def describe(self, mesh):
        return mesh.sizes, type(mesh).__name__


class TriesToStop(Actor):
    @endpoint
    def try_to_stop(self, mesh):
        try:
            mesh.stop().get()
        except Exception as error:
            return type(error).__name__, str(error)
        return "stopped", ""

    @endpoint
    def try_to_shut_down(self, hosts):
        try:
            hosts.shutdown().get()
        except Exception as error:
            return type(error).__name__, str(error)
        return "shut down", ""


# --- geometry, on every kind of mesh -------------------------------------------------------------


@pytest.fixture(scope="module", params=["ProcMesh", "ActorMesh", "ValueMesh"])
def mesh(request, grid):
    if request.param == "ProcMesh":
        return grid
    actors = grid.spawn("echo", Echo)
    return actors if request.param == "ActorMesh" else actors.rank.call().get()


def test_sizes_and_extent(mesh):
    assert mesh.sizes == {"rows": 2, "cols": 2}
    assert list(mesh.sizes) == ["rows", "cols"]
    assert mesh.extent == Extent(["rows", "cols"], [2, 2])
    assert len(mesh) == 4
    assert mesh.size() == 4
    assert mesh.size("rows") == 2
    assert mesh.size(["rows", "cols"]) == 4
    assert mesh.size([]) == 1


def test_size_of_an_unknown_dimension(mesh):
    with pytest.raises(KeyError, match="does not have dimension 'zz'"):
        mesh.size("zz")


@pytest.mark.parametrize(
    ("coords", "expected"),
    [
        ({"rows": 0}, {"cols": 2}),
        ({"rows": 0, "cols": 1}, {}),
        ({"cols": slice(0, 1)}, {"rows": 2, "cols": 1}),
        ({"cols": slice(0, 99)}, {"rows": 2, "cols": 2}),
        ({"cols": slice(None)}, {"rows": 2, "cols": 2}),
        ({"rows": slice(1, 2), "cols": 0}, {"rows": 1}),
        ({}, {"rows": 2, "cols": 2}),
    ],
)
def test_slice(mesh, coords, expected):
    part = mesh.slice(**coords)
    assert part.sizes == expected
    assert len(part) == len(mesh.slice(**coords))
    assert type(part) is type(mesh)


@pytest.mark.parametrize(
    ("coords", "error"),
    [
        ({"zz": 0}, TypeError),
        ({"rows": 2}, IndexError),
        ({"rows": -1}, IndexError),
        ({"rows": slice(1, 1)}, ValueError),
        ({"rows": slice(2, 3)}, ValueError),
    ],
)
def test_bad_slices(mesh, coords, error):
    with pytest.raises(error):
        mesh.slice(**coords)


def test_slice_by_point(mesh):
    point = Point(3, mesh.extent)
    assert mesh.slice(**point).sizes == {}


def test_flatten(mesh):
    assert mesh.flatten("all").sizes == {"all": 4}
    assert mesh.slice(rows=1).flatten("row").sizes == {"row": 2}


def test_flatten_of_a_strided_view(mesh):
    """The reference refuses this; an implementation that supports it must do so correctly."""
    try:
        column = mesh.slice(cols=1).flatten("column")
    except ValueError as error:
        assert "flatten sparse mesh" in str(error)  # noqa: PT017
    else:
        assert column.sizes == {"column": 2}
        if isinstance(column, ValueMesh):
            assert column.values() == [{"rows": 0, "cols": 1}, {"rows": 1, "cols": 1}]


def test_rename(mesh):
    renamed = mesh.rename(rows="r")
    assert list(renamed.sizes.items()) == [("r", 2), ("cols", 2)]
    assert list(mesh.rename(rows="a", cols="b").sizes) == ["a", "b"]
    with pytest.raises(ValueError, match="'zz'"):
        mesh.rename(zz="a")
    with pytest.raises(ValueError, match="Duplicate dimension name 'cols'"):
        mesh.rename(rows="cols")


def test_split(mesh):
    flat = mesh.flatten("all")
    assert list(flat.split(all=("a", "b"), a=2).sizes.items()) == [("a", 2), ("b", 2)]
    assert list(flat.split(all=("a", "b"), b=4).sizes.items()) == [("a", 1), ("b", 4)]
    assert list(flat.split(all=("a", "b", "c"), a=2, b=2).sizes.items()) == [
        ("a", 2),
        ("b", 2),
        ("c", 1),
    ]
    assert list(mesh.split(rows=("x", "y"), x=1).sizes) == ["x", "y", "cols"]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"all": "ab"}, "expected a sequence of dimensions"),
        ({"all": ("a", "b")}, "Cannot infer size"),
        ({"all": ("a", "b"), "a": 3}, "not evenly divided"),
        ({"all": ("a", "b"), "a": 2, "b": 3}, "not evenly divided"),
        ({"all": ("a", "b"), "a": 2, "zz": 3}, "unused size constraints"),
    ],
)
def test_bad_splits(mesh, arguments, fragment):
    with pytest.raises(ValueError, match=fragment):
        mesh.flatten("all").split(**arguments)


@pytest.mark.parametrize("name", ["transpose", "permute", "__iter__", "__getitem__"])
def test_what_actor_and_proc_meshes_are_not(grid, name):
    assert not hasattr(grid, name)
    assert not hasattr(type(grid.spawn("echo", Echo)), name)


# --- extents and points --------------------------------------------------------------------------


def test_extent():
    extent = Extent(["hosts", "gpus"], [2, 3])
    assert repr(extent) == str(extent) == "{hosts: 2, gpus: 3}"
    assert extent.labels == ["hosts", "gpus"]
    assert extent.sizes == [2, 3]
    assert extent.nelements == 6
    assert list(extent) == ["hosts", "gpus"]
    assert list(extent.keys()) == ["hosts", "gpus"]
    assert len(extent) == 2
    assert "gpus" in extent
    assert "zz" not in extent
    assert extent["gpus"] == 3
    assert dict(extent) == {"hosts": 2, "gpus": 3}
    assert dict(**extent) == {"hosts": 2, "gpus": 3}
    assert extent == Extent(["hosts", "gpus"], [2, 3])
    assert extent != Extent(["hosts", "gpus"], [3, 2])
    assert pickle.loads(pickle.dumps(extent)) == extent
    assert isinstance(extent, BoundExtent)
    assert Extent([], []).nelements == 1
    assert repr(Extent([], [])) == "{}"
    with pytest.raises(ValueError, match="'zz'"):
        extent["zz"]
    with pytest.raises(ValueError, match="mismatch"):
        Extent(["a"], [1, 2])


@pytest.mark.ours("the reference's Extent calls itself a mapping and lacks the methods")
def test_extent_is_a_mapping():
    extent = Extent(["hosts", "gpus"], [2, 3])
    assert list(extent.items()) == [("hosts", 2), ("gpus", 3)]
    assert list(extent.values()) == [2, 3]
    assert extent.get("gpus") == 3
    assert extent.get("zz") is None


def test_point():
    point = Point(4, Extent(["hosts", "gpus"], [2, 3]))
    assert repr(point) == str(point) == "{'hosts': 1/2, 'gpus': 1/3}"
    assert point.rank == 4
    assert point.extent == Extent(["hosts", "gpus"], [2, 3])
    assert point["hosts"] == 1
    assert point["gpus"] == 1
    assert dict(point) == dict(**point) == {"hosts": 1, "gpus": 1}
    assert list(point.items()) == [("hosts", 1), ("gpus", 1)]
    assert list(point.keys()) == ["hosts", "gpus"]
    assert list(point.values()) == [1, 1]
    assert point.get("gpus") == 1
    assert len(point) == 2
    assert point.size("gpus") == 3
    assert isinstance(point, Mapping)
    assert isinstance(point, BoundPoint)
    assert point == Point(4, Extent(["hosts", "gpus"], [2, 3]))
    assert point != Point(3, Extent(["hosts", "gpus"], [2, 3]))
    assert pickle.loads(pickle.dumps(point)) == point
    assert repr(Point(0, Extent([], []))) == "{}"
    with pytest.raises(ValueError, match="out of range"):  # at once or on first use
        dict(Point(6, Extent(["hosts", "gpus"], [2, 3])))
    with pytest.raises(ValueError, match="'zz'"):
        point["zz"]
    with pytest.raises(TypeError):
        point["hosts"] = 0


@pytest.mark.ours("on the reference a missing label is not a KeyError, so these raise")
def test_point_is_a_mapping():
    point = Point(4, Extent(["hosts", "gpus"], [2, 3]))
    assert point.get("zz", 7) == 7
    assert "zz" not in point


def test_points_from_actors_are_points(pair):
    ranks = pair.spawn("points", Points).rank.call().get()
    assert all(isinstance(point, Point) for point, _ in ranks.items())
    for rank in (*ranks.values(), context().message_rank, context().actor_instance.rank):
        assert isinstance(rank, BoundPoint)
        assert isinstance(rank, Mapping)
    assert repr(ranks.values()[1]) == "{'gpus': 1/2}"


@pytest.mark.ours("the reference's ranks are instances of the inner class only")
def test_ranks_are_instances_of_the_public_class(pair):
    ranks = pair.spawn("points", Points).rank.call().get()
    for rank in (*ranks.values(), context().message_rank, context().actor_instance.rank):
        assert isinstance(rank, Point)


class Points(Actor):
    @endpoint
    def rank(self):
        return current_rank()


# --- ValueMesh -----------------------------------------------------------------------------------


def test_value_mesh_access():
    mesh = letters()
    assert mesh.values() == list("abcdef")
    assert isinstance(mesh.values(), list)
    assert [(dict(p), v) for p, v in mesh.items()][4] == ({"h": 1, "g": 1}, "e")
    assert [p.rank for p, _ in mesh.items()] == list(range(6))
    assert [v for _, v in mesh] == list("abcdef")
    assert not isinstance(mesh.items(), list)
    assert mesh.item(h=1, g=2) == "f"
    assert mesh.get(3) == "d"
    assert len(mesh) == 6
    assert mesh.sizes == {"h": 2, "g": 3}
    assert ValueMesh[int] is ValueMesh


@pytest.mark.parametrize(
    ("coords", "error", "fragment"),
    [
        ({"h": 0}, KeyError, "'g'"),
        ({"h": 0, "g": 0, "z": 1}, KeyError, "extra dimensions"),
        ({"h": 4, "g": 0}, IndexError, "not in current shape"),
        ({"h": -1, "g": 0}, OverflowError, None),
    ],
)
def test_bad_items_of_a_value_mesh(coords, error, fragment):
    with pytest.raises(error, match=fragment):
        letters().item(**coords)


def test_value_mesh_get_out_of_range():
    with pytest.raises(ValueError, match="out of range"):
        letters().get(7)


@pytest.mark.parametrize("key", [0, "h"])
def test_a_value_mesh_is_not_subscriptable(key):
    with pytest.raises(TypeError, match="not subscriptable"):
        letters()[key]


def test_value_mesh_is_immutable_and_equal_to_itself_only():
    mesh = letters()
    with pytest.raises(AttributeError):
        mesh.anything = 1
    assert mesh == mesh  # noqa: PLR0124
    assert mesh != letters()


def test_value_mesh_checks_its_count():
    with pytest.raises(ValueError, match="expected 6 ranks"):
        ValueMesh(shape(h=2, g=3), ["a"])


def test_value_mesh_slices():
    mesh = letters()
    assert mesh.slice(h=1).values() == list("def")
    assert mesh.slice(g=1).values() == list("be")
    assert mesh.slice(h=1, g=0).item() == "d"
    assert [dict(p) for p, _ in mesh.slice(h=1).items()] == [{"g": 0}, {"g": 1}, {"g": 2}]
    assert mesh.slice(g=slice(1, 3)).values() == list("bcef")
    assert mesh.flatten("z").item(z=4) == "e"
    assert mesh.rename(g="x").item(h=0, x=2) == "c"
    assert mesh.split(g=("a", "b"), a=3).item(h=1, a=1, b=0) == "e"
    assert mesh.slice(h=1).slice(g=2).item() == "f"
    assert mesh.slice(h=1).get(0) == "d"


def test_value_mesh_repr():
    assert repr(ValueMesh(shape(gpus=2), [8, 8])) == (
        "ValueMesh({gpus: 2}):\n  (({'gpus': 0/2}, 8), ({'gpus': 1/2}, 8))"
    )
    assert repr(ValueMesh(Shape.unity(), [1])) == "ValueMesh({}):\n  (({}, 1),)"
    assert str(letters()) == (
        "ValueMesh({h: 2, g: 3}):\n"
        "  (({'h': 0/2, 'g': 0/3}, 'a'),\n"
        "   ({'h': 0/2, 'g': 1/3}, 'b'),\n"
        "   ({'h': 0/2, 'g': 2/3}, 'c'),\n"
        "   ({'h': 1/2, 'g': 0/3}, 'd'),\n"
        "   ({'h': 1/2, 'g': 1/3}, 'e'),\n"
        "   ({'h': 1/2, 'g': 2/3}, 'f'))"
    )


def test_value_mesh_of_a_call_prints_the_same(pair):
    mesh = pair.spawn("echo", Echo)
    assert repr(mesh.echo.call(8).get()) == (
        "ValueMesh({gpus: 2}):\n  (({'gpus': 0/2}, 8), ({'gpus': 1/2}, 8))"
    )


def test_value_mesh_pickles():
    again = pickle.loads(pickle.dumps(letters()))
    assert again.values() == list("abcdef")
    assert again.sizes == {"h": 2, "g": 3}


def test_value_mesh_in_messages(pair):
    mesh = pair.spawn("echo", Echo)
    values = mesh.echo.call(letters()).get()
    assert [v.values() for v in values.values()] == [list("abcdef")] * 2
    nested = mesh.echo.call(mesh.rank.call().get()).get().values()[0]
    assert nested.values() == [{"gpus": 0}, {"gpus": 1}]


def test_a_value_is_the_same_object_at_every_look(pair):
    mesh = pair.spawn("echo", Echo)
    values = mesh.rank.call().get()
    first = values.values()[0]
    assert values.get(0) is first
    assert values.item(gpus=0) is first
    assert values.values()[0] is first
    assert next(iter(values.items()))[1] is first


def test_value_mesh_from_indexed():
    mesh = ValueMesh.from_indexed(shape(g=3), [(2, "c"), (0, "a"), (1, "b")])
    assert mesh.values() == ["a", "b", "c"]


def test_value_mesh_shape():
    assert letters()._shape == shape(h=2, g=3)
    region = letters()._shape.region
    assert isinstance(region, Region)
    assert region.labels == ["h", "g"]


def test_module_of_public_classes(pair):
    mesh = pair.spawn("echo", Echo)
    home = "monarch._src.actor.actor_mesh"
    assert type(mesh).__module__ == home
    assert type(mesh).__name__ == "ActorMesh"
    assert ActorError.__module__ == home
    assert Point.__module__ == home
    assert ValueMesh.__module__ == home
    assert SupervisionError.__module__ == "monarch._rust_bindings.monarch_hyperactor.supervision"


# --- ActorMesh -----------------------------------------------------------------------------------


def test_actor_mesh_attributes(pair):
    mesh = pair.spawn("Some Name", Echo)
    assert mesh.__name__ == "Echo"
    assert mesh._class is Echo
    assert mesh._mesh_name == "Some Name"
    assert mesh._shape.labels == ["gpus"]
    assert mesh._proc_mesh is not None
    assert re.match(r"somename-\w+$", str(mesh._name.get()))
    assert not isinstance(mesh, Echo)


def test_actor_mesh_repr(pair):
    text = repr(pair.spawn("echo", Echo))
    assert text.startswith(f"ActorMesh(class=<class '{__name__}.Echo'>, shape={{gpus=2}})")


def test_actor_mesh_identity(pair):
    mesh, other = pair.spawn("echo", Echo), pair.spawn("echo", Echo)
    assert mesh == mesh  # noqa: PLR0124
    assert mesh != other
    assert len({mesh, other, mesh}) == 2


def test_names_need_not_be_unique(pair):
    first, second = pair.spawn("same", Echo, 1), pair.spawn("same", Echo, 2)
    assert first.get.call().get().values() == [1, 1]
    assert second.get.call().get().values() == [2, 2]


def test_actor_mesh_initialized(pair):
    mesh = pair.spawn("echo", Echo)
    assert mesh.initialized.get() is None
    assert mesh.slice(gpus=0).initialized.get() is None

    async def main():
        await mesh.initialized

    asyncio.run(main())


def test_actor_mesh_stop(pair, faults):
    mesh = pair.spawn("echo", Echo)
    assert mesh.echo.call(1).get().values() == [1, 1]
    assert not mesh.stop().get()
    assert not mesh.stop("again").get()
    with pytest.raises(SupervisionError, match=r"has status:\n  stopped: ") as caught:
        mesh.echo.call(1).get()
    assert "echo" in str(caught.value)


def test_a_stopped_mesh_leaves_its_proc_usable(pair):
    mesh = pair.spawn("echo", Echo)
    mesh.stop().get()
    assert pair.spawn("echo", Echo).echo.call(1).get().values() == [1, 1]


def test_only_the_owner_stops(pair):
    mesh = pair.spawn("echo", Echo)
    with pytest.raises(NotImplementedError, match="requires an owned ActorMesh"):
        mesh.slice(gpus=0).stop().get()
    copy = cloudpickle.loads(cloudpickle.dumps(mesh))
    with pytest.raises(NotImplementedError, match="requires an owned ActorMesh"):
        copy.stop().get()
    other = pair.slice(gpus=0).spawn("other", TriesToStop)
    kind, text = other.try_to_stop.call_one(mesh).get()
    assert kind == "NotImplementedError"
    assert "requires an owned ActorMesh" in text
    assert mesh.echo.call(1).get().values() == [1, 1]


def test_dropping_the_mesh_does_not_stop_the_actors(pair):
    mesh = pair.spawn("echo", Echo, "kept")
    copy = cloudpickle.loads(cloudpickle.dumps(mesh))
    mesh.initialized.get()
    del mesh
    import gc

    gc.collect()
    assert copy.get.call().get().values() == ["kept", "kept"]


# --- meshes as references ------------------------------------------------------------------------


def test_an_actor_mesh_travels_in_messages(pair):
    target = pair.spawn("target", Echo)
    uses = pair.slice(gpus=1).spawn("uses", Uses)
    assert uses.ping.call_one(target).get() == [{"gpus": 0}, {"gpus": 1}]
    assert uses.ping.call_one(target.slice(gpus=1)).get() == [{}]
    assert uses.ping.call_one(target.rename(gpus="g")).get() == [{"g": 0}, {"g": 1}]
    back = uses.give.call_one(target).get()
    assert back.sizes == {"gpus": 2}
    assert back.pid.call().get().values() == target.pid.call().get().values()


def test_a_mesh_travels_in_containers_and_constructors(pair):
    target = pair.spawn("target", Echo, 5)
    holder = pair.slice(gpus=0).spawn("holder", Echo, {"mesh": [target]})
    back = holder.get.call_one().get()["mesh"][0]
    assert back.get.call().get().values() == [5, 5]


def test_a_mesh_that_does_not_exist_yet_can_be_sent(fresh):
    procs = fresh({"gpus": 2})
    target = procs.spawn("target", Echo)
    uses = procs.slice(gpus=0).spawn("uses", Uses)
    assert uses.ping.call_one(target).get() == [{"gpus": 0}, {"gpus": 1}]


def test_a_proc_mesh_travels_in_messages(pair):
    uses = pair.slice(gpus=0).spawn("uses", Uses)
    assert uses.spawn_on.call_one(pair).get() == ["spawned by reference"] * 2
    assert uses.spawn_on.call_one(pair.slice(gpus=1)).get() == ["spawned by reference"]
    assert uses.describe.call_one(pair).get() == ({"gpus": 2}, "ProcMesh")


def test_a_received_proc_mesh_cannot_be_stopped(pair):
    other = pair.slice(gpus=0).spawn("other", TriesToStop)
    kind, text = other.try_to_stop.call_one(pair).get()
    assert kind == "ValueError"
    assert "must be stopped by an owner" in text


def test_procs_spawned_by_an_actor_travel_back(fresh):
    uses = fresh().spawn("uses", Uses)
    procs = uses.child_procs.call_one().get()
    assert procs.sizes == {"k": 2}
    mesh = procs.spawn("echo", Echo, 3)
    assert mesh.get.call().get().values() == [3, 3]


def test_a_host_mesh_travels_in_messages(pair):
    other = pair.slice(gpus=0).spawn("other", HostUser)
    assert other.spawn_there.call_one(this_host()).get() == [1, 1]


class HostUser(Actor):
    @endpoint
    def spawn_there(self, hosts):
        procs = hosts.spawn_procs({"k": 2})
        values = procs.spawn("echo", Echo, 1).get.call().get().values()
        procs.stop().get()
        return values


# --- ProcMesh ------------------------------------------------------------------------------------


def test_proc_mesh_basics(fresh):
    procs = fresh({"gpus": 2})
    assert isinstance(procs, ProcMesh)
    assert procs.sizes == {"gpus": 2}
    assert procs.initialized.get() is True
    assert len({procs, procs}) == 1


def test_host_mesh_of_procs(pair, single):
    assert isinstance(single.host_mesh, HostMesh)
    assert isinstance(pair.slice(gpus=1).host_mesh, HostMesh)
    with pytest.raises(NotImplementedError, match="non-singleton"):
        pair.host_mesh  # noqa: B018


def test_only_actor_classes_are_spawned(pair):
    class NotAnActor:
        pass

    with pytest.raises(ValueError, match="must subclass"):
        pair.spawn("no", NotAnActor)


def test_the_actor_class_itself_can_be_spawned(single):
    mesh = single.spawn("bare", Actor)
    assert mesh.initialized.get() is None


def test_proc_mesh_stop(fresh):
    procs = fresh({"gpus": 2})
    mesh = procs.spawn("echo", Echo)
    assert mesh.echo.call(1).get().values() == [1, 1]
    pids = mesh.pid.call().get().values()
    assert procs.stop().get() is None
    assert procs.stop("again").get() is None
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(SupervisionError, match="stopped"):
        mesh.echo.call(1).get()


def test_a_stopped_proc_mesh_spawns_nothing(fresh):
    procs = fresh()
    procs.initialized.get()
    procs.stop().get()
    with pytest.raises(RuntimeError, match="already been stopped"):
        procs.spawn("echo", Echo).echo.call_one(1).get()


def test_a_slice_of_procs_cannot_be_stopped(pair):
    with pytest.raises(ValueError, match="must be stopped by an owner"):
        pair.slice(gpus=0).stop().get()


def test_proc_mesh_as_async_context_manager():
    async def main():
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            mesh = procs.spawn("echo", Echo)
            values = (await mesh.echo.call(3)).values()
        with pytest.raises(RuntimeError, match="already been stopped"):
            async with procs:
                pass
        return values

    assert asyncio.run(main()) == [3, 3]


def test_sync_workspace_is_for_hosts(pair):
    async def main():
        await pair.sync_workspace(workspace=None)

    with pytest.raises(NotImplementedError, match=r"HostMesh\.sync_workspace"):
        asyncio.run(main())


def test_spawn_callbacks():
    from monarch._src.actor.proc_mesh import (
        get_active_proc_meshes,
        register_proc_mesh_spawn_callback,
        unregister_proc_mesh_spawn_callback,
    )

    seen = []
    register_proc_mesh_spawn_callback(seen.append)
    try:
        procs = this_host().spawn_procs()
        assert seen == [procs]
        assert procs in list(get_active_proc_meshes())
    finally:
        unregister_proc_mesh_spawn_callback(seen.append)
    with pytest.raises(ValueError):
        unregister_proc_mesh_spawn_callback(seen.append)
    procs.stop().get()


# --- HostMesh ------------------------------------------------------------------------------------


def test_this_host():
    hosts = this_host()
    assert isinstance(hosts, HostMesh)
    assert hosts.sizes == {}
    assert hosts.size() == 1
    assert hosts.initialized.get() is True
    assert hosts.stream_logs is False
    assert hosts.is_fake_in_process is False
    assert hosts.region.labels == []


def test_this_host_cannot_be_ended():
    with pytest.raises(RuntimeError, match="cannot shut down `HostMesh` that is a reference"):
        this_host().shutdown().get()
    with pytest.raises(RuntimeError, match="cannot stop `HostMesh` that is a reference"):
        this_host().stop().get()


def test_a_received_host_cannot_be_shut_down(pair):
    other = pair.slice(gpus=0).spawn("other", TriesToStop)
    kind, text = other.try_to_shut_down.call_one(this_host()).get()
    assert kind == "RuntimeError"
    assert "reference" in text


def test_host_meshes_are_equal_by_what_they_are():
    assert this_host() == this_host()


def test_this_proc_of_the_client():
    procs = this_proc()
    assert isinstance(procs, ProcMesh)
    assert procs.size() == 1
    mesh = procs.spawn("local", Echo)
    assert mesh.slice(**dict.fromkeys(mesh.sizes, 0)).pid.call_one().get() == os.getpid()


def test_proc_mesh_of_the_context():
    assert context().actor_instance.proc_mesh.size() == 1
    assert context().actor_instance.proc.size() == 1
