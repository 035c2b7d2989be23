"""Random shapes with their brute-force twins: an array that holds the rank at each coordinate."""

import numpy as np
from hypothesis import strategies as st

from monarch._engine.shapes import MeshTrait, Shape, ShapeExt, Slice

LABELS = "abcd"


class Mesh(MeshTrait):
    """The smallest mesh: a shape."""

    def __init__(self, shape):
        self.shape = shape

    @property
    def _ndslice(self):
        return self.shape.ndslice

    @property
    def _labels(self):
        return tuple(self.shape.labels)

    def _new_with_shape(self, shape):
        return Mesh(shape)

    def __repr__(self):
        return f"Mesh({self.shape})"


def mesh_of(*sizes, labels=LABELS):
    """Return a whole mesh of these sizes, its dimensions named a, b, c, d."""
    return Mesh(Shape(list(labels[: len(sizes)]), Slice.new_row_major(sizes)))


dense_sizes = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def ranges(draw, size):
    """A slice object that selects something of `size`, with bounds of any kind and any step."""
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start + 1, size + 2))
    step = draw(st.integers(1, 4))
    return slice(
        draw(st.sampled_from([start, start - size] + [None] * (start == 0))),
        draw(st.sampled_from([stop, stop - size if stop < size else None])),
        draw(st.sampled_from([step] + [None] * (step == 1))),
    )


@st.composite
def cut_shapes(draw):
    """A `Shape` that was cut a few times, and the array cut alike."""
    sizes = draw(dense_sizes)
    shape = Shape(list(LABELS[: len(sizes)]), Slice.new_row_major(sizes))
    array = np.arange(len(shape)).reshape(sizes)
    for _ in range(draw(st.integers(0, 3))):
        cuts = {}
        selection = []
        for label, size in zip(shape.labels, shape.ndslice.sizes, strict=True):
            cut = draw(st.one_of(st.just(slice(None)), ranges(size), st.integers(0, size - 1)))
            selection.append(cut)
            if cut != slice(None) or draw(st.booleans()):
                cuts[label] = cut
        shape = ShapeExt.slice(shape, **cuts)
        array = array[tuple(selection)]
    return shape, array


@st.composite
def free_slices(draw):
    """A legal `Slice` with gaps and with dimensions in any order, and its array of ranks."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    span = 0
    strides = []
    for size in sizes:
        stride = span + draw(st.integers(1, 5))
        strides.append(stride)
        span += max(size - 1, 0) * stride
    order = draw(st.permutations(range(len(sizes))))
    sizes, strides = [sizes[i] for i in order], [strides[i] for i in order]
    offset = draw(st.integers(0, 9))
    ranks = np.full(sizes, offset)
    for grid, stride in zip(np.indices(sizes), strides, strict=True):
        ranks += grid * stride
    return Slice(offset=offset, sizes=sizes, strides=strides), ranks
