"""Context and identity: the current actor, its rank and proc, and its creator."""

import asyncio
import os
import re
import threading

import cloudpickle
import pytest

from monarch._rust_bindings.monarch_hyperactor.proc import ActorAddr, ProcId, Uid
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    Actor,
    Context,
    Extent,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_host,
    this_proc,
)

UNIQUE = r"[1-9A-HJ-NP-Za-km-z]+"


class Facts(Actor):
    def __init__(self):
        self.at_init = self.facts()

    def facts(self):
        me = context().actor_instance
        return {
            "rank": dict(me.rank),
            "message rank": dict(context().message_rank),
            "name": me.name,
            "class": me.class_name,
            "proc_mesh": me.proc_mesh.sizes,
            "proc": me.proc.size(),
            "chain": str(me),
            "repr": repr(me),
            "creator": me.creator,
            "actor name": current_actor_name(),
            "actor_id": str(me.actor_id),
            "proc_id": me.proc_id,
            "proc_id of actor_id": str(me.actor_id.proc_id),
            "size": current_size(),
            "pid": os.getpid(),
        }

    @endpoint
    def get(self):
        return self.facts()

    @endpoint
    def get_init(self):
        return self.at_init

    @endpoint
    def actor_id(self):
        return context().actor_instance.actor_id


class Outer:
    class Nested(Facts):
        pass


# --- on the client -------------------------------------------------------------------------------


def test_the_client_is_the_root():
    me = context().actor_instance
    assert isinstance(context(), Context)
    assert str(me) == repr(me) == "<root>"
    assert me.name == "root"
    assert me.class_name is None
    assert me.creator is None
    assert dict(me.rank) == {}
    assert dict(current_rank()) == {}
    assert current_size() == {}
    assert current_rank().rank == 0
    assert me.proc.size() == 1
    assert current_actor_name() == str(me.actor_id)


def test_every_thread_of_the_client_is_the_same_root():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(current_actor_name()))
    thread.start()
    thread.join()
    assert seen == [current_actor_name()]

    async def main():
        return current_actor_name(), await asyncio.to_thread(current_actor_name)

    assert set(asyncio.run(main())) == {current_actor_name()}


def test_contexts_do_not_travel():
    with pytest.raises(TypeError, match="pickle"):
        cloudpickle.dumps(context())
    with pytest.raises(TypeError, match="pickle"):
        cloudpickle.dumps(context().actor_instance)


# --- in an actor ---------------------------------------------------------------------------------


def test_facts_of_an_actor(pair):
    mesh = pair.spawn("My Facts", Facts)
    for getter in (mesh.get, mesh.get_init):
        for point, facts in getter.call().get().items():
            i = point["gpus"]
            assert facts["rank"] == facts["message rank"] == {"gpus": i}
            assert facts["size"] == {"gpus": 2}
            assert facts["name"] == "My Facts"
            assert facts["class"] == f"{__name__}.Facts"
            assert facts["proc_mesh"] == {"gpus": 2}
            assert facts["proc"] == 1
            expected = f"<root>.<{__name__}.Facts My Facts{{'gpus': {i}/2}}>"
            assert facts["chain"] == facts["repr"] == expected
            assert facts["actor name"] == facts["actor_id"]
            assert facts["proc_id"] == facts["proc_id of actor_id"]


def test_the_rank_of_the_instance_does_not_follow_the_message(grid):
    mesh = grid.spawn("facts", Facts)
    facts = mesh.slice(rows=1).get.call().get().values()
    assert [f["rank"] for f in facts] == [{"rows": 1, "cols": 0}, {"rows": 1, "cols": 1}]
    assert [f["message rank"] for f in facts] == [{"cols": 0}, {"cols": 1}]
    assert [f["proc_mesh"] for f in facts] == [{"rows": 2, "cols": 2}] * 2


def test_chain_of_a_singleton_has_no_rank(single):
    facts = single.spawn("alone", Facts).get.call_one().get()
    assert facts["chain"] == f"<root>.<{__name__}.Facts alone>"


def test_class_name_is_qualified(single):
    facts = single.spawn("nested", Outer.Nested).get.call_one().get()
    assert facts["class"] == f"{__name__}.Outer.Nested"


