"""`python tests/soak/mount_link.py [MBIT ...]`: the first read of a mounted file over a link.

The script and a host are in network namespaces of this machine. A queue of the kernel (tbf) bounds
the traffic that leaves the script's namespace to so many Mbit/s (default 1000, 2500, 5000). The
host reads a file of 256 MB from a mounted directory, for the first time. Before that as many bytes
go over a plain TCP connection. Printed are both speeds, counting the content only, and their ratio.
Needs root.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mounts import Receiver

from monarch.actor import attach_to_workers, endpoint
from monarch.remotemount import remotemount
from tests.network import network, unavailable

SIZE = 256 << 20
RATES = (1000, 2500, 5000)  # Mbit/s
PATIENCE = 60.0
WORKER = (
    "from monarch.actor import run_worker_loop_forever as run; import sys; "
    "run(address=sys.argv[1], ca='trust_all_connections')"
)


class Reader(Receiver):
    @endpoint
    def receive(self, address: str, port: int) -> float:
        """Return how long it takes to receive as many bytes over a plain TCP connection."""
        into = bytearray(8 << 20)
        with socket.create_connection((address, port)) as sock:
            begin = time.perf_counter()
            while sock.recv_into(into):
                pass
            return time.perf_counter() - begin


def plain(reader: Any, own: str) -> float:
    """Send as many bytes to the host over a plain TCP connection; return the seconds."""
    with socket.create_server((own, 0)) as server:
        taking = reader.receive.call_one(own, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            piece = os.urandom(8 << 20)
            for _ in range(SIZE // len(piece)):
                connection.sendall(piece)
        seconds: float = taking.get(timeout=PATIENCE)
    return seconds


def read_all(address: str, own: str, folder: str, rates: list[int], limits: Path) -> None:
    """Read one file for each rate, which the outer process sets; runs in the namespace."""
    hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
    hosts.initialized.get(timeout=PATIENCE)
    reader = hosts.spawn_procs().spawn("reader", Reader)
    with remotemount(hosts, f"{folder}/tree", f"{folder}/shown"):
        reader.read.call_one(f"{folder}/shown/warm").get(timeout=PATIENCE)
        for rate in rates:
            (limits / "wanted").write_text(str(rate))
            while not (limits / f"set_{rate}").exists():
                time.sleep(0.01)
            link = plain(reader, own)
            seconds = reader.read.call_one(f"{folder}/shown/{rate}").get()
            speeds = [SIZE * 8 / each / 1e6 for each in (link, seconds)]
            told = f"plain TCP {speeds[0]:.0f}, mounted file {speeds[1]:.0f} Mbit/s"
            print(f"{rate} Mbit/s: {told}, ratio {speeds[1] / speeds[0]:.2f}", flush=True)
    hosts.shutdown().get(timeout=PATIENCE)


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        address, own, folder, *rates = sys.argv[2:]
        read_all(address, own, folder, [int(rate) for rate in rates], Path(folder))
        return
    if (why := unavailable()) is not None:
        raise SystemExit(f"no networks here: {why}")
    rates = [int(rate) for rate in sys.argv[1:]] or [*RATES]
    with tempfile.TemporaryDirectory() as folder, network(2) as made:
        secret = Path(folder, "secret")
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        tree = Path(folder, "tree")
        tree.mkdir()
        for name in ("warm", *map(str, rates)):
            (tree / name).write_bytes(os.urandom(1 << 20) * (SIZE >> 20)) if name != "warm" else (
                tree / name
            ).write_bytes(b"warm")
        environ = {
            **os.environ,
            "MONARCH_SECRET_FILE": str(secret),
            "MONARCH_RDMA_ROUTES": "stream",  # the machine is the same, and memory is no link
        }
        script, host = made.hosts
        address = f"tcp://{host.address}:26600"
        worker = host.start(sys.executable, "-c", WORKER, address, env=environ)
        inner = script.start(
            *(
                sys.executable,
                __file__,
                "--inside",
                address,
                script.address,
                folder,
                *map(str, rates),
            ),
            env=environ,
        )
        try:
            for rate in rates:
                while inner.poll() is None and not _asks(Path(folder), rate):
                    time.sleep(0.01)
                script.limit(rate * 1000 // 8)
                Path(folder, f"set_{rate}").touch()
            if inner.wait():
                raise SystemExit(inner.returncode)
        finally:
            for process in (inner, worker):
                process.kill()
                process.wait()


def _asks(folder: Path, rate: int) -> bool:
    wanted = folder / "wanted"
    return wanted.exists() and wanted.read_text() == str(rate)


if __name__ == "__main__":
    main()
