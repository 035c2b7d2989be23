"""Between processes of one host: the kernel copies from one address space to the other.

`process_vm_readv` and `process_vm_writev` reach any memory of a process that this process may
trace. The owner takes no part, and need not even run Python. The initiator finds in the owner's
table (`table`) whether the memory is still registered and whether a drop is under way. A pidfd
shows whether the pid still denotes the same process.

The permission is that of ptrace: the same user, and neither a security module (Yama) nor a
container boundary in between. It is tested once per owner, by a read of the owner's identity. In
Yama's restricted mode a process allows other processes at its first registration
(`_admit_others`). It is then as open to processes of its user as on any system without Yama.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import weakref
from struct import Struct, pack
from typing import Any, ClassVar

from monarch import _spi
from monarch.rdma import registry
from monarch.rdma.errors import (
    RdmaBufferDropped,
    RdmaError,
    RdmaOwnerLost,
    RdmaPermissionError,
)
from monarch.rdma.handle import Handle
from monarch.rdma.identity import has_memory, own_host, start_of
from monarch.rdma.memory import CPU, Memory
from monarch.rdma.routes import Unavailable, forget
from monarch.rdma.routes.copying import CopyRoute, Piece, atomic_result
from monarch.rdma.routes.staged import Staged
from monarch.rdma.table import Contended, PeerTable
from monarch.rdma.transfer import READ, Op

__all__ = ["ProcessVm", "process_vm_works", "yama_scope"]

_IOVEC = Struct("=QQ").pack  # address, length
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
_KNOWN = 10_000  # registrations of an owner that are remembered as checked


def yama_scope(path: str = _YAMA) -> int:
    """Return how strictly the kernel separates processes of one user; 0: not at all."""
    try:
        with open(path) as file:
            return int(file.read())
    except OSError:
        return 0


class ProcessVm:
    """The `Kind` for main memory of other processes of this host."""

    name: ClassVar[str] = "process-vm"
    needs: ClassVar[str] = "main memory on Linux"

    def __init__(self) -> None:
        self._open_to_others = False
        self.readv, self.writev = _calls()

    def offer(self, memory: Memory) -> bytes | None:
        """Return an empty offer (every handle has what `open` needs), and admit other processes."""
        if memory.device != CPU or sys.platform != "linux":
            return None
        if not self._open_to_others:
            self._open_to_others = True
            _admit_others()
        return b""

    def open(self, handle: Handle, device: str) -> CopyRoute:
        """Return a route, if the owner runs on this kernel and may be traced by this process."""
        if handle.device != CPU:
            raise Unavailable("the kernel sees main memory only")
        if self.readv is None or not hasattr(os, "pidfd_open"):
            raise Unavailable("this system has no process_vm_readv, or no pidfd")
        here = own_host()
        if handle.host.boot != here.boot:
            raise Unavailable("the owner is on another host")
        if handle.host.namespace != here.namespace:
            raise Unavailable(
                "the owner is in another container: process numbers mean something else there",
                "give both the same one (docker: --pid=container:..., Kubernetes: "
                "shareProcessNamespace)",
            )
        route = _VmRoute(handle, self.readv, self.writev)
        return route if device == CPU else Staged(route)

    def withdrawn(self, handle: Handle) -> None:
        """Do nothing: the table revokes the registration."""


_routes: weakref.WeakSet[_VmRoute] = weakref.WeakSet()


class _VmRoute(CopyRoute):
    kind = ProcessVm.name
    about = "the kernel copies from one process to the other"

    def __init__(self, handle: Handle, readv: Any, writev: Any) -> None:
        self._readv = readv
        self._writev = writev
        self._pid = handle.pid
        self._known: dict[int, Handle] = {}  # handles that the table confirmed, by number
        self._alive = -1
        try:
            self._alive = os.pidfd_open(handle.pid)
            if start_of(handle.pid) != handle.start:
                raise registry.lost_error(handle, "another process has its number now")
            path = f"/proc/{handle.pid}/fd/{handle.table_fd}"
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except ProcessLookupError:
            raise registry.lost_error(handle) from None
        except OSError as error:
            if not has_memory(handle.pid):
                raise registry.lost_error(handle) from None
            if isinstance(error, PermissionError):
                raise _forbidden(handle, error) from None
            raise Unavailable(f"the owner's table cannot be opened: {error.strerror}") from None
        try:
            self._table = PeerTable(fd, handle.identity)
        except ValueError:
            raise registry.lost_error(handle, "another process has its number now") from None
        self._probe(handle)
        _routes.add(self)

    def _probe(self, handle: Handle) -> None:
        """Read the owner's identity from its memory: tests the permission and the process."""
        found = ctypes.create_string_buffer(16)
        local = _IOVEC(ctypes.addressof(found), 16)
        remote = _IOVEC(self._table.cookie, 16)
        if self._readv(self._pid, local, 1, remote, 1, 0) != 16:
            code = ctypes.get_errno()
            if code == errno.ESRCH or not has_memory(self._pid):
                raise registry.lost_error(handle)
            raise _forbidden(handle, OSError(code, os.strerror(code)))
        if found.raw != handle.identity:
            raise registry.lost_error(handle, "another process has its number now")

    def copy(self, kind: int, pieces: list[Piece]) -> None:
        table = self._table
        for op, _, _ in pieces:
            handle = op.handle
            if not table.holds(handle.slot, handle.number):
                self._refuse(handle)
            if self._known.get(handle.number) is not handle:
                self._look_at(handle)
        if len(pieces) == 1:
            ((op, at, total),) = pieces
            local = _IOVEC(op.local.address + at, total)
            remote = _IOVEC(op.handle.address + op.offset + at, total)
        else:
            total = sum(count for _, _, count in pieces)
            places = [n for op, at, count in pieces for n in (op.local.address + at, count)]
            local = pack(f"={len(places)}Q", *places)
            places = [
                n for op, at, count in pieces for n in (op.handle.address + op.offset + at, count)
            ]
            remote = pack(f"={len(places)}Q", *places)
        if kind == READ:
            count = len(pieces)
            if self._readv(self._pid, local, count, remote, count, 0) != total:
                self._piecemeal(self._readv, pieces, ctypes.get_errno())
            for op, _, _ in pieces:
                if not table.holds(op.handle.slot, op.handle.number):
                    self._refuse(op.handle)
            self._check_alive(pieces[0][0].handle)
        else:
            self._write(pieces, local, remote, total)

    def _write(self, pieces: list[Piece], local: bytes, remote: bytes, total: int) -> None:
        table = self._table
        entered: list[int] = []
        try:
            for handle in {op.handle.slot: op.handle for op, _, _ in pieces}.values():
                if not handle.writable:
                    raise RdmaPermissionError(registry.read_only_text(handle))
                if not table.enter(handle.slot):
                    self._refuse(handle)
                entered.append(handle.slot)
                if not table.holds(handle.slot, handle.number):
                    self._refuse(handle)
            self._check_alive(pieces[0][0].handle)
            count = len(pieces)
            if self._writev(self._pid, local, count, remote, count, 0) != total:
                self._piecemeal(self._writev, pieces, ctypes.get_errno())
        finally:
            for slot in entered:
                table.leave(slot)

    def _piecemeal(self, call: Any, pieces: list[Piece], code: int) -> None:
        """Copy the pieces one by one, after a call that was cut short: find out where and why."""
        for op, start, count in pieces:
            at, end = start, start + count
            while at < end:
                local = _IOVEC(op.local.address + at, end - at)
                remote = _IOVEC(op.handle.address + op.offset + at, end - at)
                done = call(self._pid, local, 1, remote, 1, 0)
                if done <= 0:
                    code = ctypes.get_errno() if done < 0 else errno.EFAULT
                    if code == errno.EINTR:
                        continue
                    self._explain(op.handle, code)
                at += done

    def _explain(self, handle: Handle, code: int) -> None:
        """Raise the error that the code of a failed copy stands for."""
        if code == errno.ESRCH:
            raise self._lost(handle)
        if not self._table.holds(handle.slot, handle.number):
            self._refuse(handle)
        self._check_alive(handle)
        if code == errno.EPERM:
            raise _forbidden(handle, PermissionError(code, os.strerror(code)))
        if code == errno.EFAULT:
            raise RdmaError(registry.moved_text(handle))
        raise RdmaError(f"buffer {handle.number} of {handle.owner}: {os.strerror(code)}")

    def atomic(self, op: Op) -> None:
        handle = op.handle
        table = self._table
        if not table.holds(handle.slot, handle.number):
            self._refuse(handle)
        if self._known.get(handle.number) is not handle:
            self._look_at(handle)
        with table.atomics:
            if not table.try_exclusive(handle.slot):
                raise Contended
            try:
                old = ctypes.create_string_buffer(8)
                held = Memory(ctypes.addressof(old), 8, True, old)
                self.copy(READ, [(Op(READ, handle, op.offset, held, 8), 0, 8)])
                new = atomic_result(op, old.raw)
                if new is not None:
                    place = _IOVEC(handle.address + op.offset, 8)
                    source = ctypes.create_string_buffer(new, 8)
                    held = Memory(ctypes.addressof(source), 8, False, source)
                    write = Op(op.kind, handle, op.offset, held, 8)
                    self._write([(write, 0, 8)], _IOVEC(held.address, 8), place, 8)
            finally:
                table.end_exclusive(handle.slot)
        ctypes.memmove(op.local.address, old, 8)

    # -- checks of the owner ---------------------------------------------------------------------

    def _look_at(self, handle: Handle) -> None:
        """Compare the handle with the owner's entry in the table, and remember the result."""
        if not self._table.admits(
            handle.slot, handle.number, handle.token, handle.address, handle.size, handle.writable
        ):
            if not self._table.holds(handle.slot, handle.number):
                self._refuse(handle)
            raise RdmaPermissionError(registry.forged_text(handle.number))
        while len(self._known) >= _KNOWN:
            del self._known[next(iter(self._known))]
        self._known[handle.number] = handle

    def _refuse(self, handle: Handle) -> None:
        """Raise RdmaBufferDropped, or RdmaOwnerLost if the owner has exited."""
        self._check_alive(handle)
        raise RdmaBufferDropped(registry.dropped_text(handle.number))

    def _check_alive(self, handle: Handle) -> None:
        try:
            signal.pidfd_send_signal(self._alive, 0)  # a zombie passes, but still keeps its pid
        except ProcessLookupError:
            raise self._lost(handle) from None
        except PermissionError:
            pass  # the process exists; it changed its user

    def _lost(self, handle: Handle) -> RdmaOwnerLost:
        forget(handle)  # no later transfer can use this route: its descriptors can be closed
        return registry.lost_error(handle)

    def __del__(self, _close: Any = os.close) -> None:
        if self._alive >= 0:
            _close(self._alive)

    def close_in_child(self) -> None:
        """Replace the table's file in a forked child: its locks are the parent's."""
        self._table.close_in_child()


