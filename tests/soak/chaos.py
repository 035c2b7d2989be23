"""`python tests/soak/chaos.py [--seconds 600] [--procs 16] [--seed N]`: calls under many failures.

Callers in several processes send calls of every kind to supervised meshes. Meanwhile processes of
these meshes are killed and stopped; actors raise, exit, fork, cannot be constructed, restored or
cleaned up; callers are killed; meshes are given up and stopped by their owner; and launchers die.
All participants write down what they do (`history`). Afterwards the history is checked: each call
has had one outcome, no message was executed twice or out of order, and no message for an earlier
incarnation of an actor reached a later one.

The program is a client, and another process watches it. The client works in rounds. It spawns all
meshes, injects failures, then lets the system recover, after which every call must be answered, and
stops all meshes. After each round but the first the resources must be back to their base line.
Within a second after the client has exited, no process that it started is left. At the end a second
client is killed in the middle of its first round, and must leave no process either.

When a check fails, the program prints the seed and the lines of the history that show the fault,
and keeps the folder of the run. The seed repeats the random choices, but not the interleaving.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from footprint import excess, footprint
from history import Journal, summary, violations
from report import end
from workload import AsyncCaller, AsyncWorker, Caller, Owner, Sender, Target, Worker, block

import monarch.actor
from monarch._engine.launch.children import die_with_parent
from monarch.actor import SupervisionError, Supervisor, this_host
from monarch.config import configure

MARK = "MONARCH_CHAOS_MARK"
"""A variable of the environment by which every process of a run is known, whoever its parent is."""

WAIT = 60.0
"""Seconds after which a wait is a hang."""

ROUND = 60.0
"""Seconds of chaos in a round."""

FIRST_ROUND = 10.0

BETWEEN = 0.25
"""Mean seconds between two faults."""

LEFT_WITHIN = 30.0
"""Seconds after the end of the client until nothing of it is left."""

QUIET = {"max_restarts": 1_000_000, "within": 5.0, "backoff": 0.01, "max_backoff": 0.2}


# -- the client ----------------------------------------------------------------------------------


class Group:
    """Meshes under one supervisor, and how to spawn them again when it has given up."""

    def __init__(
        self, name: str, make: Callable[[str], tuple[Supervisor, list[Any], list[Target]]]
    ) -> None:
        self._name = name
        self._make = make
        self._generation = 0
        self.renew()

    def renew(self) -> None:
        self._generation += 1
        self.supervisor, self._procs, self.own = self._make(f"{self._name}.{self._generation}")

    @property
    def targets(self) -> list[Target]:
        """The meshes to call."""
        return self.own

    def await_health(self) -> None:
        self.supervisor.healthy.get(timeout=WAIT)

    def stop(self) -> None:
        for procs in self._procs:
            procs.stop().get(timeout=WAIT)


class OwnersGroup(Group):
    """A group of one owner, whose mesh is called. Each incarnation of the owner has a new mesh."""

    _owned: tuple[Target, ...] = ()

    @property
    def targets(self) -> list[Target]:
        (owner,) = self.own
        with contextlib.suppress(SupervisionError):  # the owner has failed: call its former mesh
            self._owned = (owner.mesh.target.call_one().get(timeout=WAIT),)
        return list(self._owned)

    def await_health(self) -> None:
        super().await_health()
        (owner,) = self.own
        owner.mesh.healthy.call_one().get(timeout=WAIT)


class Chaos:
    """One round: its meshes, callers and faults."""

    def __init__(self, folder: Path, procs: int, seed: int, number: int) -> None:
        self.folder = folder
        self.seed = seed
        self.number = number
        self.chance = random.Random(f"{seed} {number}")
        self.journal = Journal(folder / "history")
        self.client = Sender(self.journal, f"client{number}", seed)
        self.villain = Sender(self.journal, f"villain{number}", seed)
        self.over = threading.Event()
        self.problems: queue.Queue[str] = queue.Queue()
        callers = max(2, procs // 4)
        rest = procs - callers
        sizes = [(rest + 3 - i) // 5 for i in range(5)]  # these leave a process for the owner
        self.callers = Group(f"callers{number}", lambda name: self._callers(name, callers))
        self.owners = OwnersGroup(f"d{number}", lambda name: self._owner(name, sizes[4] or 1))
        self.groups = [
            Group(f"a{number}", lambda name: self._one_for_one(name, sizes[0])),
            Group(f"b{number}", lambda name: self._one_for_all(name, sizes[1])),
            Group(f"c{number}", lambda name: self._rest_for_one(name, sizes[2], sizes[3])),
            self.owners,
        ]

    # -- the meshes ------------------------------------------------------------------------------

    def _spawn(self, supervisor: Supervisor, procs: Any, name: str, cls: Any) -> Target:
        return Target(name, supervisor.spawn(procs, name, cls, self.folder, name))

    def _callers(self, name: str, count: int) -> tuple[Supervisor, list[Any], list[Target]]:
        supervisor = Supervisor(**QUIET)
        folder, seed = self.folder, self.seed + self.number
        procs = [this_host().spawn_procs({"gpus": n}) for n in (count // 2, count - count // 2)]
        targets = [
            Target(f"{name}{kind}", supervisor.spawn(on, name, cls, folder, f"{name}{kind}", seed))
            for on, kind, cls in zip(procs, "sa", (Caller, AsyncCaller), strict=True)
        ]
        return supervisor, procs, targets

    def _one_for_one(self, name: str, count: int) -> tuple[Supervisor, list[Any], list[Target]]:
        """Spawn two meshes on the same processes, whose actors are restarted in place."""
        supervisor = Supervisor(**QUIET)
        procs = this_host().spawn_procs({"gpus": count})
        targets = [
            self._spawn(supervisor, procs, f"{name}s", Worker),
            self._spawn(supervisor, procs, f"{name}a", AsyncWorker),
        ]
        return supervisor, [procs], targets

    def _one_for_all(self, name: str, count: int) -> tuple[Supervisor, list[Any], list[Target]]:
        """Spawn a mesh with processes that are restarted, and a supervisor that may give up."""
        limits = {**QUIET, "max_restarts": 4, "within": 1.5}
        supervisor = Supervisor("one_for_all", fresh_process=True, patience=0.3, **limits)
        procs = this_host().spawn_procs({"gpus": count})
        return supervisor, [procs], [self._spawn(supervisor, procs, f"{name}s", Worker)]

    def _rest_for_one(
        self, name: str, first: int, then: int
    ) -> tuple[Supervisor, list[Any], list[Target]]:
        supervisor = Supervisor("rest_for_one", patience=0.3, **QUIET)
        procs = [this_host().spawn_procs({"gpus": count}) for count in (first, then)]
        targets = [
            self._spawn(supervisor, on, f"{name}{kind}", cls)
            for on, kind, cls in zip(procs, "sa", (Worker, AsyncWorker), strict=True)
        ]
        return supervisor, procs, targets

    def _owner(self, name: str, count: int) -> tuple[Supervisor, list[Any], list[Target]]:
        supervisor = Supervisor(**QUIET)
        procs = this_host().spawn_procs({"gpus": 1})
        owner = Target(name, supervisor.spawn(procs, name, Owner, self.folder, name, count))
        return supervisor, [procs], [owner]

    def targets(self) -> list[Target]:
        return [target for group in self.groups for target in group.targets]

    # -- the calls -------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        threads = [
            threading.Thread(target=self._guard, args=args, name=f"chaos-{args[0].__name__}")
            for args in [
                (self._load_here,),
                *(
                    (self._load_there, target, rank)
                    for target in self.callers.targets
                    for rank in range(len(target.mesh))
                ),
            ]
        ]
        for thread in threads:
            thread.start()
        self._guard(self._faults, time.monotonic() + seconds)
        self.over.set()
        for thread in threads:
            thread.join()
        self._guard(self._calm)
        self._guard(self._stop)

    def _guard(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            self.problems.put(f"{function.__name__}: {type(error).__name__}: {error}")
            self.over.set()

    def _load_here(self) -> None:
        while not self.over.is_set():
            block(self.client.load(self.targets(), 50))

    def _load_there(self, target: Target, rank: int) -> None:
        while not self.over.is_set():
            with contextlib.suppress(SupervisionError):  # callers are killed, too
                target.mesh.slice(gpus=rank).load.call_one(self.targets(), 50).get(timeout=WAIT)

    def _calm(self) -> None:
        for group in (self.callers, *self.groups):
            try:
                group.await_health()
            except SupervisionError:
                self._renew(group)
                group.await_health()
        self.journal.write("note", "calm")
        targets = self.targets()
        block(self.client.calm(targets))
        for target in self.callers.targets:
            target.mesh.calm.call(targets).get(timeout=2 * WAIT)

    def _stop(self) -> None:
        for group in self.groups:
            group.stop()
        for target in self.callers.targets:
            target.mesh.finish.call().get(timeout=2 * WAIT)
        for sender in (self.client, self.villain):
            block(sender.finish())
        self.callers.stop()

    # -- the faults ------------------------------------------------------------------------------

    def _faults(self, until: float) -> None:
        faults = {
            self._kill: 4.0,
            self._raise: 4.0,
            self._exit: 2.0,
            self._pause: 3.0,
            self._pause_and_kill: 1.0,
            self._fork: 1.0,
            self._kill_caller: 1.0,
            self._kill_owner: 0.5,
            self._too_much: 0.3,
            self._pause_runtime: 0.5,
            self._launcher: 0.2,
            self._renew_one: 0.4,
        }
        while time.monotonic() < until and not self.over.is_set():
            for group in self.groups:  # the supervisor of one of them gives up easily
                if group.supervisor._fallen is not None:
                    self.journal.write("note", "given-up", group.own[0].name)
                    self._renew(group)
            (fault,) = self.chance.choices(list(faults), list(faults.values()))
            fault()
            self.over.wait(self.chance.expovariate(1 / BETWEEN))

    def _victim(self) -> tuple[Target, int]:
        target = self.chance.choice(self.targets())
        return target, self.chance.randrange(len(target.mesh))

    def _signal(self, number: int, name: str, rank: int) -> bool:
        path = self.folder / f"{name}.{rank}.pid"
        if not path.exists():
            return False  # not constructed yet
        return signal_own(int(path.read_text() or 0), number)

    def _kill(self) -> None:
        target, rank = self._victim()
        self.journal.write("note", "kill", target.name, rank)
        self._signal(signal.SIGKILL, target.name, rank)

    def _kill_caller(self) -> None:
        target = self.chance.choice(self.callers.targets)
        rank = self.chance.randrange(len(target.mesh))
        self.journal.write("note", "kill-caller", target.name, rank)
        self._signal(signal.SIGKILL, target.name, rank)

    def _pause(self) -> None:
        target, rank = self._victim()
        self.journal.write("note", "pause", target.name, rank)
        if self._signal(signal.SIGSTOP, target.name, rank):
            self.over.wait(self.chance.uniform(0.02, 0.4))
            self._signal(signal.SIGCONT, target.name, rank)

    def _pause_and_kill(self) -> None:
        target, rank = self._victim()
        self.journal.write("note", "pause-and-kill", target.name, rank)
        if self._signal(signal.SIGSTOP, target.name, rank):
            self.over.wait(self.chance.uniform(0.02, 0.4))
            self._signal(signal.SIGKILL, target.name, rank)

    def _make_fail(self, how: str) -> None:
        target, rank = self._victim()
        self.journal.write("note", how, target.name, rank)
        self.villain.window.append(self.villain.send_one(target, rank, "one", how))

    def _raise(self) -> None:
        self._make_fail("raise")

    def _exit(self) -> None:
        self._make_fail(self.chance.choice(("exit", "kill")))

    def _fork(self) -> None:
        self._make_fail(self.chance.choice(("fork", "daemon", "command")))

    def _kill_owner(self) -> None:
        """Kill the owner; its mesh ends with it."""
        (owner,) = self.owners.own
        self.journal.write("note", "kill-owner", owner.name)
        self._signal(signal.SIGKILL, owner.name, 0)

    def _too_much(self) -> None:
        """Cause more failures of the second group than its supervisor tolerates."""
        (target,) = self.groups[1].own
        self.journal.write("note", "too-much", target.name)
        for _ in range(8):
            rank = self.chance.randrange(len(target.mesh))
            self.villain.window.append(self.villain.send_one(target, rank, "one", "raise"))
            self.over.wait(0.1)

    def _launcher(self) -> None:
        """Kill a launcher; all processes that it started end with it."""
        if launchers := self._runtime()[1:]:
            self.journal.write("note", "kill-launcher")
            signal_own(self.chance.choice(launchers), signal.SIGKILL)

    def _pause_runtime(self) -> None:
        pid = self.chance.choice(self._runtime())
        self.journal.write("note", "pause-runtime")
        signal_own(pid, signal.SIGSTOP)
        self.over.wait(self.chance.uniform(0.02, 0.3))
        signal_own(pid, signal.SIGCONT)

    def _runtime(self) -> list[int]:
        """Return the pids of the host agent and of the launchers."""
        agent = next(pid for pid in children(os.getpid()) if is_own(pid))
        return [agent, *(pid for pid in children(agent) if is_own(pid))]

    def _renew_one(self) -> None:
        self._renew(self.chance.choice(self.groups))

    def _renew(self, group: Group) -> None:
        self.journal.write("note", "renew", group.own[0].name)
        for target in group.own:
            target.mesh.stop("renewed")
        group.stop()
        group.renew()


def client(folder: Path, seconds: float, procs: int, seed: int) -> None:
    """Run rounds of chaos: the watched program. Print the faults; exit with 1 if there are any."""
    die_with_parent()
    configure(cleanup_timeout="300ms", stop_actor_timeout="2s", stop_grace_period="1s")
    given_up: list[Any] = []
    monarch.actor.unhandled_fault_hook = given_up.append
    start = time.monotonic()
    before: dict[str, int] = {}
    number = 0
    wrong: list[str] = []
    while not wrong and (left := seconds - (time.monotonic() - start)) > 0:
        number += 1
        chaos = Chaos(folder, procs, seed, number)
        chaos.run(min(left / 2, FIRST_ROUND) if number == 1 else min(left, ROUND))
        wrong += chaos.problems.queue
        wrong += [
            f"not to be given up: {failure.report()}"
            for failure in given_up
            if not failure.mesh_name.startswith("b")
        ]
        names = [failure.mesh_name for failure in given_up]
        wrong += [f"given up twice: {name}" for name in names if names.count(name) > 1]
        del chaos
        if number == 1:
            before = footprint()
        else:
            wrong += excess(before)
        if children_left := [pid for pid in marked(os.environ[MARK]) if not is_runtime(pid)]:
            wrong.append(f"left after round {number}: {children_left}")
    print("\n".join(wrong), flush=True)
    sys.exit(bool(wrong))


# -- processes -----------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def is_own(pid: int, mark: str | None = None) -> bool:
    """Whether the process belongs to this run: pids are reused, and other programs run as well."""
    variable = f"{MARK}={os.environ[MARK] if mark is None else mark}".encode()
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def signal_own(pid: int, number: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return False
    try:
        if not is_own(pid):
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def marked(mark: str) -> list[int]:
    """Return the processes of a run that have not exited."""
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in found if pid != os.getpid() and is_own(pid, mark)]


def is_runtime(pid: int) -> bool:
    """Whether the process is the client, its agent, or a launcher, and no proc."""
    parent = ""
    with contextlib.suppress(FileNotFoundError):
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    agents = children(os.getpid())
    return pid == os.getpid() or pid in agents or int(parent or 0) in agents


# -- the watching process ------------------------------------------------------------------------


class Run:
    """A client, as seen by the process that watches it."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        folder.mkdir()
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.wrong: list[str] = []
        with (folder / "printed").open("w") as printed:  # processes left behind keep a pipe open
            self.client = subprocess.Popen(
                [sys.executable, __file__, "--client", str(folder), *arguments],
                env={**os.environ, MARK: self.mark, "TMPDIR": str(folder)},
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def finish(self) -> list[str]:
        """Wait for the client to exit; return all faults, including those of the history."""
        code = self.client.wait()
        ended = time.monotonic()
        if code not in (0, -signal.SIGKILL):
            self.wrong.append(f"exit code {code}: {(self.folder / 'printed').read_text()[-5000:]}")
        while (left := marked(self.mark)) and time.monotonic() - ended < LEFT_WITHIN:
            time.sleep(0.01)
        for pid in left:
            with contextlib.suppress(FileNotFoundError):
                what = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                self.wrong.append(f"process {pid} outlived the client: {what}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        expected = {"history", "printed"}
        files = {path.name for path in self.folder.iterdir() if path.suffix != ".pid"}
        self.wrong += [f"file {name} outlived the client" for name in files - expected]
        self.wrong += [str(found) for found in violations(self.lines())]
        return self.wrong

    def lines(self) -> list[str]:
        return Journal.lines(self.folder / "history")


def watch(seconds: float, procs: int, seed: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    arguments = [f"--seconds={seconds}", f"--procs={procs}", f"--seed={seed}"]
    start = time.monotonic()
    run = Run(folder / "whole", arguments)
    faults = run.finish()
    if not faults:
        killed = Run(folder / "killed", arguments)
        while not (killed.folder / "history").exists() and killed.client.poll() is None:
            time.sleep(0.01)
        try:
            killed.client.wait(min(seconds / 4, FIRST_ROUND / 2))
        except subprocess.TimeoutExpired:
            killed.client.kill()
        faults += killed.finish()
    counts = ", ".join(f"{name} {count:,}" for name, count in summary(run.lines()).items())
    print(f"seed {seed}: {counts}")
    if faults:
        for fault in faults[:20]:
            print(fault)
        print(f"the history is in {folder}, the seed was {seed}")
        faults = [f"{len(faults)} faults"]
    else:
        shutil.rmtree(folder)
    end(f"chaos on {procs} procs, seed {seed}", time.monotonic() - start, faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--procs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--client", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    if options.client is None:
        watch(options.seconds, options.procs, seed)
    else:
        client(options.client, options.seconds, options.procs, seed)


if __name__ == "__main__":
    main()
