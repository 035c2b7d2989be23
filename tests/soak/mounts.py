"""`python tests/soak/mounts.py [HOSTS=8] [FILES=20000]`: what a mounted directory costs.

The hosts are processes of this machine, so all of them share its processors and memory. Each figure
is a pair, taken by turns: the mount, and what it is compared with. Medians and their ratio are
printed, since the ratio depends less on what else the machine does.
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from monarch.actor import Actor, endpoint, this_host
from monarch.job import ProcessJob
from monarch.rdma import RDMABuffer
from monarch.remotemount import remotemount

PAIRS = 5
PIECE = 256 << 20
IMPORTED = 300
IMPORT = "import sys; sys.path.insert(0, sys.argv[1]); import package.all"


class Sender(Actor):
    @endpoint
    def buffer(self) -> RDMABuffer:
        memory = mmap.mmap(-1, PIECE)
        memory.write(bytes(PIECE))
        return RDMABuffer(memory)


class Receiver(Actor):
    @endpoint
    def seconds(self, buffer: RDMABuffer) -> float:
        """Return how long it takes to copy a buffer of another host into fresh memory."""
        begin = time.perf_counter()
        buffer.read_into(mmap.mmap(-1, PIECE), timeout=600).get()
        return time.perf_counter() - begin

    @endpoint
    def read(self, path: str) -> float:
        """Return how long it takes to read a file."""
        begin = time.perf_counter()
        into = bytearray(8 << 20)
        with open(path, "rb", 0) as file:
            while file.readinto(into):
                pass
        return time.perf_counter() - begin


def make_tree(root: Path, files: int) -> None:
    folder = root / "package"
    for number in range(files):
        if number % 100 == 0:
            folder = root / "package" / f"part_{number // 100}"
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text("")
        (folder / f"module_{number}.py").write_text(f"VALUE = {number}\n" + "# padding\n" * 200)
    (root / "package" / "__init__.py").write_text("")
    names = (f"import package.part_{n // 100}.module_{n}\n" for n in range(min(files, IMPORTED)))
    (root / "package" / "all.py").write_text("".join(names))
    for number in range(PAIRS):
        (root / f"piece_{number}").write_bytes(os.urandom(1 << 20) * (PIECE >> 20))


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def pairs(label: str, unit: float, mounted: list[float], other: list[float]) -> None:
    ratio = statistics.median(one / two for one, two in zip(mounted, other, strict=True))
    one, two = (statistics.median(each) * unit for each in (mounted, other))
    print(f"{label}: {one:.3g}, compared with {two:.3g}; ratio {ratio:.2f}", flush=True)


def import_from(path: str) -> None:
    subprocess.run([sys.executable, "-B", "-S", "-c", IMPORT, path], check=True)


def look_at_all(path: str) -> int:
    count = 0
    for entry in os.scandir(path):
        entry.stat(follow_symlinks=False)
        count += 1 + (look_at_all(entry.path) if entry.is_dir(follow_symlinks=False) else 0)
    return count


def open_all(path: str) -> None:
    for name in os.listdir(path):
        Path(path, name).read_bytes()


def main() -> None:
    count, files = (int(each) for each in (*sys.argv[1:], *("8", "20000")[len(sys.argv) - 1 :]))
    job = ProcessJob({"hosts": count})
    with tempfile.TemporaryDirectory() as folder:
        root, shown = f"{folder}/tree", f"{folder}/shown/$SUBDIR"
        make_tree(Path(root), files)
        hosts = job.state(cached_path=None).hosts
        hosts.initialized.get()
        scans = [seconds(lambda: look_at_all(root)) for _ in range(3)]
        opened: list[float] = []
        for _ in range(3):
            mount = remotemount(hosts, root, shown)
            opened.append(seconds(mount.open))
            mount.close()
        pairs(f"open on {count} hosts, {files} files (s), local stat of all", 1, opened, scans)
        mount = remotemount(hosts, root, shown).open()
        last = shown.replace("$SUBDIR", f"hosts_{count - 1}")
        import_from(root)
        print(f"first import from it (s): {seconds(lambda: import_from(last)):.3g}", flush=True)
        here, there = [], []
        for _ in range(PAIRS):
            there.append(seconds(lambda: import_from(last)))
            here.append(seconds(lambda: import_from(root)))
        pairs(f"import of {IMPORTED} modules, warm (s), local", 1, there, here)
        print(f"first listing with attributes (s): {seconds(lambda: look_at_all(last)):.3g}")
        here, there = [], []
        for _ in range(PAIRS):
            there.append(seconds(lambda: look_at_all(last)))
            here.append(seconds(lambda: look_at_all(root)))
        pairs("listing with attributes, warm (s), local", 1, there, here)
        here, there = [], []
        for _ in range(PAIRS):
            there.append(seconds(lambda: open_all(f"{last}/package/part_1")))
            here.append(seconds(lambda: open_all(f"{root}/package/part_1")))
        pairs("open, read and close a file of 2 kB, warm (us), local", 1e4, there, here)

        receivers = hosts.slice(hosts=0).spawn_procs().spawn("receiver", Receiver)
        buffer = this_host().spawn_procs().spawn("sender", Sender).buffer.call_one().get()
        receivers.seconds.call_one(buffer).get()
        here, there = [], []
        for number in range(PAIRS):
            path = shown.replace("$SUBDIR", "hosts_0") + f"/piece_{number}"
            there.append(receivers.read.call_one(path).get())
            here.append(receivers.seconds.call_one(buffer).get())
        label = f"first read of {PAIRS} x {PIECE >> 20} MB on one host (s each), RDMABuffer"
        pairs(label, 1, there, here)
        print(f"close on {count} hosts (s): {seconds(mount.close):.3g}")
        job.kill()


if __name__ == "__main__":
    main()
