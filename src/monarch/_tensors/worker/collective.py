"""`Collective`: reductions over processes, with a process group of torch for each set of ranks.

Groups are made at their first use: gloo for tensors on the CPU, NCCL for those on a GPU, one for
each stream, since the operations of a group have an order. Their rendezvous goes through the
messages of this system (`store`), so it opens no port.

A process on which the argument is lost takes part with zeros, so that the others do not wait; the
client knows that the result is lost everywhere.
"""

from __future__ import annotations

import datetime as dt
import functools
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from monarch import _spi
from monarch._tensors.core.template import Command
from monarch._tensors.worker.argument import members
from monarch._tensors.worker.template import Lost

if TYPE_CHECKING:
    from monarch._tensors.core.reduction import Reduction
    from monarch._tensors.worker.stream import StreamThread, Table

__all__ = ["Collective"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}

_members = functools.lru_cache(maxsize=256)(members)


def _in_memory(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its values in memory, which is all that a process group looks at."""
    plain = _spi.plain_tensor(value)
    if plain is None:
        raise TypeError(
            f"a tensor of the layout {value.layout} and the type {type(value).__name__} cannot be "
            "reduced between processes: its values are not one piece of memory; reduce a dense one"
        )
    return cast("torch.Tensor", plain)


def _is_writable(target: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether a process group can write the values of this tensor into its memory."""
    if target is None or not target.is_contiguous():
        return False
    plain = _spi.plain_tensor(target)
    return plain is not None and plain.data_ptr() == target.data_ptr()


class Collective:
    """The process groups of one worker.

    Args:
        table: the values of the worker.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._groups: dict[Any, Any] = {}
        self._store: Any = None  # torch calls its methods as long as it lives

    def group(self, stream: StreamThread, ranks: list[int], device: str) -> Any:
        """Return the process group of these ranks for a stream and a kind of device."""
        key = (stream.number, tuple(ranks), device)
        group = self._groups.get(key)
        if group is None:
            name = "/".join(map(str, (stream.number, device, *ranks)))
            group = self._groups[key] = self._made(name, ranks, device)
        return group

    def user_group(self, stream: StreamThread, ranks: list[int]) -> Any:
        """Return a process group for functions of the program, for tensors of all devices."""
        key = (stream.number, tuple(ranks), "user")
        group = self._groups.get(key)
        if group is None:
            kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
            store = self._stored("/".join(map(str, ("user", stream.number, *ranks))))
            made: Any = c10d.ProcessGroup(store, ranks.index(self._table.rank), len(ranks))
            types = c10d.ProcessGroup.BackendType
            for kind in kinds:
                backend = types.NCCL if kind == "cuda" else types.GLOO
                if kind == kinds[-1]:
                    made._set_default_backend(backend)
                name = "/".join(map(str, ("user", kind, stream.number, *ranks)))
                made._register_backend(torch.device(kind), backend, self._made(name, ranks, kind))
            group = self._groups[key] = made
        return group

    def _stored(self, name: str) -> Any:
        if self._store is None:
            self._store = self._table.store()
        return c10d.PrefixStore(name, self._store)

    def _made(self, name: str, ranks: list[int], device: str) -> Any:
        table = self._table
        store = self._stored(name)
        timeout = dt.timedelta(seconds=table.collective_timeout)
        index = ranks.index(table.rank)
        if device == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, index, len(ranks), options)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=table.address)]
        options._threads = 2
        return gloo(store, index, len(ranks), options)

    def reduce(
        self, stream: StreamThread, seq: int, command: Command, values: dict[int, Any]
    ) -> None:
        """Execute a `REDUCE` command."""
        _, ref, source, out, aliases, spec = command
        value: Any = values[source]
        lost = value if type(value) is Lost else None
        if lost is not None:
            meta = spec.source
            value = torch.zeros(meta.size, dtype=meta.dtype, device=meta.device)
        ranks = _members(spec.ranks, spec.dims, self._table.rank)
        written = values[out] if out else None
        target = written if isinstance(written, torch.Tensor) and lost is None else None
        try:
            result = self._combined(stream, cast("torch.Tensor", value), ranks, spec, target)
        except RuntimeError as error:
            dims = ", ".join(spec.names)
            raise RuntimeError(
                f"the reduction over {dims} (operation {seq}, ranks {ranks}) failed, or did not "
                f"end within {self._table.collective_timeout:g} s: {error}"
            ) from error
        if lost is not None:
            for name in (ref, out, *aliases):
                if name:
                    values[name] = lost
        elif out:
            if isinstance(written, torch.Tensor) and written._is_zerotensor():
                values[out] = result  # it has no memory that could be written
            elif result is not written:
                values[out].copy_(result)
            values[ref] = values[out]
        else:
            values[ref] = result

    def _combined(
        self,
        stream: StreamThread,
        value: torch.Tensor,
        ranks: list[int],
        spec: Reduction,
        target: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the result: in `target` if the group can write it there, without a copy."""
        count = len(ranks)
        if count == 1:
            if spec.kind == "stack":
                return value.clone() if spec.scatter else value.unsqueeze(0).clone()
            return value[0].clone() if spec.scatter else value.clone()
        group = self.group(stream, ranks, value.device.type)
        value = _in_memory(value).contiguous()
        if spec.kind == "stack":
            if spec.scatter:
                result = torch.empty_like(value)
                group.alltoall_base(result, value, [], [], dist.AllToAllOptions()).wait()
                return result
            result = value.new_empty((count, *value.shape))
            group.allgather([list(result.unbind(0))], [value]).wait()
            return result
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _OPS[spec.kind]
        # gloo has no reduce-scatter for all dtypes and reductions: reduce all, keep a part.
        if spec.scatter or not _is_writable(target):
            result = value.clone()
        else:
            result = target if target.data_ptr() == value.data_ptr() else target.copy_(value)
        group.allreduce([result], options).wait()
        if spec.scatter:
            result = result[ranks.index(self._table.rank)].clone()
        if spec.kind == "avg":
            if result.is_floating_point() or result.is_complex():
                result.div_(count)
            else:
                result = torch.div(result, count, rounding_mode="trunc")
        return result