def test_actor_names_are_unique(pair):
    first = pair.spawn("same", Facts).get.call().get().values()
    second = pair.spawn("same", Facts).get.call().get().values()
    names = [f["actor name"] for f in first + second]
    assert len(set(names)) == 4
    assert all(name.startswith("same") for name in names)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Upper", "upper"),
        ("with space", "withspace"),
        ("1abc", "abc"),
        ("a.b", "ab"),
        ("a_b-c", "a_b-c"),
        ("ünïcode", "ncode"),
        ("123", "nil"),
        ("", "nil"),
        ("x" * 100, "x" * 63),
    ],
)
def test_any_string_is_a_name(single, name, label):
    mesh = single.spawn(name, Facts)
    assert mesh.get.call_one().get()["name"] == name
    assert re.fullmatch(f"{label}-{UNIQUE}", str(mesh._name.get()))
    assert mesh.actor_id.call_one().get().label == label


# --- creators ------------------------------------------------------------------------------------


class Manager(Actor):
    @endpoint
    def child_on(self, procs):
        self.child = procs.spawn("child", Facts)
        return self.child.get.call().get().values()

    @endpoint
    def child_here(self):
        self.local = this_proc().spawn("local", Facts)
        return self.local.get.call().get().values(), os.getpid()

    @endpoint
    def child_procs(self):
        procs = this_host().spawn_procs({"k": 2})
        facts = procs.spawn("far", Facts).get.call().get().values()
        procs.stop().get()
        return facts


def test_the_chain_names_every_owner(pair):
    manager = pair.slice(gpus=0).spawn("mgr", Manager)
    facts = manager.child_on.call_one(pair).get()
    assert [f["chain"] for f in facts] == [
        f"<root>.<{__name__}.Manager mgr>.<{__name__}.Facts child{{'gpus': {i}/2}}>"
        for i in range(2)
    ]


def test_the_chain_shows_the_rank_of_an_owner(pair):
    managers = pair.spawn("mgr", Manager)
    facts, pid = managers.slice(gpus=1).child_here.call_one().get()
    assert len(facts) == 1
    assert facts[0]["pid"] == pid
    assert facts[0]["chain"].startswith(f"<root>.<{__name__}.Manager mgr{{'gpus': 1/2}}>.")
    assert f"<{__name__}.Facts local" in facts[0]["chain"]


def test_procs_of_an_actor(single):
    facts = single.spawn("mgr", Manager).child_procs.call_one().get()
    assert [f["rank"] for f in facts] == [{"k": 0}, {"k": 1}]
    assert facts[1]["chain"] == (
        f"<root>.<{__name__}.Manager mgr>.<{__name__}.Facts far{{'k': 1/2}}>"
    )


def test_creators_travel(pair):
    facts = pair.spawn("facts", Facts).get.call().get().values()[0]
    creator = facts["creator"]
    assert creator.name == "root"
    assert creator.creator is None
    assert creator.class_name is None
    manager = pair.slice(gpus=1).spawn("mgr", Manager)
    creator = manager.child_on.call_one(pair).get()[0]["creator"]
    assert creator.name == "mgr"
    assert creator.class_name == f"{__name__}.Manager"
    assert dict(creator.rank) == {}
    assert creator.creator.name == "root"
    assert creator.proc.size() == 1


# --- threads and tasks of an actor ---------------------------------------------------------------


class AsyncWho(Actor):
    @endpoint
    async def everywhere(self):
        me = current_actor_name()
        in_thread = await asyncio.to_thread(current_actor_name)
        in_task = await asyncio.create_task(self._name())
        rank_in_task = await asyncio.create_task(self._rank())
        return me, in_thread, in_task, rank_in_task

    async def _name(self):
        return current_actor_name()

    async def _rank(self):
        await asyncio.sleep(0)
        return dict(current_rank())

    @concurrent_endpoint
    async def rank_after_others(self, n):
        for _ in range(n):
            await asyncio.sleep(0)
        return dict(current_rank())


def test_the_context_follows_tasks_and_to_thread(pair):
    values = pair.spawn("who", AsyncWho).everywhere.call().get().values()
    for rank, (me, in_thread, in_task, rank_in_task) in enumerate(values):
        assert me == in_thread == in_task
        assert rank_in_task == {"gpus": rank}


def test_concurrent_bodies_keep_their_own_rank(pair):
    mesh = pair.spawn("who", AsyncWho)
    flat = mesh.rename(gpus="g")
    first = mesh.rank_after_others.call(20)
    second = flat.rank_after_others.call(10)
    third = mesh.slice(gpus=1).rank_after_others.call_one(5)
    assert third.get() == {}
    assert second.get().values() == [{"g": 0}, {"g": 1}]
    assert first.get().values() == [{"gpus": 0}, {"gpus": 1}]


