"""`python tests/soak/telemetry_harm.py [--statements N] [--seconds 60]`: telemetry attacked.

First `--statements` (100,000) hostile statements (`tests/hostile_sql.py`) go to a store of each
database, with the bound of memory that an observer has: the rows stay as they are, no file is read
or written.

Then a program runs for `--seconds` while its observer is killed, stopped and continued, its disk is
full (as root), and clients send slowly, too much, garbage, and as many requests as they can. Its
output and its exit code have to be those of a run without telemetry, and at the end SQL has to be
answered again. Printed is how much was done of each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import end

from monarch._store.client import QueryEngineClient
from monarch._store.query import QueryError
from monarch._store.store import Store
from monarch._telemetry.kinds import BatchReader, encode
from tests.hostile_sql import CANARY, statements

PAGE = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
LIMIT = 64  # MiB of a store
BOUND = 3 * LIMIT + 1024  # MiB of a process with it
EXIT = 7
PROGRAM = """
import sys, time
from monarch.actor import Actor, endpoint, this_host


class Adder(Actor):
    def __init__(self):
        self.total = 0

    @endpoint
    def add(self, value):
        self.total += value
        return self.total


adders = this_host().spawn_procs({"procs": 3}).spawn("adders", Adder)
until = time.monotonic() + float(sys.argv[1])
rounds = 0
while time.monotonic() < until or rounds < 200:
    rounds += 1
    found = adders.add.call(rounds).get()
    assert set(found.values()) == {rounds * (rounds + 1) // 2}
    if rounds <= 200:
        print(rounds, sorted(found.values()))
    for value in range(20):
        adders.add.broadcast(0)
print("the end")
sys.exit(7)
"""


def resident(pid: int) -> float:
    """Return the memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def fuzz(database: str, count: int, seed: int, faults: list[str]) -> None:
    """Send statements to a store of one database."""
    store = Store(LIMIT << 20, 0.0, database)

    def put(kind: str, *rows: tuple[Any, ...]) -> None:
        for batch in BatchReader().feed(
            encode(kind, list(zip(*rows, strict=True)), 7, "p@host:1", 0)
        ):
            store.put(batch)

    put("actor", *((100 + n, 1, 200, n, f"trainers.p{n}", "", 0) for n in range(16)))
    put("message", *((n, 100, 200, 7, 70, 5, "e", n, n, n, 0) for n in range(1, 2001)))
    fingerprint = "SELECT count(*), sum(id), min(timestamp_us) FROM messages"
    names = "SELECT count(*), sum(rank), min(full_name) FROM actors"
    before = store.query(fingerprint).rows, store.query(names).rows
    answered = most = 0.0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "canary.csv")
        file.write_text(CANARY)
        source = statements(seed, str(file))
        for number in range(count):
            sql = next(source)
            try:
                answer = store.query(sql, timeout=2.0, limit=1000)
            except QueryError:
                continue
            finally:
                if number % 100 == 0:
                    most = max(most, resident(os.getpid()))
            answered += 1
            if CANARY in str(answer.rows[:50]) and CANARY not in sql:
                faults.append(f"{database} read a file: {sql[:200]!r}")
        if os.listdir(folder) != [file.name] or file.read_text() != CANARY:
            faults.append(f"{database} wrote files: {os.listdir(folder)}")
    if (store.query(fingerprint).rows, store.query(names).rows) != before:
        faults.append(f"{database} has other rows than before")
    if most > BOUND:
        faults.append(f"{database} took {most:.0f} MiB, more than {BOUND}")
    spent = time.perf_counter() - began
    print(f"{database}: {count:,} statements, {answered:,.0f} answered, {most:.0f} MiB", end="")
    print(f", {spent:.0f} s")
    store.close()


