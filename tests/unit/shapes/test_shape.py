"""`Shape`, `ShapeExt` and `Region`: cutting named dimensions, against numpy indexing."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings

from monarch._engine.shapes import Extent, Point, Region, Shape, ShapeExt, Slice
from tests.unit.shapes.geometry import cut_shapes

HG = Shape(["h", "g"], Slice.new_row_major([2, 3]))


@given(cut_shapes())
@settings(deadline=None)
def test_cutting_is_array_indexing(case):
    shape, array = case
    assert shape.ranks() == array.ravel().tolist()
    assert shape.ndslice.sizes == list(array.shape)
    assert len(shape) == array.size
    assert shape.extent == Extent(shape.labels, list(array.shape))


@given(cut_shapes())
@settings(deadline=None)
def test_every_cut_is_a_legal_slice(case):
    """The checking constructor accepts what slicing builds without checks."""
    s = case[0].ndslice
    assert Slice(offset=s.offset, sizes=s.sizes, strides=s.strides) == s


@given(cut_shapes())
@settings(deadline=None)
def test_coordinates_and_points_of_each_rank(case):
    shape, array = case
    region = shape.region
    for position, at in enumerate(np.ndindex(array.shape)):
        rank = int(array[at])
        expected = dict(zip(shape.labels, at, strict=True))
        point = region.point_of_base_rank(rank)
        assert shape.coordinates(rank) == expected
        assert point == Point(position, shape.extent)
        assert dict(point) == expected
        assert ShapeExt.slice(shape, **point).ranks() == [rank]
        assert shape.index(**expected).ranks() == [rank]
    for rank in set(range(30)) - set(array.ravel().tolist()):
        with pytest.raises(ValueError, match="out of range base rank"):
            region.point_of_base_rank(rank)


@given(cut_shapes())
@settings(deadline=None)
def test_equality_hash_pickle_and_bytes(case):
    shape, _ = case
    for copy in (pickle.loads(pickle.dumps(shape)), Shape.from_bytes(shape.to_bytes())):
        assert copy == shape
        assert hash(copy) == hash(shape)
        assert copy.to_bytes() == shape.to_bytes()
    region = pickle.loads(pickle.dumps(shape.region))
    assert region == shape.region
    assert hash(region) == hash(shape.region)
    assert region != Region([*shape.labels, "z"], Slice.new_row_major([*shape.ndslice.sizes, 2]))


def test_what_it_prints():
    assert str(HG) == "{h=2,g=3}"
    assert repr(HG) == (
        'Shape { labels: ["h", "g"], slice: Slice { offset: 0, sizes: [2, 3], strides: [3, 1] } }'
    )
    assert repr(Shape(['a"b\t\x01é'], Slice.new_row_major([1]))).startswith(
        'Shape { labels: ["a\\"b\\t\\u{1}é"], '
    )


def test_members():
    assert HG.labels == ["h", "g"]
    assert HG.ndslice == Slice.new_row_major([2, 3])
    assert HG.coordinates(4) == {"h": 1, "g": 1}
    assert HG.at("g", 1).ranks() == [1, 4]
    assert HG.index(h=1, g=2).ranks() == [5]
    assert HG.index() == HG
    assert HG.region.as_shape() == HG
    assert HG.region.labels == ["h", "g"]
    assert HG.region.slice() == HG.ndslice
    assert Region(["h", "g"], HG.ndslice) == HG.region
    assert (str(Shape.unity()), Shape.unity().ranks(), len(Shape.unity())) == ("{}", [0], 1)


@pytest.mark.parametrize(
    ("cut", "ranks"),
    [
        (slice(0, 10), [0, 1, 2, 3, 4, 5]),
        (slice(-2, None), [1, 2, 4, 5]),
        (slice(-9, 1), [0, 3]),
        (slice(0, -1), [0, 1, 3, 4]),
        (slice(0, 3, 2), [0, 2, 3, 5]),
        (slice(0, 3, 7), [0, 3]),
    ],
)
def test_select_understands_what_python_slicing_does(cut, ranks):
    selected = HG.select("g", cut)
    assert selected.ranks() == ranks
    assert selected == ShapeExt.slice(HG, g=cut)
    assert selected.labels == ["h", "g"]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: Shape(["h"], HG.ndslice), ValueError, "label slice dimension mismatch: 1 != 2"),
        (lambda: Region(["h"], HG.ndslice), ValueError, "label slice dimension mismatch: 1 != 2"),
        (lambda: Shape("hg", HG.ndslice), TypeError, "'hg'"),
        (lambda: Shape([1, 2], HG.ndslice), TypeError, "1"),
        (lambda: Shape(["h"], 5), TypeError, "5"),
        (lambda: HG.at("h", 7), ValueError, "out of range 7:8:1 for dimension h of size 2"),
        (lambda: HG.at("x", 0), ValueError, r'invalid labels `\["x"\]`'),
        (lambda: HG.at("h", -1), OverflowError, "-1"),
        (lambda: HG.index(h=0, x=1), ValueError, r'invalid labels `\["x"\]`'),
        (lambda: HG.select("h", slice(1, 1)), ValueError, "empty range 1:1:1"),
        (lambda: HG.select("h", slice(2, 3)), ValueError, "out of range 2:3:1 for dimension h"),
        (lambda: HG.select("h", slice(3, None)), ValueError, "out of range 3:2:1 for dimension h"),
        (lambda: HG.select("h", slice(1, 1)), ValueError, "empty range 1:1:1 for dimension h"),
        (lambda: HG.select("h", slice(1, -9)), ValueError, "empty range 1:-9:1 for dimension h"),
        (lambda: HG.select("x", slice(1)), ValueError, "invalid labels"),
        (lambda: HG.select("h", slice(1, None, -1)), ValueError, "negative step -1"),
        (lambda: HG.select("h", slice(0, 2, 0)), ValueError, "step cannot be zero"),
        (lambda: HG.select("h", 1), TypeError, "slice"),
        (lambda: HG.coordinates(9), ValueError, "value 9 not in slice"),
        (lambda: ShapeExt.slice(HG, q=1), TypeError, "not have dimension labeled 'q'"),
        (lambda: ShapeExt.slice(HG, h=2), IndexError, "index out of range"),
        (lambda: ShapeExt.slice(HG, h=-1), IndexError, "index out of range"),
        (lambda: ShapeExt.slice(HG, h="a"), TypeError, "str"),
        (lambda: ShapeExt.slice(HG, h=None), TypeError, "None"),
        (lambda: ShapeExt.slice(HG, h=slice(1, 1)), ValueError, "empty range 1:1:1"),
        (lambda: ShapeExt.slice(HG, h=slice(None, None, -1)), ValueError, "negative step -1"),
    ],
)
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_nothing_can_be_cut_from_an_empty_dimension():
    empty = Shape(["h"], Slice.new_row_major([0]))
    assert empty.ranks() == []
    with pytest.raises(ValueError, match="out of range 0:0:1"):
        empty.select("h", slice(None))


def test_of_equal_labels_the_first_is_cut():
    twice = Shape(["h", "h"], Slice.new_row_major([2, 3]))
    assert twice.at("h", 1).ranks() == [3, 4, 5]
    assert ShapeExt.slice(twice, h=1) == twice.at("h", 1)


@pytest.mark.parametrize("label", ["shape", "self", "a b"])
def test_any_label_can_be_a_keyword(label):
    shape = Shape([label, "g"], Slice.new_row_major([2, 3]))
    assert ShapeExt.slice(shape, **{label: 1}).ranks() == [3, 4, 5]
