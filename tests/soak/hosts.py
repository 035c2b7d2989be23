"""`python tests/soak/hosts.py [--hosts 16] [--procs 32]`: one program on many worker loops.

The program starts the worker loops on this machine, attaches to them, spawns the procs with an
actor on each, calls all actors, with small and with big arguments, calls some, and stops all of
them. It prints how long each step takes, and the cost of a call to all: the frames and bytes that
the caller writes, and the bytes on the network, both ways (needs iproute2).
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from monarch._engine.runtime.cast import sender as casting  # noqa: E402
from monarch._engine.transport.link import Link  # noqa: E402
from monarch.actor import Actor, attach_to_workers, endpoint  # noqa: E402
from monarch.config import configure  # noqa: E402

WAIT = 120.0
WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""
CALLS = 30


class Member(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def length(self, data: bytes) -> int:
        return len(data)


class Written:
    """Counters of the frames and bytes that this process writes to its links."""

    def __init__(self) -> None:
        self.frames = self.bytes = 0
        former: Any = Link._send

        def send(link: Link, data: bytes, fds: list[int] | None) -> bool:
            self.frames += 1
            self.bytes += len(data)
            sent: bool = former(link, data, fds)
            return sent

        Link._send = send  # type: ignore[method-assign]


class Network:
    """A counter of the bytes between the caller's host and the workers, both ways."""

    def __init__(self, where: list[str]) -> None:
        ports = [address.rpartition(":")[2] for address in where]
        self._filter = " or ".join(f"dport = :{port}" for port in ports)

    def carried(self) -> int:
        command = ["ss", "-tinH", "state", "established", f"( {self._filter} )"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return sum(map(int, re.findall(r"bytes_(?:sent|received):(\d+)", text)))


def timed(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def addresses(count: int) -> list[str]:
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.bind(("127.0.0.1", 0))
    found = [f"tcp://127.0.0.1:{sock.getsockname()[1]}" for sock in socks]
    for sock in socks:
        sock.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--procs", type=int, default=32, help="on each host")
    parser.add_argument("--megabytes", type=int, default=64, help="of the big argument")
    parser.add_argument("--fanout", type=int, default=16, help="of the tree of hosts")
    parser.add_argument("--one-by-one", action="store_true", help="send to each proc, cast nothing")
    options = parser.parse_args()
    if options.one_by_one:
        casting._FEWEST = 1 << 60
    configure(max_cast_fanout=options.fanout)
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("a secret of this run, and of nobody else\n")
        secret.chmod(0o600)
        os.environ["MONARCH_SECRET_FILE"] = str(secret)
        where = addresses(options.hosts)
        script = Path(folder, "worker.py")
        script.write_text(WORKER)
        workers = [subprocess.Popen([sys.executable, str(script), each]) for each in where]
        try:
            run(where, options.procs, options.megabytes)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    return 0


def run(where: list[str], each: int, megabytes: int) -> None:
    began = time.perf_counter()
    hosts = attach_to_workers(ca="trust_all_connections", workers=where)
    hosts.initialized.get(timeout=WAIT)
    print(f"{len(where)} worker loops attached: {time.perf_counter() - began:.2f} s")

    began = time.perf_counter()
    procs = hosts.spawn_procs({"gpus": each})
    procs.initialized.get(timeout=WAIT)
    count = len(where) * each
    print(f"{count} procs spawned: {time.perf_counter() - began:.2f} s")

    began = time.perf_counter()
    members = procs.spawn("members", Member)
    members.echo.call(0).get(timeout=WAIT)
    print(f"an actor on each, called: {time.perf_counter() - began:.2f} s")

    written, network = Written(), Network(where)
    for name, mesh in (("all", members), ("a slice of all hosts", members.slice(gpus=0))):
        mesh.echo.call(1).get(timeout=WAIT)
        written.frames = written.bytes = 0
        before = network.carried()
        times: list[float] = []
        for number in range(CALLS):
            began = time.perf_counter()
            values = mesh.echo.call(number).get(timeout=WAIT).values()
            times.append(time.perf_counter() - began)
            assert values == [number] * len(mesh)
        carried = (network.carried() - before) / CALLS
        print(
            f"call to {name} ({len(mesh)}): median {statistics.median(times) * 1e3:.1f} ms, "
            f"slowest {max(times) * 1e3:.1f} ms; the caller writes "
            f"{written.frames / CALLS:.1f} frames, {written.bytes / CALLS:.0f} bytes; "
            f"on the network {carried / 1e3:.1f} kB"
        )

    began = time.perf_counter()
    for number in range(CALLS):
        members.echo.broadcast(number)
    sent = time.perf_counter() - began
    members.echo.call(0).get(timeout=WAIT)
    whole = time.perf_counter() - began
    print(
        f"{CALLS} broadcasts to all: {sent * 1e3:.1f} ms until sent, {whole * 1e3:.1f} ms until "
        "handled"
    )

    data = bytes(megabytes << 20)
    some = members.slice(gpus=slice(0, 2))
    before = network.carried()
    took = timed(lambda: some.length.call(data).get(timeout=WAIT))
    carried = (network.carried() - before) / 1e6
    print(
        f"{megabytes} MiB to {len(some)} procs, two on each host: {took:.2f} s, "
        f"on the network {carried:.0f} MB"
    )

    print(f"all asked whether they are there: {timed(lambda: procs.initialized.get()):.3f} s")
    print(f"actors stopped: {timed(lambda: members.stop().get(timeout=WAIT)):.2f} s")  # type: ignore[attr-defined]
    print(f"procs stopped: {timed(lambda: procs.stop().get(timeout=WAIT)):.2f} s")
    hosts.shutdown().get(timeout=WAIT)


if __name__ == "__main__":
    raise SystemExit(main())
