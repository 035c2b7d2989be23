"""Two worker loops on this machine, over TCP: a call from an actor of one to an actor of the other.

The argument is small, or a large array, which the receiver acknowledges. The worker loops are
processes of this program, and their procs inherit its environment.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile

import numpy as np
from timing import argument, emit, samples, samples_of_await

from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint

WORKER = """
import sys
from monarch.actor import enable_transport, run_worker_loop_forever
enable_transport("tcp://127.0.0.1:0")
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class Peer(Actor):
    @endpoint
    async def echo(self, value: int) -> int:
        return value

    @endpoint
    async def take(self, array: np.ndarray) -> int:
        return array.nbytes

    @endpoint
    async def measure(self, other: object, megabytes: int) -> tuple[list[float], list[float]]:
        calls = await samples_of_await(lambda: other.echo.call_one(7))
        array = np.ones(megabytes * 1_000_000, np.uint8)
        return calls, await samples_of_await(lambda: other.take.call_one(array))


class Blocking(Actor):
    """The same call, by endpoints that are no coroutines."""

    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def measure(self, other: object) -> list[float]:
        return samples(lambda: other.echo.call_one(7).get())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main() -> None:
    megabytes = int(argument())
    enable_transport("tcp://127.0.0.1:0")
    with tempfile.NamedTemporaryFile("w") as secret:
        os.chmod(secret.name, 0o600)
        secret.write(secrets.token_hex())
        secret.flush()
        os.environ["MONARCH_SECRET_FILE"] = secret.name
        addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        workers = [
            subprocess.Popen([sys.executable, "-c", WORKER, address]) for address in addresses
        ]
        try:
            hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
            procs = hosts.spawn_procs(per_host={"gpus": 1})
            plain = procs.spawn("plain", Blocking)
            one, other = (plain.slice(hosts=number) for number in range(2))
            blocking = one.measure.call_one(other).get()
            peers = procs.spawn("peers", Peer)
            one, other = (peers.slice(hosts=number) for number in range(2))
            calls, arrays = one.measure.call_one(other, megabytes).get()
            emit(blocking=blocking, calls=calls, arrays=arrays)
            hosts.shutdown().get()
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
                worker.wait()


if __name__ == "__main__":
    main()
