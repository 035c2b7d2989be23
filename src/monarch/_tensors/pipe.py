"""Pipes: a function of the program that runs beside each worker, in a process of its own.

It computes ahead of the worker, without the worker's interpreter lock: a data loader, for example.
The program describes what the function sends by a generator of tensors, whose shapes are all that
is used of them. So `Pipe.recv` returns at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from monarch._tensors.active import active
from monarch._tensors.core.metadata import Metadata, metadata_of
from monarch._tensors.opaque_ref import OpaqueRef
from monarch._tensors.pickled import pickled
from monarch._tensors.propagate import fake_mode
from monarch._tensors.remote import Remote, remote
from monarch._tensors.tensor import Tensor

__all__ = ["FakePipe", "Pipe", "create_pipe", "remote_generator"]


class FakePipe:
    """The pipe that the describing generator gets: it has no data."""

    def recv(self) -> Any:
        """Raise RuntimeError: what the program sends has no influence on the shapes."""
        raise RuntimeError("the generator that describes a pipe cannot receive: it has no data")

    def send(self, value: Any) -> None:
        """Do nothing: the generator yields what the function sends."""


class Pipe:
    """The client's side of a pipe; see `remote_generator`.

    Args:
        fn: the function, with the generator as its ``propagate=``.
        max_messages: objects that the function may send ahead, and the program to the function.
        args: arguments of both; no tensors.
        kwargs: the same.

    Belongs to the mesh and the stream that are active when it is made. The processes of its
    functions end when the pipe is released. Raises ValueError without an active mesh, and for
    arguments that are distributed tensors.
    """

    def __init__(self, fn: Remote, max_messages: int, args: Any, kwargs: Any) -> None:
        mesh = active().mesh
        if mesh is None:
            raise ValueError("a pipe needs an active mesh: use `with mesh.activate():`")
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            raise ValueError(
                "the arguments of a pipe cannot be distributed tensors: its function runs in a "
                "process of its own; send them with Pipe.send"
            )
        if not callable(fn._propagator):
            raise ValueError(  # noqa: TRY004 - as for the other arguments
                "a pipe needs a generator that describes what its function sends"
            )
        if max_messages < 1:
            raise ValueError(f"max_messages must be positive, not {max_messages}")
        self._mesh = mesh
        call = pickled((fn._resolved(), args, kwargs))
        shown: Any = fn._propagator(FakePipe(), *args, **kwargs)
        self._shown = cast("Iterator[Any]", shown)
        self._handle = _open(mesh, call, max_messages)
        self._name = fn._name()

    def __repr__(self) -> str:
        return f"<pipe of {self._name} on {self._mesh!r}>"

    @property
    def ranks(self) -> dict[str, Any]:
        """The coordinates of each process, as distributed tensors, by dimension."""
        ranks: dict[str, Any] = self._mesh.ranks
        return ranks

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the dimensions of the mesh."""
        return dict(self._mesh.sizes)

    def recv(self) -> Any:
        """Return the next object that the functions send; its tensors are distributed.

        Does not block. Raises EOFError if the describing generator has ended. A function that has
        returned or raised is an error of the operation, which is raised by a fetch of the result.
        """
        with _disable_current_modes(), torch.no_grad(), fake_mode():
            shown = next(self._shown, _END)
        if shown is _END:
            raise EOFError("the generator that describes this pipe has ended")
        described = pytree.tree_map_only(torch.Tensor, metadata_of, shown)
        return _receive(self._handle, described)

    def send(self, obj: Any) -> None:
        """Send an object to the functions: each gets the local tensors. Does not block."""
        _send(self._handle, obj)

    def delete_ref(self) -> None:
        """End the functions' processes; the pipe cannot be used afterwards."""
        self._handle._key.drop()


def create_pipe(fn: Any, *args: Any, max_messages: int = 50, **kwargs: Any) -> Pipe:
    """Return a new pipe: `fn` is a remote function whose ``propagate=`` is the generator."""
    return Pipe(fn, max_messages, args, kwargs)


def remote_generator(path: str, max_messages: int = 50) -> Callable[[Any], Callable[..., Pipe]]:
    """Return a decorator of the generator that describes what the function at `path` sends.

    Calling the decorated generator starts the function beside each process of the active mesh, as
    ``function(pipe, *args, **kwargs)``, and returns a `Pipe`.

    Args:
        path: the function, "module.function"; or the function itself.
        max_messages: see `Pipe`.
    """

    def decorate(shown: Any) -> Callable[..., Pipe]:
        function = remote(path, propagate=shown)

        @functools.wraps(shown)
        def create(*args: Any, **kwargs: Any) -> Pipe:
            return create_pipe(function, *args, max_messages=max_messages, **kwargs)

        return create

    return decorate


_END = object()


# -- on the processes -----------------------------------------------------------------------------


def _opened(mesh: Any, call: bytes, room: int) -> OpaqueRef:
    from monarch._tensors.worker.pipe_process import start

    ranks = {name: dim.rank for name, dim in mesh.dims.items()}
    sizes = {name: dim.size for name, dim in mesh.dims.items()}
    return OpaqueRef(start(call, room, ranks, sizes)[0])


def _received(handle: OpaqueRef, described: Any) -> Any:
    """Return the next object; raise TypeError unless it has the structure that was described."""
    value = handle.value.recv()
    found, promised = pytree.tree_structure(value), pytree.tree_structure(described)
    if found != promised:
        raise TypeError(f"the function of the pipe sent {found}, its generator has {promised}")
    return value


def _sent(handle: OpaqueRef, value: Any) -> None:
    handle.value.send(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value))


# -- their results --------------------------------------------------------------------------------


def _fake_handle(_mesh: Any, _call: bytes, _room: int) -> OpaqueRef:
    return OpaqueRef(None)


def _fake_item(_handle: OpaqueRef, described: Any) -> Any:
    return pytree.tree_map_only(
        Metadata,
        lambda meta: torch.empty_strided(
            meta.size, meta.stride, dtype=meta.dtype, device=meta.device
        ),
        described,
    )


_open = remote(_opened, propagate=_fake_handle)
_receive = remote(_received, propagate=_fake_item)
_send = remote(_sent, propagate="inspect")
