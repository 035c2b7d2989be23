"""Uids, proc ids, actor addresses and labels."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.base.identity import normalize_label
from monarch._reference.identity import ActorAddr, ProcId, Uid

LABELS = st.from_regex(r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?", fullmatch=True)
NUMBERS = st.integers(0, 2**64 - 1)
UIDS = st.one_of(
    LABELS.map(Uid.singleton),
    st.builds(Uid.instance_from_value, NUMBERS, st.none() | LABELS),
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "<1>"),
        (1, "<2>"),
        (57, "<Z>"),
        (58, "<21>"),
        (12345, "<4ER>"),
        (2**63, "<npL6MjP8Qfd>"),
        (2**64 - 1, "<JPwcyDCgEup>"),
    ],
)
def test_numbers_are_written_in_base_58(value, text):
    uid = Uid.instance_from_value(value)
    assert text == str(uid)
    assert value == Uid.from_string(str(uid)).instance_value


def test_instances_are_equal_by_number_whatever_their_label():
    a, b, c = (Uid.from_string(text) for text in ("lab<2>", "<2>", "oth<2>"))
    assert a == b == c
    assert len({a, b, c}) == 1
    assert a != Uid.from_string("lab<3>")
    assert a != Uid.from_string("lab")
    assert Uid.from_string("lab") == Uid.singleton("lab") != Uid.singleton("oth")


def test_what_a_uid_tells():
    labelled, bare, singleton = (Uid.from_string(text) for text in ("lab<2>", "<2>", "service"))
    assert [uid.label for uid in (labelled, bare, singleton)] == ["lab", None, "service"]
    assert [uid.instance_value for uid in (labelled, bare, singleton)] == [1, 1, None]
    assert [uid.is_instance for uid in (labelled, bare, singleton)] == [True, True, False]
    assert [uid.is_singleton for uid in (labelled, bare, singleton)] == [False, False, True]
    assert repr(labelled) == "Uid('lab<2>')"


def test_fresh_uids_come_from_the_given_entropy():
    uid = Uid.instance("a", entropy=lambda n: b"\1" + bytes(n - 1))
    assert str(uid) == "a<2>"
    assert str(Uid.anonymous(entropy=bytes)) == "<1>"
    assert (
        len({Uid.anonymous() for _ in range(100)} | {Uid.instance("a") for _ in range(100)}) == 200
    )


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("", "label must not be empty"),
        ("A", "label must start with a lowercase letter"),
        ("1a", "label must start with a lowercase letter"),
        ("ä", "label must start with a lowercase letter"),
        ("a.b", "label contains invalid character '.'"),
        ("ab-", "label must end with a lowercase letter or digit"),
        ("a" * 64, "label exceeds 63 characters"),
    ],
)
def test_bad_labels_are_refused(label, why):
    with pytest.raises(ValueError) as refusal:
        Uid.instance(label)
    assert f"invalid uid label: {why}" == str(refusal.value)
    assert Uid.instance("a" * 63).label == "a" * 63


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "<>", "Lab<1>", "lab<0>", "lab<l>", "lab<zzzzzzzzzzzz>", "a.b", "lab<1", "lab1>",
        "lab<1>x", " lab<2>", "<1><2>", "a@b", "lab<1>\n",
    ],
)  # fmt: skip
def test_bad_uid_text_is_refused(text):
    with pytest.raises(ValueError, match=r"^invalid uid: "):
        Uid.from_string(text)
    with pytest.raises(ValueError, match=r"^invalid proc id: "):
        ProcId.from_string(text)


def test_leading_ones_are_leading_zeros():
    assert str(Uid.from_string("lab<11111111111111111111>")) == "lab<1>"


def test_wrong_types_and_ranges_are_refused():
    with pytest.raises(OverflowError):
        Uid.instance_from_value(2**64)
    with pytest.raises(OverflowError):
        Uid.instance_from_value(-1)
    for make in (Uid, ProcId, lambda: ProcId("x"), lambda: Uid.instance_from_value("1")):
        with pytest.raises(TypeError):
            make()
    with pytest.raises(TypeError):
        Uid.instance(3)


def test_proc_id():
    proc = ProcId.from_string("worker<21>")
    assert (str(proc), repr(proc), proc.label) == ("worker<21>", "ProcId('worker<21>')", "worker")
    assert proc == ProcId(Uid.from_string("other<21>"))
    assert len({proc, ProcId(proc.uid)}) == 1
    assert proc != proc.uid


def test_plain_names_make_singletons():
    address = ActorAddr(addr="unix:@x", proc_name="P q", actor_name="A b")
    assert str(address) == "ab.pq@ipc://@x"
    assert (address.addr, address.proc_name, address.actor_name) == ("unix:@x", "pq", "ab")
    assert (address.label, address.proc_label, address.uid, address.pid) == ("ab", "pq", "ab", "ab")
    assert (address.proc_id, address.is_root) == ("pq@ipc://@x", True)
    nameless = ActorAddr(addr="local:3", proc_name="", actor_name="<3>")
    assert str(nameless) == "nil.nil@inproc://3"


@pytest.mark.parametrize(
    ("text", "addr", "proc_id"),
    [
        ("a.p@inproc://3", "local:3", "p@inproc://3"),
        ("a.b@tcp://[::1]:80", "tcp:[::1]:80", "b@tcp://[::1]:80"),
        ("a.b@tls://foo:80", "tls:foo:80", "b@tls://foo:80"),
        ("a.b@ipc:///tmp/x.y", "unix:/tmp/x.y", "b@ipc:///tmp/x.y"),
        ("a<1>.b<2>@lab<3>.ipc://@x", "unix:@x", "b<2>@lab<3>.ipc://@x"),
        ("a.b@service.ipc://@x", "unix:@x", "b@service.ipc://@x"),
        ("aa<3>.anon-1<4>@anon-1<4>.ipc://@f", "unix:@f", "anon-1<4>@anon-1<4>.ipc://@f"),
        (
            "a.b@tcp://1.2.3.4:5@tcp://0.0.0.0:5",
            "alias:dial_to=tcp:1.2.3.4:5;bind_to=tcp:0.0.0.0:5",
            "b@tcp://1.2.3.4:5@tcp://0.0.0.0:5",
        ),
    ],
)
def test_actor_addresses_are_read(text, addr, proc_id):
    address = ActorAddr.from_string(text)
    assert (text, addr, proc_id) == (str(address), address.addr, address.proc_id)
    assert repr(address) == f"ActorAddr({text!r})"


def test_actor_address_of_instances():
    address = ActorAddr.from_string("aa<3>.lab<2>@ipc://@x")
    assert (address.actor_name, address.proc_name) == ("aa", "lab")
    assert (address.uid, address.pid, address.is_root) == ("aa<3>", "aa<3>", False)
    bare = ActorAddr.from_string("<3>.<2>@ipc://@x")
    assert (bare.actor_name, bare.label, bare.proc_name, bare.proc_label) == (
        "<3>",
        None,
        "<2>",
        None,
    )
    assert address == bare
    assert hash(address) == hash(bare)
    for other in ("aa<4>.lab<2>@ipc://@x", "aa<3>.lab<5>@ipc://@x", "aa<3>.lab<2>@ipc://@y"):
        assert address != ActorAddr.from_string(other)


def test_locations_are_made_canonical():
    assert str(ActorAddr.from_string("a.b@tcp://*:5")) == "a.b@tcp://[::]:5"
    assert str(ActorAddr.from_string("a.b@tcp://localhost:5")) == "a.b@tcp://127.0.0.1:5"


@pytest.mark.parametrize(
    "text",
    [
        "", "bad", "a.b", "a@b", "a@b.c", "a.b@", "a.p@bad", "a.p@local:3", "a.b.c@inproc://3",
        ".p@inproc://3", "a.@inproc://3", "A.b@inproc://3", "a.b@C.inproc://3", "a.b@inproc://x",
    ],
)  # fmt: skip
def test_bad_actor_addresses_are_refused(text):
    with pytest.raises(ValueError) as refusal:
        ActorAddr.from_string(text)
    assert str(refusal.value).startswith(f"Failed to extract actor id from {text}: ")


def test_constructor_refuses_a_bad_address():
    with pytest.raises(ValueError, match=r"^Failed to parse channel address 'bad': "):
        ActorAddr(addr="bad", proc_name="p", actor_name="a")
    with pytest.raises(TypeError):
        ActorAddr("local:1", "p", "a")


@given(UIDS, UIDS, st.sampled_from(["ipc://@x", "tcp://[::1]:4", "front<3>.inproc://7"]))
def test_text_round_trips(actor, proc, location):
    assert actor == Uid.from_string(str(actor))
    assert actor.label == Uid.from_string(str(actor)).label
    address = ActorAddr.of(actor, proc, location)
    assert address == ActorAddr.from_string(str(address)) == copy.copy(address)


@pytest.mark.parametrize(
    "value",
    [
        Uid.from_string("lab<2>"),
        ProcId.from_string("service"),
        ActorAddr.from_string("aa<3>.lab<2>@front<4>.ipc://@x"),
    ],
)
def test_values_travel(value):
    pytest.importorskip(type(value).__module__, reason="pickles name the reference's path")
    assert str(value) == str(pickle.loads(pickle.dumps(value)))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Upper", "upper"),
        ("with space", "withspace"),
        ("1abc", "abc"),
        ("a.b", "ab"),
        ("_x", "x"),
        ("x.y[0]", "xy0"),
        ("a--b", "a--b"),
        ("ab-_-", "ab"),
        ("İ", "nil"),
        ("1", "nil"),
        ("", "nil"),
        ("A" * 70, "a" * 63),
        ("a" * 62 + "-b", "a" * 62),
    ],
)
def test_names_become_labels(name, label):
    assert label == normalize_label(name)


@given(st.text(max_size=80))
def test_every_name_has_a_label(name):
    label = normalize_label(name)
    assert label == normalize_label(label) == Uid.singleton(label).label
