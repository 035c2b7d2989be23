"""`Collective`: reductions over processes, with a process group of torch for each set of ranks.

Groups are made at their first use: gloo for tensors on the CPU, NCCL for those on a GPU, one for
each stream, since the operations of a group have an order. Their rendezvous goes through the
messages of this system (`store`), so it opens no port.

A process on which the argument is lost takes part with zeros, so that the others do not wait; the
client knows that the result is lost everywhere.

A process that cannot take part, for example because it lacks the memory, leaves the group: its next
reduction would meet the one that the others still wait in. It notes the number of the operation in
the rendezvous, and its connections close, which ends the wait of the others. They read the number,
and all make a new group with it in the name: whatever they were at, no reduction meets another one.
"""

from __future__ import annotations

import datetime as dt
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from monarch import _spi
from monarch._tensors.core.template import Command
from monarch._tensors.worker.argument import members
from monarch._tensors.worker.template import Lost

if TYPE_CHECKING:
    from monarch._tensors.core.metadata import Metadata
    from monarch._tensors.core.reduction import Combination, Reduction
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

_Key = tuple[int, tuple[int, ...], str]
"""The number of a stream, ranks, and a kind of device."""

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


@dataclass(eq=False)
class _Begun:
    """A combination that has begun: the operation, the tensors in one, and what is waited for."""

    key: _Key
    seq: int
    spec: Combination
    lost: Lost | None = None
    flat: torch.Tensor | None = None
    work: Any = None


