"""`Extent` as a mapping, and its encoding as bytes."""

import pickle
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._engine.shapes import Extent, Shape, Slice
from monarch._engine.shapes import extent as extent_module

E = Extent(["hosts", "gpus"], [2, 3])
EMPTY = Extent([], [])

extents = st.lists(st.tuples(st.text(max_size=6), st.integers(0, 2**64 - 1)), max_size=6).map(
    lambda dims: Extent([label for label, _ in dims], [size for _, size in dims])
)


def test_what_it_prints():
    assert str(E) == repr(E) == "{hosts: 2, gpus: 3}"
    assert str(EMPTY) == repr(EMPTY) == "{}"
    assert repr(Extent(["1a_", "", "a b", "a-b", "é\n"], [1] * 5)) == (
        '{1a_: 1, : 1, "a b": 1, "a-b": 1, "é\\n": 1}'
    )


def test_members():
    assert (E.labels, E.sizes, E.nelements, E.keys()) == (["hosts", "gpus"], [2, 3], 6, E.labels)
    assert (EMPTY.labels, EMPTY.nelements, len(EMPTY)) == ([], 1, 0)
    assert Extent(["h", "g"], [0, 3]).nelements == 0
    assert E.region.as_shape() == Shape(E.labels, Slice.new_row_major([2, 3]))
    assert E.ndslice == Slice.new_row_major([2, 3])
    E.labels.append("x")
    E.sizes.append(1)
    E.keys().append("x")
    assert repr(E) == "{hosts: 2, gpus: 3}"


def test_it_is_a_mapping():
    assert isinstance(E, Mapping)
    assert dict(E) == dict(**E) == {"hosts": 2, "gpus": 3}
    assert list(E) == ["hosts", "gpus"]
    assert list(E.items()) == [("hosts", 2), ("gpus", 3)]
    assert list(E.values()) == [2, 3]
    assert "gpus" in E
    assert "zz" not in E
    assert 1 not in E
    assert E.get("gpus") == 3
    assert E.get("zz") is None
    assert E.get("zz", 7) == 7


@pytest.mark.parametrize("kind", [ValueError, KeyError])
def test_a_missing_label_is_both_errors(kind):
    with pytest.raises(kind) as caught:
        E["zz"]
    assert str(caught.value) == "Dimension 'zz' not found"
    assert str(pickle.loads(pickle.dumps(caught.value))) == "Dimension 'zz' not found"


def test_equality_and_hash():
    twin = Extent(("hosts", "gpus"), (2, 3))
    assert twin == E
    assert {twin: 1}[E] == 1
    assert Extent(["gpus", "hosts"], [3, 2]) != E
    assert E != {"hosts": 2, "gpus": 3}


def test_of_equal_labels_the_first_is_found():
    twice = Extent(["h", "h"], [2, 3])
    assert (twice["h"], len(twice), twice.nelements) == (2, 2, 6)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: Extent(["h"], [1, 2]), ValueError, "label/sizes dimension mismatch: 1 != 2"),
        (lambda: Extent("hg", [1, 2]), TypeError, "'hg'"),
        (lambda: Extent([1], [1]), TypeError, "1"),
        (lambda: Extent(["h"], [-1]), OverflowError, "-1"),
        (lambda: Extent(["h"], [1 << 64]), OverflowError, "64 bits"),
        (lambda: Extent(["h"], [1.0]), TypeError, "float"),
        (lambda: E[0], TypeError, "0"),
    ],
)
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


@given(extents)
@settings(deadline=None)
def test_pickle_and_bytes_give_an_equal_extent(extent):
    data = extent.to_bytes()
    for copy in (
        pickle.loads(pickle.dumps(extent)),
        Extent.from_bytes(data),
        Extent.from_bytes(memoryview(data)),
        Extent.from_bytes(bytearray(data)),
    ):
        assert copy == extent
        assert (copy.labels, copy.sizes) == (extent.labels, extent.sizes)
        assert copy.nelements == extent.nelements
        assert copy.to_bytes() == data


@given(extents, extents)
@settings(deadline=None)
def test_bytes_are_equal_iff_extents_are(one, other):
    assert (one.to_bytes() == other.to_bytes()) == (one == other)


@given(extents, st.data())
@settings(deadline=None)
def test_damaged_bytes_are_refused_or_canonical(extent, data):
    """Decoding any bytes from a peer ends in a `ValueError` or in the value that they encode."""
    damaged = bytearray(extent.to_bytes())
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    for decoder in (Extent, Shape):
        try:
            decoded = decoder.from_bytes(bytes(damaged))
        except ValueError:
            continue
        assert decoded.to_bytes() == damaged


@given(st.binary(max_size=64))
@settings(deadline=None)
def test_random_bytes_are_refused_or_canonical(noise):
    for decoder in (Extent, Shape):
        try:
            decoded = decoder.from_bytes(noise)
        except ValueError:
            continue
        assert decoded.to_bytes() == noise


@pytest.mark.parametrize("end", range(len(E.to_bytes())))
def test_every_truncation_is_refused(end):
    with pytest.raises(ValueError, match="cut short"):
        Extent.from_bytes(E.to_bytes()[:end])


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (E.to_bytes() + b"\0", "1 bytes follow"),
        (b"\x81\x00", "longer than it needs"),
        (b"\x01\x01h\x82\x00", "longer than it needs"),
        (b"\xff" * 9 + b"\x02", "64 bits"),
        (b"\x80" * 20, "64 bits"),
        (b"\x41", "at most 64"),
        (b"\x01\x7f", "string of 127 bytes is cut short"),
        (b"\x01\x01\xff\x01", "utf-8"),
    ],
)
def test_hostile_bytes(data, match):
    with pytest.raises(ValueError, match=match):
        Extent.from_bytes(data)


def test_too_many_dimensions_are_not_encoded():
    labels = [f"d{i}" for i in range(65)]
    with pytest.raises(ValueError, match="at most 64"):
        Extent(labels, [1] * 65).to_bytes()
    with pytest.raises(ValueError, match="at most 64"):
        Shape(labels, Slice.new_row_major([1] * 65)).to_bytes()


def test_decoding_is_remembered_within_bounds(monkeypatch):
    memory = {}
    monkeypatch.setattr(extent_module, "_decoded", memory)
    monkeypatch.setattr(extent_module, "_REMEMBERED_EXTENTS", 3)
    for data in (E.to_bytes(), EMPTY.to_bytes()):
        assert Extent.from_bytes(data) is Extent.from_bytes(bytearray(data))
    for size in range(10):
        Extent.from_bytes(Extent(["h"], [size]).to_bytes())
        assert len(memory) <= 3
    before = dict(memory)
    long = Extent(["h" * 2000], [1])
    assert Extent.from_bytes(long.to_bytes()) == long
    assert memory == before
