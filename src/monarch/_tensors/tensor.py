"""`Tensor`: a tensor whose data are on all processes of a mesh.

The client's object is a description (shape, dtype, device), a reference number and the storage that
it shares with its aliases. Each process of the mesh has a local tensor of that number.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from monarch._tensors.absent import Absent
from monarch._tensors.active import recording
from monarch._tensors.core.aliases import Aliases
from monarch._tensors.core.metadata import Metadata
from monarch._tensors.errors import Misplaced
from monarch._tensors.where import here

if TYPE_CHECKING:
    from monarch._tensors.mesh import DeviceMesh
    from monarch._tensors.place import Place
    from monarch._tensors.stream import Stream

__all__ = ["Live", "Tensor", "new_tensor"]


class Live(weakref.ref["Tensor"]):
    """A weak reference to a tensor that knows its number, for the time after the tensor.

    Its callback is a C function (`list.append` of the engine): a finaliser in Python could swallow
    a Ctrl-C.
    """

    __slots__ = ("aliases", "number", "place")

    number: int
    place: Place
    aliases: Aliases


class Tensor(torch.Tensor):  # type: ignore[misc]  # torch is optional, see pyproject
    """A tensor on every process of `mesh`, as results of operations under an active mesh.

    It is made by operations, not by its constructor. Metadata (``shape``, ``dtype``, ``device``)
    are known at once; the data are on the processes: fetch them with `monarch.inspect` or
    `monarch.fetch_shard`.
    """

    __slots__ = ("_aliases", "_meta", "_place", "_ref")  # faster than the dict of torch's tensors

    _ref: int
    _meta: Metadata
    _place: Place
    _aliases: Aliases
    _issue: Callable[..., Any]  # of `mode`, which imports this module

    delete_ref = Absent("use drop()")

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls._issue(func, args, kwargs or {})

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh whose processes have the data."""
        mesh: DeviceMesh = self._place.mesh
        return mesh

    @property
    def stream(self) -> Stream:
        """The stream that the tensor belongs to."""
        stream: Stream = self._place.stream
        return stream

    @property
    def ref(self) -> int | None:
        """The number of the tensor on the processes; None once dropped."""
        return None if self.dropped else self._ref

    @property
    def dropped(self) -> bool:
        """Whether the data were deleted by `drop`."""
        return self._aliases.dropped is not None

    @property
    def _fake(self) -> torch.Tensor:
        from monarch._tensors.propagate import fake_of

        return fake_of(self._meta)

    def drop(self) -> None:
        """Delete the data of this tensor and of all its aliases now; a later use is a TypeError."""
        if not self.dropped:
            self._place.engine.drop(self, here())

    def to_mesh(self, mesh: Any, stream: Stream | None = None) -> Tensor:
        """Copy the data to the processes of `mesh`; see `monarch.to_mesh`."""
        from monarch._tensors.transfer import to_mesh

        copied: Tensor = to_mesh(self, mesh, stream)
        return copied

    def slice_mesh(self, **coordinates: int | slice) -> Any:
        """Return the part of this tensor on a slice of its mesh; its `to_mesh` copies it."""
        from monarch._tensors.transfer import slice_mesh

        return slice_mesh(self, **coordinates)

    def reduce(
        self,
        dims: str | tuple[str, ...],
        reduction: str = "sum",
        scatter: bool = False,
        mesh: Any = None,
        _inplace: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Combine the tensors of processes along mesh dimensions. See `monarch.reduce`."""
        from monarch._tensors.reduction import reduce_one

        return reduce_one(self, dims, reduction, scatter, mesh, _inplace, out)

    def reduce_(
        self,
        dims: str | tuple[str, ...],
        reduction: str = "sum",
        scatter: bool = False,
        mesh: Any = None,
    ) -> Tensor:
        """Combine as `reduce` does, and write the result into this tensor, which is returned."""
        return self.reduce(dims, reduction, scatter, mesh, _inplace=True)

    def item(self) -> Any:
        """Return the number in a tensor of one element; see the setting `tensor_item`."""
        session = recording()
        number = None if session is None else session.numbers.item(self)
        return super().item() if number is None else number

    def numpy(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise RuntimeError: the data are on the processes."""
        raise RuntimeError(_no_data(".numpy()"))

    def tolist(self) -> NoReturn:
        """Raise RuntimeError: the data are on the processes."""
        raise RuntimeError(_no_data(".tolist()"))

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise RuntimeError(_no_data(".numpy()"))

    def __format__(self, spec: str) -> str:
        if spec and self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "deepcopy of a tensor that an operation with gradients made: copy it with "
                "tensor.detach().clone()"
            )
        copied: Any = memo.get(id(self))
        if copied is None:
            with self.stream.activate(), torch.no_grad():
                copied = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            elif self.requires_grad:
                copied.requires_grad_()
            memo[id(self)] = copied
            if self.grad is not None:
                copied.grad = copy.deepcopy(self.grad, memo)
        made: Tensor = copied
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        meta = self._meta
        state = ", dropped" if self.dropped else ""
        return (
            f"monarch.Tensor(mesh={self.mesh!r}, stream={self.stream.name!r}, "
            f"fake=FakeTensor({list(meta.size)}, {meta.dtype}, device={str(meta.device)!r}){state})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InMessage(self)


def _no_data(method: str) -> str:
    """Return why a method that gives out the data is not available."""
    return (
        f"{method} is not supported for tensor subclasses: the data of a distributed tensor are on "
        f"the processes of its mesh. Use monarch.inspect(tensor){method}"
    )


class InMessage(TypeError):
    """A tensor is in a message; the engine sends a placeholder instead, see `engine.in_message`."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(
            "a distributed tensor cannot be pickled: its data are on the processes of its mesh. "
            "Send it as an argument of an endpoint of an actor on those processes, or fetch it "
            "with monarch.inspect(tensor)"
        )
        self.tensor = tensor

    def prepare_call(self, mesh: Any, called: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a call of actors with stand-ins for tensors."""
        from monarch._tensors.actor_argument import prepare

        return prepare(type(self.tensor), mesh, called, args, kwargs)


def new_tensor(meta: Metadata, place: Place, ref: int, aliases: Aliases) -> Tensor:
    """Return the client's object of the tensor `ref`."""
    tensor: Tensor = torch.Tensor._make_wrapper_subclass(
        Tensor,
        meta.size,
        meta.stride,
        meta.offset,
        None,
        meta.dtype,
        meta.layout,
        meta.shown,
    )
    tensor._meta = meta
    tensor._place = place
    tensor._ref = ref
    tensor._aliases = aliases
    engine = place.engine
    refs = aliases.refs
    if not refs:
        aliases.is_small = meta.is_small
    live = Live(tensor, engine.died_later if aliases.is_small else engine.died)
    live.number = ref
    live.place = place
    live.aliases = aliases
    engine.live[ref] = live
    refs.add(ref)
    return tensor


def _devices() -> None:
    """Let `device` be that of the data in each process, also where this machine lacks it."""
    # Not in the class: to a checker these are variables, which no property may override.
    setattr(Tensor, "device", property(lambda self: self._meta.device))  # noqa: B010
    for kind in ("cuda", "meta"):
        setattr(Tensor, f"is_{kind}", property(functools.partial(_is_on, kind)))


def _is_on(kind: str, tensor: Tensor) -> bool:
    return bool(tensor._meta.device.type == kind)


def _operators() -> None:
    """Define the operators, so that a misplaced operand is reported.

    Those of `torch.Tensor` turn each TypeError into "unsupported operand type(s)".
    """
    names = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "truediv": torch.div,
        "pow": torch.pow,
        "matmul": torch.matmul,
        "lt": torch.lt,
        "le": torch.le,
        "gt": torch.gt,
        "ge": torch.ge,
        "eq": torch.eq,
        "ne": torch.ne,
        "and": torch.bitwise_and,
        "or": torch.bitwise_or,
        "xor": torch.bitwise_xor,
    }

    def plain(function: Any) -> Any:
        def operator(self: Any, other: Any) -> Any:
            try:
                return function(self, other)
            except Misplaced:
                raise
            except TypeError:
                return NotImplemented

        return operator

    for name, function in names.items():
        setattr(Tensor, f"__{name}__", plain(function))
    for name in ("add", "mul", "and", "or", "xor"):
        setattr(Tensor, f"__r{name}__", getattr(Tensor, f"__{name}__"))
    for name in ("add", "sub", "mul", "truediv"):
        inplace = {"truediv": "div_"}.get(name, f"{name}_")
        setattr(Tensor, f"__i{name}__", plain(getattr(torch.Tensor, inplace)))
    setattr(Tensor, "__hash__", torch.Tensor.__hash__)  # noqa: B010 - to a checker it is a method


_devices()
_operators()