class Collective:
    """The process groups of one worker.

    Args:
        table: the values of the worker.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._groups: dict[Any, Any] = {}
        self._begun: dict[int, _Begun] = {}
        self._left: dict[Any, int] = {}  # the operation since which a group is not the first one
        self._store: Any = None  # torch calls its methods as long as it lives

    def group(self, key: _Key, seq: int) -> Any:
        """Return the process group of a stream, ranks and a kind of device, for operation `seq`."""
        if seq <= self._left.get(key, -1):
            raise RuntimeError("another process could not take part")
        group = self._groups.get(key)
        if group is None:
            _, ranks, device = key
            group = self._groups[key] = self._made(self._name(key), list(ranks), device)
        return group

    def _name(self, key: _Key) -> str:
        number, ranks, device = key
        name = "/".join(map(str, (number, device, *ranks)))
        left = self._left.get(key)
        return name if left is None else f"{name}/after {left}"

    def _leave(self, key: _Key, seq: int) -> None:
        """Take part in no reduction of this group from operation `seq` on."""
        try:
            self._stored(self._name(key)).set("left", str(seq))
        finally:
            self._left[key] = seq
            self._groups.pop(key, None)

    def _follow(self, key: _Key) -> int | None:
        """Leave the group as well if another process has; return the operation it could not do."""
        store = self._stored(self._name(key))
        if not store.check(["left"]):
            return None
        seq = self._left[key] = int(store.get("left"))
        self._groups.pop(key, None)
        return seq

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
        ranks = _members(spec.ranks, spec.dims, self._table.rank)
        written = values[out] if out else None
        target = written if isinstance(written, torch.Tensor) and lost is None else None
        like: Any = value if lost is None else spec.source
        key = (stream.number, tuple(ranks), like.device.type)
        try:
            result = self._combined(key, seq, value, spec, target)
        except RuntimeError as error:
            lost = self._failed(key, seq, spec.names, error)
            result = None
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

    def _failed(self, key: _Key, seq: int, names: tuple[str, ...], error: Exception) -> Lost:
        """Return what stands for a result; raise RuntimeError unless another process reports."""
        ranks = list(key[1])
        is_alone = len(ranks) == 1 or self._left.get(key) == seq
        if is_alone or self._follow(key) != seq:
            raise RuntimeError(
                f"the reduction over {', '.join(names)} (operation {seq}, ranks {ranks}) failed, "
                f"or did not end within {self._table.collective_timeout:g} s: {error}"
            ) from error
        return Lost(seq)  # the process that has left reports the failure

    def combine(
        self, stream: StreamThread, seq: int, command: Command, values: dict[int, Any]
    ) -> None:
        """Execute a `COMBINE` command: begin, and let the process compute on."""
        _, number, refs, spec = command
        given = [values[ref] for ref in refs]
        ranks = _members(spec.ranks, spec.dims, self._table.rank)
        key = (stream.number, tuple(ranks), spec.sources[0].device.type)
        begun = self._begun[number] = _Begun(key, seq, spec)
        begun.lost = next((value for value in given if type(value) is Lost), None)
        if len(ranks) == 1:
            return
        try:
            group = self.group(key, seq)
            try:
                begun.flat = torch.cat(
                    [
                        _given(value, source, is_alone=False).reshape(-1)
                        for value, source in zip(given, spec.sources, strict=True)
                    ]
                )
            except BaseException:
                self._leave(key, seq)
                raise
            options: Any = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM
            begun.work = group.allreduce([begun.flat], options)
        except RuntimeError as error:
            begun.lost = self._failed(key, seq, spec.names, error)
        except BaseException:
            begun.lost = Lost(seq)
            raise

    def combined(self, command: Command, values: dict[int, Any]) -> None:
        """Execute a `COMBINED` command: wait for the result, and write it."""
        _, number, refs, aliases = command
        begun = self._begun.pop(number)
        spec = begun.spec
        if begun.work is not None:
            try:
                begun.work.wait()
            except RuntimeError as error:
                begun.lost = self._failed(begun.key, begun.seq, spec.names, error)
        if begun.lost is not None:
            for ref in (*refs, *aliases):
                values[ref] = begun.lost
            return
        if begun.flat is None:
            return
        if spec.is_mean:
            begun.flat.div_(len(begun.key[1]))
        parts = begun.flat.split([math.prod(source.size) for source in spec.sources])
        for ref, part in zip(refs, parts, strict=True):
            value = values[ref]
            if value._is_zerotensor():
                values[ref] = part.view(value.shape).clone()
            else:
                value.copy_(part.view(value.shape))

    def _combined(
        self, key: _Key, seq: int, value: Any, spec: Reduction, target: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the result: in `target` if the group can write it there, without a copy."""
        ranks = key[1]
        count = len(ranks)
        group = self.group(key, seq) if count > 1 else None
        try:
            value = _given(value, spec.source, is_alone=group is None)
            result = _room(value, count, spec, target)
        except BaseException:
            if group is not None:
                self._leave(key, seq)
            raise
        if group is None:
            return result
        if spec.kind == "stack":
            if spec.scatter:
                group.alltoall_base(result, value, [], [], dist.AllToAllOptions()).wait()
            else:
                group.allgather([list(result.unbind(0))], [value]).wait()
            return result
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _OPS[spec.kind]
        # gloo has no reduce-scatter for all dtypes and reductions: reduce all, keep a part.
        group.allreduce([result], options).wait()
        if spec.scatter:
            result = result[ranks.index(self._table.rank)].clone()
        if spec.kind == "avg":
            if result.is_floating_point() or result.is_complex():
                result.div_(count)
            else:
                result = torch.div(result, count, rounding_mode="trunc")
        return result


def _given(value: Any, meta: Metadata, is_alone: bool) -> torch.Tensor:
    """Return what a process gives to a reduction."""
    if type(value) is Lost:
        return torch.zeros(meta.size, dtype=meta.dtype, device=meta.device)
    return cast("torch.Tensor", value) if is_alone else _in_memory(value).contiguous()


def _room(
    value: torch.Tensor, count: int, spec: Reduction, target: torch.Tensor | None
) -> torch.Tensor:
    """Return the tensor that a reduction writes to; the result itself if a process is alone."""
    if count == 1:
        if spec.kind == "stack":
            return value.clone() if spec.scatter else value.unsqueeze(0).clone()
        return value[0].clone() if spec.scatter else value.clone()
    if spec.kind == "stack":
        return torch.empty_like(value) if spec.scatter else value.new_empty((count, *value.shape))
    if spec.scatter or not _is_writable(target):
        return value.clone()
    return target if target.data_ptr() == value.data_ptr() else target.copy_(value)
