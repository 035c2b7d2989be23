"""Pure geometry of meshes: their ranks, the names of dimensions, and how they are cut.

From the bottom up, and imports only point down: `Slice` (ranks as offset, sizes, strides), `Extent`
(named sizes), `Point` (one element of an extent), `Shape` (a named slice, and how to cut it),
`Region` (a named part of a base mesh), `MeshTrait` (the common part of hosts, procs, actors and
values). All objects are immutable and hashable and use neither time nor I/O.

The public classes check their arguments. The `..._of` functions build the same objects from parts
that the caller knows to be valid, and are used on message paths.
"""

from monarch._engine.shapes.extent import Extent, MissingDimension, extent_of
from monarch._engine.shapes.mesh_trait import MeshTrait
from monarch._engine.shapes.point import BasePoint, Point, point_of
from monarch._engine.shapes.region import Region
from monarch._engine.shapes.shape import Shape, ShapeExt, shape_of
from monarch._engine.shapes.slice import Slice, slice_of

NDSlice = Slice

__all__ = [
    "BasePoint",
    "Extent",
    "MeshTrait",
    "MissingDimension",
    "NDSlice",
    "Point",
    "Region",
    "Shape",
    "ShapeExt",
    "Slice",
    "extent_of",
    "point_of",
    "shape_of",
    "slice_of",
]