class ThreadWho(Actor):
    @endpoint
    def in_a_plain_thread(self):
        seen = []
        thread = threading.Thread(target=lambda: seen.append(str(context().actor_instance)))
        thread.start()
        thread.join()
        return seen[0]

    @endpoint
    def in_a_copied_context(self):
        import contextvars

        seen = []
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(lambda: seen.append(str(context().actor_instance)),),
        )
        thread.start()
        thread.join()
        return seen[0], str(context().actor_instance)


def test_a_plain_thread_of_an_actor_has_some_context(fresh):
    """The context is a second root on the reference; an implementation may do better."""
    chain = fresh().spawn("who", ThreadWho).in_a_plain_thread.call_one().get()
    assert chain.startswith("<root>")


def test_a_thread_with_a_copied_context_is_the_actor(single):
    inside, outside = single.spawn("who", ThreadWho).in_a_copied_context.call_one().get()
    assert inside == outside


# --- actors that stop themselves -----------------------------------------------------------------


class Ends(Actor):
    @endpoint
    def abort(self, reason):
        context().actor_instance.abort(*reason)

    @endpoint
    def kill(self, reason):
        context().actor_instance.kill(*reason)

    @endpoint
    def stop_me(self, reason):
        context().actor_instance.stop(reason)
        return "bye"

    @endpoint
    def ping(self):
        return "pong"


@pytest.mark.parametrize("how", ["abort", "kill"])
def test_abort_is_a_failure(fresh, faults, how):
    mesh = fresh().spawn("ends", Ends)
    getattr(mesh, how).call_one(("enough of this",))
    failure = faults.next()
    assert "actor explicitly aborted due to: enough of this" in failure.report()
    with pytest.raises(Exception, match="enough of this"):
        mesh.ping.call_one().get()


def test_abort_without_reason(fresh, faults):
    mesh = fresh().spawn("ends", Ends)
    mesh.abort.call_one(())
    assert "no reason provided" in faults.next().report()


def test_stopping_oneself_is_no_failure(fresh, faults):
    mesh = fresh().spawn("ends", Ends)
    # `exception`, not `get`: on the reference the stop may overtake the reply.
    mesh.stop_me.call_one("done here").exception()
    with pytest.raises(SupervisionError, match=r"has status:\n  stopped: done here"):
        mesh.ping.call_one().get()
    assert [f for f in faults.drain() if f.mesh_name.startswith("ends-")] == []


@pytest.mark.ours("on the reference the stop may overtake the reply")
def test_the_endpoint_that_stops_its_actor_still_answers(fresh):
    for _ in range(5):
        mesh = fresh().spawn("ends", Ends)
        assert mesh.stop_me.call_one("done here").get() == "bye"


# --- identity types ------------------------------------------------------------------------------


def test_actor_addr(pair):
    first, second = pair.spawn("addr", Facts).actor_id.call().get().values()
    assert isinstance(first, ActorAddr)
    assert first != second
    assert len({first, second, cloudpickle.loads(cloudpickle.dumps(first))}) == 2
    assert first.label == "addr"
    assert first.uid == first.pid
    assert str(first).startswith("addr")
    assert ActorAddr.from_string(str(first)) == first


def test_uid():
    uid = Uid.instance("lab")
    assert uid.label == "lab"
    assert uid.is_instance
    assert not uid.is_singleton
    assert str(uid).startswith("lab")
    assert uid == Uid.from_string(str(uid))
    assert len({uid, Uid.from_string(str(uid))}) == 1
    assert Uid.anonymous() != Uid.anonymous()
    assert Uid.instance_from_value(7, "x") == Uid.instance_from_value(7, "x")
    assert Uid.instance_from_value(7, "x").instance_value == 7
    assert Uid.from_string("service").is_singleton
    with pytest.raises(ValueError, match="label"):
        Uid.instance("Bad Label")


def test_proc_id():
    uid = Uid.instance("proc")
    assert ProcId(uid).uid == uid
    assert ProcId(uid).label == "proc"
    assert ProcId.from_string(str(ProcId(uid))) == ProcId(uid)
    assert len({ProcId(uid), ProcId(uid)}) == 1


def test_extent_of_the_current_rank(grid):
    ranks = grid.spawn("who", AsyncRank).rank.call().get().values()
    assert all(rank.extent == Extent(["rows", "cols"], [2, 2]) for rank in ranks)
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]


class AsyncRank(Actor):
    @endpoint
    async def rank(self):
        return current_rank()