class Attack:
    """Attacks the observer of a program, on some threads, until `over` is set."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.places = folder / f"monarch-{os.getuid()}" / "observers"
        self.folder = folder
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self.most = 0.0
        self._choose = random.Random(seed)

    def place(self) -> dict[str, Any]:
        """Return what the observer has written about itself; nothing while there is none."""
        with contextlib.suppress(OSError, ValueError):
            for path in self.places.glob("*.json"):
                found: dict[str, Any] = json.loads(path.read_text())
                self.most = max(self.most, resident(found["observer"]))
                return found
        return {}

    def repeat(self, attack: Callable[[dict[str, Any]], None], pause: float) -> None:
        """Attack whenever there is an observer."""
        while not self.over.wait(pause):
            if place := self.place():
                self.done[attack.__name__] += 1
                with contextlib.suppress(OSError):  # refused, or the connection is closed
                    attack(place)

    def kill(self, place: dict[str, Any]) -> None:
        os.kill(place["observer"], signal.SIGKILL)

    def stop(self, place: dict[str, Any]) -> None:
        os.kill(place["observer"], signal.SIGSTOP)
        self.over.wait(self._choose.uniform(0.1, 3.0))
        os.kill(place["observer"], signal.SIGCONT)

    def fill(self, place: dict[str, Any]) -> None:
        path = self.folder / "full"
        with contextlib.suppress(OSError), path.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        self.over.wait(1.0)
        path.unlink()

    def _connect(self, place: dict[str, Any]) -> socket.socket:
        urls = [place[name] for name in ("telemetry_url", "admin_url") if place[name]]
        where = urlsplit(str(self._choose.choice(urls)))
        return socket.create_connection((where.hostname, where.port or 0), 5)

    def slow(self, place: dict[str, Any]) -> None:
        some = [self._connect(place) for _ in range(50)]
        for byte in b"POST /api/":
            for one in some:
                with contextlib.suppress(OSError):
                    one.send(bytes((byte,)))
            self.over.wait(0.2)
        for one in some:
            one.close()

    def huge(self, place: dict[str, Any]) -> None:
        with self._connect(place) as one:
            head = b"POST / HTTP/1.1\r\nContent-Length: 999999999999\r\nX: "
            one.sendall(head + b"x" * (1 << 24))

    def garbage(self, place: dict[str, Any]) -> None:
        with self._connect(place) as one:
            one.sendall(self._choose.randbytes(self._choose.randrange(1, 5000)))
            one.shutdown(socket.SHUT_WR)
            one.recv(1 << 16)

    def many(self, place: dict[str, Any]) -> None:
        for _ in range(1000):
            with self._connect(place) as one:
                one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                one.recv(1 << 16)

    def sql(self, place: dict[str, Any]) -> None:
        client = QueryEngineClient(place["telemetry_url"])
        source = statements(self._choose.randrange(1 << 30), "/etc/passwd", explosions=0.02)
        for _ in range(100):
            with contextlib.suppress(OSError, RuntimeError, UnicodeError):
                client.query(next(source), timeout=3.0)


def start(folder: Path, seconds: float, telemetry: str) -> subprocess.Popen[str]:
    path = folder.parent / "program.py"
    path.write_text(PROGRAM)
    environ = {
        **os.environ,
        "MONARCH_TELEMETRY": telemetry,
        "MONARCH_TELEMETRY_LIMIT": str(LIMIT << 20),
        "TMPDIR": str(folder),
    }
    return subprocess.Popen(
        [sys.executable, str(path), str(seconds)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def attack(seconds: float, seed: int, faults: list[str]) -> None:
    """Run the program without telemetry, then with it and under attack."""
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above, "tmp")
        folder.mkdir()
        expected, _ = start(folder, 0, "0").communicate(timeout=300)
        mounted = (
            os.geteuid() == 0
            and not subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=False
            ).returncode
        )
        try:
            suffer(folder, seconds, seed, expected, faults, mounted=mounted)
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(folder)], check=True)


def suffer(
    folder: Path, seconds: float, seed: int, expected: str, faults: list[str], *, mounted: bool
) -> None:
    made = Attack(folder, seed)
    process = start(folder, seconds + 30, "1")
    attacks = [
        *((made.kill, 7.0), (made.stop, 3.0), (made.slow, 0.5), (made.huge, 0.3)),
        *((made.garbage, 0.05), (made.many, 0.5), (made.sql, 0.1)),
        *([(made.fill, 2.0)] if mounted else []),
    ]
    threads = [threading.Thread(target=made.repeat, args=each, daemon=True) for each in attacks]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    made.over.set()
    for thread in threads:
        thread.join(60)
    if not comes_back(made):
        faults.append("SQL is not answered after the attacks")
    try:
        found, errors = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        found, errors = process.communicate()
        faults.append("the program hangs")
    if process.returncode != EXIT:
        faults.append(f"the program's exit code is {process.returncode}: {errors[-500:]}")
    if found != expected:
        faults.append(f"the program printed something else: {found[-200:]!r}")
    if made.most > BOUND:
        faults.append(f"the observer took {made.most:.0f} MiB, more than {BOUND}")
    print(", ".join(f"{name} {count}" for name, count in sorted(made.done.items())))
    print(f"the observer took at most {made.most:.0f} MiB")
    never = {each[0].__name__ for each in attacks} - set(made.done)
    faults.extend(f"{name} was never done" for name in never)


def comes_back(made: Attack) -> bool:
    until = time.monotonic() + 25
    sql = "SELECT count(*) AS n FROM messages WHERE endpoint = 'add'"
    while time.monotonic() < until:
        if place := made.place():
            with contextlib.suppress(OSError, RuntimeError):
                if QueryEngineClient(place["telemetry_url"]).query(sql)["rows"][0]["n"]:
                    return True
        time.sleep(0.2)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description="Telemetry under attack.")
    add = parser.add_argument
    add("--statements", type=int, default=100_000, help="for each database")
    add("--seconds", type=float, default=60.0, help="of attacks on a program")
    add("--databases", nargs="*", default=["duckdb", "sqlite3"])
    add("--seed", type=int, default=1)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (BOUND << 20, hard))
    began = time.perf_counter()
    faults: list[str] = []
    for database in options.databases:
        if options.statements:
            fuzz(database, options.statements, options.seed, faults)
    if options.seconds:
        attack(options.seconds, options.seed, faults)
    end("telemetry under attack", time.perf_counter() - began, faults)


if __name__ == "__main__":
    main()
