"""The cost of authenticated packets between hosts: `python benchmarks/authentic.py`.

    python benchmarks/authentic.py [--rounds 5] [--megabytes 500] [--calls 3000]

The program calls an actor on a worker loop at the loopback device: small calls, over a direct
connection and through the agents, and an acknowledged array of so many megabytes. Three kinds of
connection take turns: authenticated (the default), not authenticated (`authenticate_packets` off at
both ends), and TLS. The output is Markdown, for docs/security.md: medians over the rounds, and for
calls the medians of the rounds' medians.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from machine import facts

from monarch.security import make_certificates

WORKER = (
    "import sys; from monarch.actor import run_worker_loop_forever; "
    "run_worker_loop_forever(address=sys.argv[1], ca='trust_all_connections')"
)
CLIENT = """
import json, statistics, sys, time
import numpy as np
from monarch.actor import Actor, attach_to_workers, endpoint
from monarch.config import configure

class Echo(Actor):
    @endpoint
    def echo(self, value): return None

address, calls, megabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def call(echo, count):
    times = []
    for _ in range(count):
        start = time.perf_counter()
        echo.echo.call_one(None).get()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6

hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
hosts.initialized.get()
found = {}
configure(direct_connections=False)
echo = hosts.spawn_procs().spawn("agents", Echo)
call(echo, 200)
found["agents"] = call(echo, calls)
data = np.random.default_rng(0).integers(0, 256, megabytes << 20, np.uint8)
best = []
for _ in range(3):
    start = time.perf_counter()
    echo.echo.call_one(data).get()
    best.append(megabytes / (time.perf_counter() - start))
found["array"] = statistics.median(best)
configure(direct_connections=True)
echo = hosts.spawn_procs().spawn("direct", Echo)
call(echo, 500)
found["direct"] = call(echo, calls)
hosts.stop().get()
print(json.dumps(found))
"""
KINDS = {"authenticated": "tcp", "not authenticated": "tcp", "TLS": "tls"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--calls", type=int, default=3000)
    options = parser.parse_args()
    print(f"{facts()}\n", file=sys.stderr)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "client.py"
        script.write_text(CLIENT)
        client, worker = make_certificates(folder, ["client", "127.0.0.1"])
        for _ in range(options.rounds):
            for kind, scheme in KINDS.items():
                plain = "false" if kind == "not authenticated" else "true"
                environ = {**os.environ, "MONARCH_AUTHENTICATE_PACKETS": plain}
                with socket.socket() as sock:
                    sock.bind(("127.0.0.1", 0))
                    address = f"{scheme}://127.0.0.1:{sock.getsockname()[1]}"
                served = subprocess.Popen(
                    [sys.executable, "-c", WORKER, address], env={**environ, **worker.environment}
                )
                done = subprocess.run(
                    [sys.executable, script, address, str(options.calls), str(options.megabytes)],
                    env={**environ, **client.environment},
                    stdout=subprocess.PIPE,
                    timeout=300,
                    check=True,
                )
                served.kill()
                served.wait()
                for what, figure in json.loads(done.stdout).items():
                    found[kind, what].append(figure)
    print("| | call, direct | call, by the agents | array |\n|---|---:|---:|---:|")
    for kind in KINDS:
        direct, agents, array = (
            statistics.median(found[kind, what]) for what in ("direct", "agents", "array")
        )
        print(f"| {kind} | {direct:.0f} us | {agents:.0f} us | {array:,.0f} MiB/s |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
