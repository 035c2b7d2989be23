"""`Slice` against the array of ranks that it stands for."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._engine.shapes import NDSlice, Slice
from tests.unit.shapes.geometry import free_slices

DENSE = Slice(offset=0, sizes=[2, 3], strides=[3, 1])
POINT = Slice(offset=4, sizes=[], strides=[])


@given(free_slices())
@settings(deadline=None)
def test_ranks_are_those_of_the_array(case):
    s, array = case
    flat = array.ravel().tolist()
    assert list(s) == list(s.ranks()) == flat
    assert len(s) == len(flat)
    assert s.ndim == array.ndim
    assert s.sizes == list(array.shape)
    assert [s.get(i) for i in range(len(s))] == flat
    assert [s[i] for i in range(len(s))] == flat


@given(free_slices())
@settings(deadline=None)
def test_index_and_coordinates_invert_the_enumeration(case):
    s, array = case
    where = {int(array[at]): list(at) for at in np.ndindex(array.shape)}
    assert len(where) == len(s), "each rank is reached once"
    for position, (rank, at) in enumerate(where.items()):
        assert s.index(rank) == position
        assert s.coordinates(rank) == at
        assert s.nditem(at) == rank
        assert rank in s
    for rank in set(range(max(where, default=0) + 3)) - set(where):
        assert rank not in s
        with pytest.raises(ValueError, match=f"value {rank} not in slice"):
            s.index(rank)
        with pytest.raises(ValueError, match=f"value {rank} not in slice"):
            s.coordinates(rank)


@given(free_slices())
@settings(deadline=None)
def test_a_range_stands_for_exactly_the_progressions(case):
    s, array = case
    flat = array.ravel().tolist()
    steps = set(np.diff(flat).tolist())
    is_progression = len(steps) <= 1 and all(step > 0 for step in steps)
    assert (s.as_range() is not None) == is_progression
    assert isinstance(s.ranks(), range) == is_progression
    assert s.is_contiguous == (steps <= {1})


@given(free_slices(), st.slices(12))
@settings(deadline=None)
def test_slicing_a_slice_gives_a_tuple_of_ranks(case, cut):
    s, array = case
    assert s[cut] == tuple(array.ravel().tolist()[cut])


@given(free_slices())
@settings(deadline=None)
def test_equality_hash_and_pickle(case):
    s, _ = case
    twin = Slice(offset=s.offset, sizes=s.sizes, strides=s.strides)
    assert s == twin
    assert hash(s) == hash(twin)
    assert s != Slice(offset=s.offset + 1, sizes=s.sizes, strides=s.strides)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(s, protocol))
        assert copy == s
        assert len(copy) == len(s)


@given(st.lists(st.integers(0, 30)))
@settings(deadline=None)
def test_from_list_covers_each_rank_as_often_as_it_is_listed(ranks):
    parts = Slice.from_list(ranks)
    assert sorted(rank for part in parts for rank in part) == sorted(ranks)
    assert all(part.ndim == 1 for part in parts)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], []),
        ([3], [(3, 1, 1)]),
        ([0, 1, 2, 4, 6], [(0, 3, 1), (4, 2, 2)]),
        ([6, 4, 2, 0], [(0, 4, 2)]),
        ([0, 5, 7], [(0, 2, 5), (7, 1, 1)]),
        ([3, 3, 4], [(3, 1, 1), (3, 2, 1)]),
        ([1, 2, 2, 3], [(1, 2, 1), (2, 2, 1)]),
    ],
)
def test_from_list_is_greedy(ranks, expected):
    parts = Slice.from_list(ranks)
    assert [(p.offset, *p.sizes, *p.strides) for p in parts] == expected


def test_what_it_prints():
    text = "Slice { offset: 0, sizes: [2, 3], strides: [3, 1] }"
    assert str(DENSE) == repr(DENSE) == repr(Slice.new_row_major([2, 3])) == text
    assert NDSlice is Slice


def test_without_dimensions_it_holds_its_offset():
    assert (len(POINT), list(POINT), POINT[0], POINT.coordinates(4)) == (1, [4], 4, [])
    assert list(POINT.ranks()) == [4]


def test_sizes_and_strides_are_fresh_lists():
    DENSE.sizes.append(9)
    assert DENSE.sizes == [2, 3]
    with pytest.raises(AttributeError):
        DENSE.offset = 1


def test_a_huge_dense_slice_is_not_enumerated():
    s = Slice.new_row_major([1 << 20, 1 << 20])
    assert s.ranks() == range(1 << 40)
    assert s.index(1 << 39) == 1 << 39
    assert (1 << 40) not in s


def test_dimensions_of_size_one_constrain_nothing():
    s = Slice(offset=2, sizes=[1, 3, 1], strides=[1, 1, 0])
    assert list(s) == [2, 3, 4]
    assert s.coordinates(4) == [0, 2, 0]
    assert s.is_contiguous


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: Slice(0, [1], [1]), TypeError, "positional"),
        (lambda: Slice(offset=0, sizes=[2], strides=[1, 2]), ValueError, "expected 1, got 2"),
        (lambda: Slice(offset=-1, sizes=[], strides=[]), OverflowError, "-1"),
        (lambda: Slice(offset=0, sizes=[-2], strides=[1]), OverflowError, "-2"),
        (lambda: Slice(offset=1 << 64, sizes=[], strides=[]), OverflowError, "64 bits"),
        (lambda: Slice(offset=0.0, sizes=[], strides=[]), TypeError, "float"),
        (lambda: Slice(offset=0, sizes=["a"], strides=[1]), TypeError, "str"),
        (lambda: Slice(offset=0, sizes=[2, 3], strides=[1, 1]), ValueError, "nonunique strides"),
        (lambda: Slice(offset=0, sizes=[2], strides=[0]), ValueError, "stride 0 must be larger"),
        (lambda: Slice(offset=0, sizes=[2, 3], strides=[2, 1]), ValueError, "nonrectangular shape"),
        (lambda: DENSE[6], IndexError, "index 6 out of range 6"),
        (lambda: DENSE[-1], TypeError, "-1"),
        (lambda: DENSE["a"], TypeError, "str"),
        (lambda: DENSE.get(6), ValueError, "index 6 out of range 6"),
        (lambda: DENSE.index(9), ValueError, "value 9 not in slice"),
        (lambda: DENSE.index(-1), OverflowError, "-1"),
        (lambda: DENSE.nditem([1]), IndexError, "invalid dims: expected 2, got 1"),
    ],
)
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_nditem_does_not_check_bounds():
    assert DENSE.nditem([5, 5]) == 20


def test_membership_of_what_is_no_rank():
    assert np.int64(4) in DENSE
    assert -1 not in DENSE
    assert "a" not in DENSE
    assert DENSE != "a"
