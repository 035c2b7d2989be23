"""`MeshTrait`: cutting, splitting, flattening, renaming and measuring meshes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._engine.shapes import Extent, MeshTrait, Point, Shape
from tests.unit.shapes.geometry import Mesh, cut_shapes, mesh_of

HG = mesh_of(2, 3, labels="hg")
AB = mesh_of(4, 6)


def test_a_subclass_must_keep_the_contract():
    with pytest.raises(TypeError, match="_new_with_shape"):
        MeshTrait()


def test_measures():
    assert (len(HG), HG.size(), HG.size("g"), HG.size(["h", "g"]), HG.size(())) == (6, 6, 3, 6, 1)
    assert HG.sizes == {"h": 2, "g": 3}
    assert HG.extent == Extent(["h", "g"], [2, 3])
    scalar = Mesh(Shape.unity())
    assert (len(scalar), scalar.size(), scalar.sizes, scalar.extent) == (1, 1, {}, Extent([], []))


@pytest.mark.parametrize("dim", ["zz", ["h", "zz"]])
def test_size_of_a_missing_dimension(dim):
    with pytest.raises(KeyError, match=r"Mesh\(\{h=2,g=3\}\) does not have dimension 'zz'"):
        HG.size(dim)


def test_slice():
    assert HG.slice(h=1).shape.ranks() == [3, 4, 5]
    assert HG.slice(h=1).sizes == {"g": 3}
    assert HG.slice(g=slice(1, None)).shape.ranks() == [1, 2, 4, 5]
    assert HG.slice().shape == HG.shape
    assert HG.slice(**Point(4, HG.extent)).shape.ranks() == [4]
    with pytest.raises(TypeError, match="dimension labeled 'q'"):
        HG.slice(q=1)
    with pytest.raises(IndexError, match="index out of range"):
        HG.slice(h=2)
    with pytest.raises(ValueError, match="empty range"):
        HG.slice(h=slice(1, 1))


@given(cut_shapes())
@settings(deadline=None)
def test_flatten_keeps_the_ranks_or_says_why_not(case):
    shape, array = case
    ranks = array.ravel().tolist()
    if len(set(np.diff(ranks).tolist())) <= 1:
        flat = Mesh(shape).flatten("x")
        assert flat.shape.ranks() == ranks
        assert flat.sizes == {"x": len(ranks)}
    else:
        with pytest.raises(ValueError, match="cannot flatten sparse mesh: "):
            Mesh(shape).flatten("x")


def test_flatten_of_rows_columns_and_blocks():
    assert HG.slice(h=1).flatten("x").shape.ranks() == [3, 4, 5]
    assert HG.slice(g=1).flatten("x").shape.ranks() == [1, 4]
    assert AB.slice(a=slice(1, 3)).flatten("x").shape.ranks() == list(range(6, 18))
    message = r"ndslice.strides=\[6, 1\] != dense_strides=\[2, 1\]"
    with pytest.raises(ValueError, match=message):
        AB.slice(b=slice(1, 3)).flatten("x")


@given(cut_shapes(), st.data())
@settings(deadline=None)
def test_split_is_reshape(case, data):
    shape, array = case
    dims, sizes, labels = {}, [], []
    for label, size in zip(shape.labels, array.shape, strict=True):
        outer = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        kind = data.draw(st.sampled_from(["keep", "outer", "inner", "both"]))
        if kind == "keep":
            sizes.append(size)
            labels.append(label)
            continue
        given_sizes = {label + "0": outer, label + "1": size // outer}
        dims[label] = tuple(given_sizes)
        sizes.extend(given_sizes.values())
        labels.extend(given_sizes)
        if kind != "inner":
            dims[label + "0"] = outer
        if kind != "outer":
            dims[label + "1"] = size // outer
    split = Mesh(shape).split(**dims)
    assert list(split.sizes.items()) == list(zip(labels, sizes, strict=True))
    assert split.shape.ranks() == array.reshape(sizes).ravel().tolist()


def test_split_of_one_into_none_and_one():
    assert mesh_of(1, 2).split(a=()).sizes == {"b": 2}
    assert AB.split(a=("x",)).sizes == {"x": 4, "b": 6}
    assert AB.split(a=("a", "y"), y=2).sizes == {"a": 2, "y": 2, "b": 6}
    assert AB.split().shape == AB.shape


@pytest.mark.parametrize(
    ("dims", "match"),
    [
        ({"a": "xy"}, "expected a sequence of dimensions, but got 'xy'"),
        (
            {"a": ("x", "y")},
            (
                r"Cannot infer size of \('x', 'y'\) because both y and x have unknown size. "
                "Specify at least one as argument, e.g. y=4"
            ),
        ),
        (
            {"a": ("x", "y"), "x": 3},
            (
                r"Dimension 'a' of size 4 is not evenly divided by \('x', 'y'\) with sizes "
                r"\(3, '\?'\)"
            ),
        ),
        ({"a": ("x", "y"), "x": 3, "y": 2}, r"with sizes \(3, 2\)"),
        ({"a": ("x", "y"), "x": 0}, r"with sizes \(0, '\?'\)"),
        ({"a": ("x", "y"), "x": -2, "y": -2}, r"with sizes \(-2, -2\)"),
        ({"a": ()}, r"by \(\) with sizes \(\)"),
        ({"a": ("x", "y"), "x": 2, "zz": 4}, r"unused size constraints: \('zz',\)"),
        ({"zz": 4}, r"unused size constraints: \('zz',\)"),
        ({"zz": ("x", "y")}, "'zz' is not an existing dim. Expected an integer size constraint"),
        ({"a": ("x", "b"), "x": 2}, "Duplicate dimension name 'b'"),
        ({"a": ("x", "x"), "x": 2}, "Duplicate dimension name 'x'"),
    ],
)
def test_split_refuses(dims, match):
    with pytest.raises(ValueError, match=match):
        AB.split(**dims)


def test_rename():
    assert HG.rename(h="x").sizes == {"x": 2, "g": 3}
    assert HG.rename(h="g", g="h").sizes == {"g": 2, "h": 3}
    assert HG.rename(h="x").shape.ndslice == HG.shape.ndslice
    with pytest.raises(ValueError, match="'zz' is not an existing dim"):
        HG.rename(zz="x")
    with pytest.raises(ValueError, match="Duplicate dimension name 'g'"):
        HG.rename(h="g")
    with pytest.raises(TypeError, match="5"):
        HG.rename(h=5)
