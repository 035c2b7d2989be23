"""`Tensorboard`: scalars that processes of a mesh write into event files, for TensorBoard.

The writer is torch's `SummaryWriter`, in each process of a mesh. So the value of a distributed
tensor goes from the process that has it into the file, and the script does not wait for it. A
process keeps its writers in a table, by a number of the script: logging may happen on any stream,
and objects of the script's tensors belong to one.

Needs the extra ``pymonarch[tensorboard]``.
"""

from __future__ import annotations

import itertools
import os
import threading
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from monarch import _spi
from monarch._tensors.mesh import DeviceMesh
from monarch._tensors.mesh_of_procs import spawn_tensor_engine
from monarch._tensors.remote import remote
from monarch._tensors.stream import Stream, get_active_stream
from monarch._tensors.tensor import Tensor
from monarch.actor import ProcMesh

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Tensorboard"]

_REMEDY = "monarch.tensorboard needs the package tensorboard: pip install 'pymonarch[tensorboard]'"
_numbers = itertools.count()


class Tensorboard:
    """Writes scalars for TensorBoard: ``tensorboard --logdir path`` shows them.

    As a context manager it is closed at the end.

    Args:
        coordinator_mesh: the processes that write, best a single one. If there are several, each
            writes its own values, into the folder "rank" with its number.
        path: a folder, as those processes name it.
        *args: further arguments of `torch.utils.tensorboard.SummaryWriter`.
        **kwargs: the same.

    Raises ImportError, which names the extra, if tensorboard is not installed. If the folder cannot
    be written, `flush` and `close` raise a `RemoteException`.
    """

    def __init__(
        self,
        coordinator_mesh: DeviceMesh | ProcMesh,
        path: str | os.PathLike[str],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if find_spec("tensorboard") is None:
            raise ImportError(_REMEDY, name="tensorboard")
        self._mesh = (
            spawn_tensor_engine(coordinator_mesh)
            if isinstance(coordinator_mesh, ProcMesh)
            else coordinator_mesh
        )
        self.path = os.fspath(path)
        self._key = f"{_spi.own_uid():x}.{next(_numbers)}"
        self._streams: dict[Stream, None] = {get_active_stream(): None}
        self._closed = False
        with self._mesh.activate():
            _open.broadcast(self._key, self.path, len(self._mesh) > 1, args, kwargs)

    def __repr__(self) -> str:
        return f"<Tensorboard {self.url} on {self._mesh!r}>"

    @property
    def url(self) -> str:
        """The address of the folder, for ``--logdir``."""
        return self.path if "://" in self.path else f"file://{os.path.abspath(self.path)}"

    def log(self, name: str, data: Any, step: int) -> None:
        """Write a number under `name`. Does not block.

        Args:
            name: the name of the curve, as "loss/train".
            data: a number, or a tensor with one element: an ordinary one, or a distributed one
                whose mesh contains the processes that write.
            step: the position on the curve.

        Raises ValueError for a tensor with more elements or on other processes, and after `close`.
        """
        if self._closed:
            raise ValueError("this Tensorboard is closed")
        if isinstance(data, torch.Tensor) and data.numel() != 1:
            raise ValueError(f"{name} is a tensor of {list(data.shape)}: log one number at a time")
        if not isinstance(data, Tensor):
            data = float(data)
        stream = data.stream if isinstance(data, Tensor) else get_active_stream()
        self._streams[stream] = None
        if isinstance(data, Tensor):
            data = data.detach()
        with self._mesh.activate(), stream.activate():
            _log.broadcast(self._key, name, data, step)

    def flush(self) -> None:
        """Wait until all that was logged is in the files. Raises the error of a writer."""
        for stream in self._streams:
            with self._mesh.activate(), stream.activate():
                _flush.call(self._key).get()

    def close(self) -> None:
        """Wait until all that was logged is in the files, and close them; once."""
        if self._closed:
            return
        self._closed = True
        self.flush()
        with self._mesh.activate():
            _close.call(self._key).get()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


# -- on the processes -----------------------------------------------------------------------------


class _Writers:
    """The writers of this process, by the numbers of the scripts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Any] = {}
        self._made = threading.Condition(self._lock)

    def open(self, key: str, make: Any) -> None:
        """Make a writer, or keep the error of it for those who ask."""
        try:
            writer = make()
        except Exception as error:
            writer = error
        with self._made:
            self._open[key] = writer
            self._made.notify_all()

    def close(self, key: str) -> None:
        """Close a writer and forget it."""
        self.of(key).close()
        with self._lock:
            del self._open[key]

    def of(self, key: str) -> Any:
        """Return a writer; wait for another stream that makes it. Raises the error of making it."""
        with self._made:
            limit = _spi.settings.tensor_collective_timeout
            if not self._made.wait_for(lambda: key in self._open, limit):
                raise RuntimeError(f"the writer for TensorBoard was not made within {limit:g} s")
            writer = self._open[key]
        if isinstance(writer, Exception):
            raise writer.with_traceback(None)
        return writer


_writers = _Writers()


def _opened(key: str, path: str, is_shared: bool, args: Any, kwargs: Any) -> None:
    from monarch._tensors.worker.argument import here

    folder = os.path.join(path, f"rank{here.stream.table.rank}") if is_shared else path

    def make() -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(_REMEDY, name="tensorboard") from error
        return SummaryWriter(folder, *args, **kwargs)

    _writers.open(key, make)


def _logged(key: str, name: str, value: Any, step: int) -> None:
    _writers.of(key).add_scalar(name, float(value), step)


def _flushed(key: str) -> None:
    _writers.of(key).flush()


def _ended(key: str) -> None:
    _writers.close(key)


_open = remote(_opened, propagate="inspect")
_log = remote(_logged, propagate="inspect")
_flush = remote(_flushed, propagate="inspect")
_close = remote(_ended, propagate="inspect")
