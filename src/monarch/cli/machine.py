"""The facts about this machine that matter to a job, with remarks about unusual ones.

Each fact is read from ``/proc`` or ``/sys``, or is the result of a system call. A fact that the
system does not report is None. A *remark* is a sentence about a likely problem.
"""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from monarch._spi import cpu_quota, usable_cores

__all__ = ["Fact", "machine"]


class Fact(NamedTuple):
    """One fact about the machine: `value` is for programs, `text` and `remark` are for people."""

    name: str
    value: Any
    text: str
    remark: str = ""


def machine(root: str = "/") -> list[Fact]:
    """Return the facts, from the files below `root` and from this process."""
    kinds: list[Callable[[str], Fact]] = [
        _software,
        _cores,
        _numa,
        _memory,
        _shared_memory,
        _descriptors,
        _pidfd,
        _memfd,
        _rdma,
        _process_vm,
        _nixl,
        _gpus,
        _name,
    ]
    return [kind(root) for kind in kinds]


def _software(_root: str) -> Fact:
    import monarch

    value = {
        "pymonarch": monarch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    text = f"pymonarch {value['pymonarch']}, Python {value['python']}, {value['system']}"
    return Fact("software", value, text)


def _cores(root: str) -> Fact:
    count = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else count
    quota = cpu_quota(root)
    text = f"{count}, of which this process may use {usable}"
    remark = ""
    if quota is not None:
        text += f"; the control group allows {quota:g}"
        if quota < usable:
            remark = f"more than {quota:g} busy processes slow each other down"
    shared = usable_cores(root)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None:
        text += f"; of N processes of a mesh each computes with {shared} // N threads, at least 1"
    else:
        text += f"; OMP_NUM_THREADS={threads} says with how many threads each process computes"
    value = {"count": count, "usable": usable, "quota": quota, "threads": threads}
    return Fact("cores", value, text, remark)


def _numa(root: str) -> Fact:
    nodes = {
        os.path.basename(os.path.dirname(path)): _read(path)
        for path in sorted(glob.glob(os.path.join(root, "sys/devices/system/node/node*/cpulist")))
    }
    text = "; ".join(f"{name}: cores {cores}" for name, cores in nodes.items()) or "not told"
    return Fact("numa", nodes, text)


def _memory(root: str) -> Fact:
    info = {
        name: int(rest.split()[0]) << 10
        for name, _, rest in (
            line.partition(":") for line in _read(os.path.join(root, "proc/meminfo")).splitlines()
        )
    }
    total, available = info.get("MemTotal"), info.get("MemAvailable")
    limit, used = (_number(_group_file(root, name)) for name in ("memory.max", "memory.current"))
    value = {"total": total, "available": available, "limit": limit, "used": used}
    if total is None or available is None:
        return Fact("memory", value, "not told")
    text = f"{_size(total)}, {_size(available)} available"
    if limit is not None:
        text += f"; the control group allows {_size(limit)}"
        if used is not None:
            text += f" and has used {_size(used)}"
    left = available if limit is None or used is None else min(available, limit - used)
    remark = f"only {_size(left)} are left" if left < total / 20 else ""
    return Fact("memory", value, text, remark)


def _shared_memory(root: str) -> Fact:
    try:
        found = os.statvfs(os.path.join(root, "dev/shm"))
    except OSError:
        return Fact("shared memory", None, "there is no /dev/shm")
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    small = size < 1 << 28
    remark = "it is small: data loaders of torch need it (the engine does not)" if small else ""
    text = f"{_size(size)} in the file system, {_size(free)} free"
    return Fact("shared memory", {"size": size, "free": free}, text, remark)


def _descriptors(_root: str) -> Fact:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    remark = ""
    if not unlimited and hard < 4096:
        remark = f"each process of a mesh costs two or more: about {hard // 3} fit (ulimit -Hn)"
    text = f"{soft}, up to {'any number' if unlimited else hard} (raised when needed)"
    return Fact("descriptors", {"soft": soft, "hard": hard}, text, remark)


def _pidfd(_root: str) -> Fact:
    works = False
    with contextlib.suppress(AttributeError, OSError):
        os.close(os.pidfd_open(os.getpid()))
        works = True
    return Fact("pidfd", works, "yes" if works else "no")


def _memfd(_root: str) -> Fact:
    works = False
    with contextlib.suppress(AttributeError, OSError):
        os.close(os.memfd_create("monarch-doctor"))
        works = True
    return Fact("memfd", works, "yes" if works else "no")


def _rdma(root: str) -> Fact:
    devices = {
        os.path.basename(path): _read(os.path.join(path, "ports/1/state"))
        .rpartition(":")[2]
        .strip()
        for path in sorted(glob.glob(os.path.join(root, "sys/class/infiniband/*")))
    }
    text = ", ".join(f"{name} ({state or 'state unknown'})" for name, state in devices.items())
    return Fact("RDMA", devices, text or "no devices")


def _process_vm(root: str) -> Fact:
    from monarch.rdma.routes.process_vm import process_vm_works, yama_scope

    works = process_vm_works()
    scope = yama_scope(os.path.join(root, "proc/sys/kernel/yama/ptrace_scope"))
    text = "RDMA buffers are copied by the kernel within this host"
    remark = ""
    if not works:
        text = "not allowed here"
        remark = "RDMA buffers go through sockets; in a container, add the capability SYS_PTRACE"
    elif scope >= 2:
        text = f"restricted by Yama (ptrace_scope {scope})"
        remark = "RDMA buffers go through sockets; sysctl kernel.yama.ptrace_scope=1 allows copies"
    return Fact("process_vm", {"works": works, "yama": scope}, text, remark)


def _nixl(root: str) -> Fact:
    from importlib.metadata import PackageNotFoundError, version

    from monarch.rdma.hardware import ibverbs_devices

    found: dict[str, str] = {}
    for name in ("nixl", "nixl-cu12", "nixl-cu13"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    remark = ""
    if not found and ibverbs_devices(os.path.join(root, "sys/class/infiniband")):
        remark = "RDMA buffers do not use the cards: pip install 'pymonarch[rdma]'"
    return Fact("NIXL", found, text or "not installed (it drives RDMA cards)", remark)


def _gpus(root: str) -> Fact:
    models: list[str] = []
    for path in sorted(glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*/information"))):
        lines = _read(path).splitlines()
        models += [line[6:].strip() for line in lines if line.startswith("Model:")]
    if not models:  # a container may have the devices only
        models = ["NVIDIA"] * len(glob.glob(os.path.join(root, "dev/nvidia[0-9]*")))
    for path in sorted(glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/name"))):
        name = _read(path)
        if name:  # processors have none
            models.append(f"AMD {name}")
    counts = {model: models.count(model) for model in models}
    text = ", ".join(f"{count} x {model}" for model, count in counts.items())
    settings = "".join(os.environ.get(f"PYTORCH_{name}ALLOC_CONF", "") for name in ("", "CUDA_"))
    remark = ""
    if models and "expandable_segments:True" in settings:
        remark = (
            "some versions of torch cannot map memory of expandable segments in another process; "
            "RDMA buffers then go by way of main memory"
        )
    return Fact("GPUs", models, text or "none", remark)


def _name(_root: str) -> Fact:
    name = socket.gethostname()
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = sorted({str(entry[4][0]) for entry in found})
    reachable = [a for a in addresses if not a.startswith("127.") and a != "::1"]
    remark = ""
    if not reachable:
        remark = "others cannot dial this machine by its name: give workers an address"
    text = f"{name} ({', '.join(addresses) or 'does not resolve'})"
    return Fact("name", {"name": name, "addresses": addresses}, text, remark)


# -- reading the files of the system -----------------------------------------------------------


def _group_file(root: str, name: str) -> str | None:
    """Return this file of the innermost control group (version 2) that sets a limit in it."""
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        if not line.startswith("0::"):
            continue
        group = line[3:].strip("/")
        while True:
            text = _read(os.path.join(root, "sys/fs/cgroup", group, name))
            if text and not text.startswith("max"):
                return text
            if not group:
                return None
            group = os.path.dirname(group)
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
