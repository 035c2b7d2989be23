"""Two hosts on this machine: round trips and payloads, against iperf3, TLS and torchmonarch.

    sudo python benchmarks/hosts.py [--seconds 2] [--megabytes 1000] [--repeats 3]
        [--no-reference | --reference PYTHON]

Needs root, iproute2, nftables (as tests/network.py does) and iperf3. One host is this machine. The
other host is a network namespace of it, with a virtual cable between them. For torchmonarch, both
are worker loops on the loopback device, as its transport cannot name other addresses here. Rounds
alternate between the compared programs, and the figures are medians of the rounds' medians. The
output is Markdown, for docs/scale.md.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from environments import ROOT, make
from execute import adopt_orphans, run_command
from machine import facts
from rows import REFERENCE

sys.path.insert(0, str(ROOT))

from monarch.security import make_certificates
from tests.network import Host, network, unavailable

PROGRAMS = ROOT / "benchmarks" / "programs"
WORKER = (
    "import sys; from monarch.actor import run_worker_loop_forever; "
    "run_worker_loop_forever(address=sys.argv[1], ca='trust_all_connections')"
)
TIMEOUT = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure of a round")
    parser.add_argument("--megabytes", type=int, default=1000, help="of a payload")
    parser.add_argument("--gigabytes", type=int, default=10, help="in flight during small calls")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument(
        "--reference", help="an interpreter that has torchmonarch; else one is made"
    )
    options = parser.parse_args()
    problem = unavailable() or (None if shutil.which("iperf3") else "needs the command iperf3")
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    adopt_orphans()
    reference = None
    if not options.no_reference:
        reference = options.reference or str(make(REFERENCE, print))
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    problems = []
    before = facts()
    with tempfile.TemporaryDirectory() as folder, network(1) as made:
        host = made.hosts[0]
        secure = environments(Path(folder), host.address)
        for number in range(options.repeats):
            for name, scheme in (("plain", "tcp"), ("tls", "tls")):
                gigabytes = options.gigabytes if scheme == "tcp" else 0
                with worker(host, scheme, secure) as address:
                    sizes = [str(options.megabytes), str(gigabytes)]
                    command = ["hosts_net.py", address, *sizes]
                    problems += run(sys.executable, command, name, found, options.seconds, secure)
            found["iperf3"].append({"median": iperf3(host, options.seconds)})
            engines = [("ours", sys.executable)]
            if reference is not None:
                engines.append(("reference", reference))
            for name, python in engines:
                command = ["hosts_pair.py", str(options.megabytes)]
                problems += run(python, command, name, found, options.seconds, {})
            print(f"round {number + 1} of {options.repeats}", file=sys.stderr)
    report(found, options, before)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def environments(folder: Path, address: str) -> dict[str, str]:
    """Return the environment of both hosts: the secret, and one certificate for both."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(os.urandom(16).hex())
    [certificate] = make_certificates(folder / "tls", [["client", address]])
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.pathsep.join(paths)
    return {"MONARCH_SECRET_FILE": str(secret), "PYTHONPATH": path, **certificate.environment}


@contextmanager
def worker(host: Host, scheme: str, environment: dict[str, str]) -> Iterator[str]:
    """Run a worker loop on that host; yield its address."""
    address = f"{scheme}://{host.address}:26600"
    command = [sys.executable, "-c", WORKER, address]
    process = host.start(*command, env={**os.environ, **environment})
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def run(
    python: str,
    command: list[str],
    name: str,
    found: dict[str, list[dict[str, float]]],
    seconds: float,
    environment: dict[str, str],
) -> list[str]:
    """Run a program and add its figures to `found`; return the errors."""
    outcome = run_command([python, *command], TIMEOUT, seconds, environment)
    if outcome.figures is None:
        return [f"{name}: {outcome.failure}"]
    for figure, summary in outcome.figures.items():
        found[f"{name} {figure}"].append(summary)
    return []


def iperf3(host: Host, seconds: float) -> float:
    """Return the bytes per second of one stream to that host."""
    server = host.start("iperf3", "-s", "-1", stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)  # the server does not report when it listens
        command = ["iperf3", "-c", host.address, "-J", "-t", f"{max(1, round(seconds))}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rate: float = json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 8
        return rate
    finally:
        server.kill()
        server.wait()


def report(
    found: dict[str, list[dict[str, float]]],
    options: argparse.Namespace,
    machine: dict[str, str | float | int],
) -> None:
    def figure(name: str, which: str = "median") -> float:
        return statistics.median(one[which] for one in found[name])

    def ratio(one: float, other: float) -> str:
        return f"{one / other:.2f}"

    rows = []
    one_host, two_hosts = figure("plain one_host"), figure("plain two_hosts")
    rows.append(("call to an actor on this host", f"{one_host * 1e6:.0f} us", "", ""))
    goal = ratio(two_hosts, one_host)
    rows.append(("on the other host", f"{two_hosts * 1e6:.0f} us", f"{goal} times", "at most 3"))
    rows.append(("the same with TLS", f"{figure('tls two_hosts') * 1e6:.0f} us", "", ""))
    for name, what in (("blocking", "plain functions"), ("calls", "coroutines")):
        pair = figure(f"ours {name}")
        rows.append((f"between actors of two worker loops, {what}", f"{pair * 1e6:.0f} us", "", ""))
        if found[f"reference {name}"]:
            theirs = figure(f"reference {name}")
            faster = f"{theirs / pair:.1f} times slower"
            rows.append(("torchmonarch", f"{theirs * 1e6:.0f} us", faster, "at least 5"))
    size = options.megabytes * 1e6

    def rate(bytes_per_second: float) -> str:
        return f"{bytes_per_second / 1e6:,.0f} MB/s"

    iperf = figure("iperf3")
    plain, tls = size / figure("plain array"), size / figure("tls array")
    rows.append(("iperf3, one stream", rate(iperf), "", ""))
    what = f"array of {options.megabytes:,} MB to the other host, acknowledged"
    rows.append((what, rate(plain), f"{100 * plain / iperf:.0f} % of iperf3", "at least 70 %"))
    rows.append(
        ("the same with TLS", rate(tls), f"{100 * tls / plain:.0f} % of plain", "at least 40 %")
    )
    ours = size / figure("ours arrays")
    rows.append(("the same between two worker loops", rate(ours), "", ""))
    if found["reference arrays"]:
        theirs = size / figure("reference arrays")
        rows.append(("torchmonarch", rate(theirs), f"{ours / theirs:.1f} times slower", "slower"))
    if found["plain meanwhile"]:
        late = figure("plain meanwhile", "p99")
        count = sum(one["count"] for one in found["plain meanwhile"])
        what = f"10-byte calls during {options.gigabytes} GB"
        rows.append((what, f"{figure('plain meanwhile') * 1e3:.1f} ms", f"{count:,.0f} calls", ""))
        rows.append(("their 99th percentile", f"{late * 1e3:.1f} ms", "", "20 ms more at most"))
    print("| | | | goal |\n|---|---:|---:|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(
        f"\n{machine['date']}, commit {machine['commit']}; {machine['processor']}, "
        f"{machine['cores']} cores, Linux {machine['kernel']}; load {machine['load_before']} "
        f"before the start; {options.repeats} rounds."
    )


if __name__ == "__main__":
    sys.exit(main())