def _calls() -> tuple[Any, Any]:
    """Return the two system calls, or None where there are none."""
    if sys.platform != "linux":
        return None, None
    libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter lock
    found: list[Any] = []
    for name in ("process_vm_readv", "process_vm_writev"):
        function = getattr(libc, name, None)
        if function is not None:
            function.restype = ctypes.c_ssize_t
            function.argtypes = (
                ctypes.c_int,
                ctypes.c_char_p,
                ctypes.c_ulong,
                ctypes.c_char_p,
                ctypes.c_ulong,
                ctypes.c_ulong,
            )
        found.append(function)
    return found[0], found[1]


def process_vm_works() -> bool:
    """Whether the system calls work at all: this process tries them on itself."""
    read, _ = _calls()
    if read is None:
        return False
    source, into = ctypes.create_string_buffer(b"works"), ctypes.create_string_buffer(6)
    remote, local = (_IOVEC(ctypes.addressof(buffer), 6) for buffer in (source, into))
    return bool(read(os.getpid(), local, 1, remote, 1, 0) == 6 and into.raw == source.raw)


def _admit_others() -> None:
    """Allow other processes of this user where Yama would allow only ancestors."""
    if yama_scope() == 1:
        ctypes.CDLL(None).prctl(_SET_PTRACER, _ANY, 0, 0, 0)


def _forbidden(handle: Handle, error: OSError) -> Unavailable:
    scope = yama_scope()
    reason = f"the kernel does not let this process look into {handle.owner}: {error.strerror}"
    if scope >= 2:
        remedy = f"sysctl kernel.yama.ptrace_scope=1 (it is {scope})"
    elif error.errno == errno.ENOSYS:
        remedy = "the sandbox that this runs in has no process_vm_readv: run it in another"
    else:
        remedy = (
            "run both as the same user and, in a container, with the capability SYS_PTRACE "
            "(docker run --cap-add SYS_PTRACE)"
        )
    return Unavailable(reason, remedy)


def _leave_to_parent() -> None:
    for route in list(_routes):
        route.close_in_child()


_spi.when_forked(_leave_to_parent)
