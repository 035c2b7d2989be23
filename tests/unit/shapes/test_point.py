"""`Point` as a mapping from label to coordinate."""

import pickle
import sys
from collections.abc import Mapping
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings

from monarch._engine.shapes import BasePoint, Extent, Point, point_of
from tests.unit.shapes.geometry import LABELS, dense_sizes

E = Extent(["hosts", "gpus"], [2, 3])
P = Point(4, E)
ORIGIN = Point(0, Extent([], []))


@given(dense_sizes)
@settings(deadline=None)
def test_coordinates_are_those_of_the_array(sizes):
    extent = Extent(list(LABELS[: len(sizes)]), sizes)
    for rank, at in enumerate(np.ndindex(*sizes)):
        point = Point(rank, extent)
        assert dict(point) == dict(zip(extent.labels, at, strict=True))
        assert repr(point) == (
            "{"
            + ", ".join(
                f"'{label}': {c}/{n}" for label, c, n in zip(extent, at, sizes, strict=True)
            )
            + "}"
        )
        assert point == point_of(rank, extent)


def test_what_it_prints():
    assert str(P) == repr(P) == "{'hosts': 1/2, 'gpus': 1/3}"
    assert str(ORIGIN) == repr(ORIGIN) == "{}"


def test_members():
    assert (P.rank, P.extent, P.size("gpus"), len(P), len(ORIGIN)) == (4, E, 3, 2, 0)
    assert (P["hosts"], P["gpus"]) == (1, 1)
    with pytest.raises(AttributeError):
        P.rank = 5


def test_it_is_a_mapping():
    assert dict(P) == dict(**P) == {"hosts": 1, "gpus": 1}
    assert list(P) == P.keys() == ["hosts", "gpus"]
    assert list(P.items()) == [("hosts", 1), ("gpus", 1)]
    assert list(P.values()) == [1, 1]
    assert P.get("gpus") == 1
    assert P.get("zz", 3) == 3
    assert P.get("zz") is None
    assert "gpus" in P
    assert "zz" not in P


@pytest.mark.parametrize("kind", [ValueError, KeyError])
@pytest.mark.parametrize("look_up", [lambda: P["zz"], lambda: P.size("zz")])
def test_a_missing_label_is_both_errors(kind, look_up):
    with pytest.raises(kind) as caught:
        look_up()
    assert str(caught.value) == "Dimension 'zz' not found"


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: Point(6, E), ValueError, "total ranks 6; does not contain rank 6"),
        (lambda: Point(0, Extent(["h"], [0])), ValueError, "total ranks 0"),
        (lambda: Point(-1, E), OverflowError, "-1"),
        (lambda: Point("a", E), TypeError, "str"),
        (lambda: Point(0, {"h": 1}), TypeError, "Extent"),
        (lambda: P[0], TypeError, "0"),
    ],
)
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_every_point_is_an_instance_of_both_classes():
    for point in (P, BasePoint(4, E), point_of(4, E), E.region.point_of_base_rank(4)):
        assert type(point) is Point
        assert isinstance(point, BasePoint)
        assert isinstance(point, Mapping)
        assert point == P
    names = {(c.__module__, c.__qualname__) for c in (Point, BasePoint)}
    assert names == {
        ("monarch._src.actor.actor_mesh", "Point"),
        ("monarch._rust_bindings.monarch_hyperactor.shape", "Point"),
    }


def test_equality_and_hash():
    assert {Point(4, Extent(["hosts", "gpus"], [2, 3])): 1}[P] == 1
    assert Point(3, E) != P
    assert Point(4, Extent(["hosts", "gpus"], [3, 2])) != P
    assert dict(P) != P
    assert P != 4


def test_pickle_names_the_public_path_and_shares_the_extent(monkeypatch):
    """The façade provides the module of the public path; here a stand-in holds the class."""
    module = ModuleType(Point.__module__)
    module.Point = Point
    monkeypatch.setitem(sys.modules, Point.__module__, module)
    data = pickle.dumps([Point(rank, E) for rank in range(6)])
    assert Point.__module__.encode() in data
    copies = pickle.loads(data)
    assert copies == [Point(rank, E) for rank in range(6)]
    assert all(type(copy) is Point for copy in copies)
    assert len({id(copy.extent) for copy in copies}) == 1
