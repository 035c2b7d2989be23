"""`python tests/soak/goodput.py [--seconds 60] [--every 5]`: training under kills, by four systems.

The digits network is trained with the same batches by

- `monarch.training`, replicas that are replaced (`examples/train_digits_replicas.py`),
- `monarch run --max-restarts` of a plain script (`examples/train_digits_ddp.py`),
- torchrun with ``--max-restarts`` of that script,
- torchft, if it can be installed, with a torchrun for each replica group.

In a round each system trains once without kills and once with a SIGKILL to a random rank every few
seconds. Goodput is the ratio of both speeds: useful steps per second. A step counts once, also if
it is done again. Starting is not measured: time begins after the first steps. Kills come at the
same intervals for all, and one that finds no living rank is skipped. Every few steps the network is
tested; with the same steps done, a disturbed training should have the accuracy of the undisturbed
one, and where the order of sums does not depend on the kills, the same bits.

Each part that is finished is kept in a folder, so a run that was interrupted goes on with the next
part. Options that change a part must stay the same; `--fresh` begins again. The last lines are a
table in Markdown, with a warning for each part that failed.

The full length: ``--seconds 600 --every 5``, with ``--undisturbed 120`` about 50 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MARK = "MONARCH_SOAK_GOODPUT"  # in the environment of all processes of a part
WARM_UP = 50  # steps before time begins
TEST_EVERY = 200  # steps
SAVE_EVERY = 50  # steps between two checkpoints on disk, of all systems that have them
LIMIT = 300.0  # seconds for the first steps, and after a part for its processes to exit
TORCHFT = ("torchft==0.2.0", "opentelemetry-exporter-otlp-proto-http")
LIGHTHOUSE = """
import sys
from torchft._torchft import LighthouseServer
server = LighthouseServer(
    bind="127.0.0.1:0",
    min_replicas=1,
    join_timeout_ms=1000,
    quorum_tick_ms=50,
    heartbeat_timeout_ms=1000,
)
print("http://127.0.0.1:" + server.address().rpartition(":")[2], flush=True)
sys.stdin.read()
"""

Event = dict[str, Any]


@dataclasses.dataclass
class Part:
    """The result of one training.

    Attributes:
        system: which.
        every: seconds between kills, or 0.
        seconds: the time measured.
        useful: steps in this time, each counted once.
        repeated: steps that were done again.
        kills: how many found a living rank.
        pauses: seconds from each kill to the next step that had not been done before.
        tests: accuracy and checksum, by step.
        fault: why the part failed, or "".
    """

    system: str
    every: float
    seconds: float
    useful: int = 0
    repeated: int = 0
    kills: int = 0
    pauses: list[float] = dataclasses.field(default_factory=list)
    tests: dict[int, tuple[float, int]] = dataclasses.field(default_factory=dict)
    fault: str = ""

    @property
    def speed(self) -> float:
        return self.useful / self.seconds

    @staticmethod
    def of(
        system: str,
        every: float,
        events: list[Event],
        start: float,
        seconds: float,
        kills: list[float],
    ) -> Part:
        """Return the result of a training whose time began at `start`."""
        part = Part(system, every, seconds, kills=len(kills))
        best = 0
        fresh: list[float] = []  # times of steps that had not been done before
        for event in events:
            if event["event"] == "test":
                part.tests.setdefault(event["step"], (event["accuracy"], event["weights"]))
            if event["event"] != "step" or event["at"] > start + seconds:
                continue
            if event["step"] <= best:
                part.repeated += event["at"] > start
                continue
            best = event["step"]
            fresh.append(event["at"])
        part.useful = sum(at > start for at in fresh)
        for kill in kills:
            part.pauses += [at - kill for at in fresh if at > kill][:1]
        return part


class Log:
    """The file to which the ranks of a part append their events."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0
        self.events: list[Event] = []
        self.pids: dict[int, int] = {}
        self.step = 0

    def read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        whole, _, _ = text.rpartition(b"\n")
        self.offset += len(whole) + bool(whole)
        for event in map(json.loads, whole.splitlines()):
            self.events.append(event)
            if event["event"] == "began":
                self.pids[event["rank"]] = event["pid"]
            elif event["event"] == "step":
                self.step = max(self.step, event["step"])

    def alive(self) -> list[int]:
        """Return the processes of the ranks that run now."""
        return [pid for _, pid in sorted(self.pids.items()) if running(pid)]


def running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def marked(value: str) -> list[int]:
    """Return the processes that inherited this mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={value}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if running(pid)]


class Runs:
    """The processes of a part. All of them exit with `end`."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.environ = os.environ | {"OMP_NUM_THREADS": "1", MARK: str(folder)}
        # torchrun shares one store between its attempts, where a rank may read the address of a
        # process of the attempt before, and fails then.
        self.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.processes: list[subprocess.Popen[Any]] = []

    def start(self, *words: str, environ: dict[str, str] | None = None, **more: Any) -> None:
        with (self.folder / "output").open("ab") as output:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *words],
                    cwd=self.folder,
                    env=self.environ | (environ or {}),
                    start_new_session=True,
                    **{"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **more},
                )
            )

    def failed(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 10
        while marked(str(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
            self.failed()  # waits for those that have exited
        deadline = time.monotonic() + LIMIT
        while left := marked(str(self.folder)):
            if time.monotonic() > deadline:
                raise SystemExit(f"error: processes {left} do not exit")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
            self.failed()
        for process in self.processes:
            process.wait(LIMIT)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def replicas(runs: Runs) -> None:
    script = str(EXAMPLES / "train_digits_replicas.py")
    words = [f"--groups={runs.ranks}", "--steps=1000000000", "--mtbf=0", "--step-time=0"]
    words += ["--checkpoints=saved", "--events=events", f"--test-every={TEST_EVERY}"]
    runs.start(script, *words)


def ddp(runs: Runs, *launcher: str) -> None:
    script = str(EXAMPLES / "train_digits_ddp.py")
    words = ["--steps=1000000000", "--checkpoint=saved.pt", f"--save-every={SAVE_EVERY}"]
    words += ["--print-every=1000", "--events=events", f"--test-every={TEST_EVERY}"]
    ranks = f"--nproc-per-node={runs.ranks}"
    runs.start("-m", *launcher, ranks, "--max-restarts=1000000", script, *words)


def monarch_run(runs: Runs) -> None:
    ddp(runs, "monarch.cli", "run", "--keep=0")


def torchrun(runs: Runs) -> None:
    ddp(runs, "torch.distributed.run", "--standalone")


def torchft(runs: Runs) -> None:
    packages = os.pathsep.join([str(runs.folder.parent / "torchft"), str(EXAMPLES)])
    # Here torchrun's own store is wanted: the manager of a group connects to it.
    environ = {"PYTHONPATH": packages, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runs.start("-c", LIGHTHOUSE, environ=environ, **pipes)
    output = runs.processes[0].stdout
    assert output is not None
    environ["TORCHFT_LIGHTHOUSE"] = output.readline().strip()
    script = str(Path(__file__).with_name("goodput_torchft.py"))
    words = ["--events=events", f"--test-every={TEST_EVERY}"]
    words += ["--checkpoint=saved.pt", f"--save-every={SAVE_EVERY}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    for group in range(runs.ranks):
        environ["REPLICA_GROUP_ID"] = str(group)
        runs.start(*launcher, "--max-restarts=1000000", script, *words, environ=environ)


SYSTEMS: dict[str, Callable[[Runs], None]] = {
    "monarch.training": replicas,
    "monarch run": monarch_run,
    "torchrun": torchrun,
    "torchft": torchft,
}


def measure(system: str, ranks: int, every: float, seconds: float, folder: Path) -> Part:
    """Train once; return the result. With `every` > 0, kill a rank every so many seconds."""
    chance = random.Random(1)
    kills: list[float] = []
    log, runs = Log(folder / "events"), Runs(ranks, folder)
    runs.end()  # what a run that was killed has left
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fault, start = "", 0.0
    try:
        SYSTEMS[system](runs)
        deadline = time.time() + LIMIT
        while log.step < WARM_UP and not fault:
            time.sleep(0.02)
            log.read()
            if runs.failed() or time.time() > deadline:
                fault = "did not start"
        start = time.time()
        due = start + every
        while (now := time.time()) < start + seconds and not fault:
            time.sleep(min(0.05, start + seconds - now))
            log.read()
            if runs.failed():
                fault = f"ended after {time.time() - start:.0f} s"
            if every and time.time() >= due:
                due += every
                if victims := log.alive():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(victims), signal.SIGKILL)
                        kills.append(time.time())
    finally:
        runs.end()
    log.read()
    part = Part.of(system, every, log.events, start, seconds, kills)
    if fault:
        end = (folder / "output").read_text(errors="replace").splitlines()[-20:]
        print(*end, sep="\n", file=sys.stderr)
        part.fault = fault
    else:
        shutil.rmtree(folder)
    return part


def install_torchft(folder: Path) -> str:
    """Install torchft into a folder of its own; return why that is not possible, or ""."""
    if (folder / "torchft" / "__init__.py").exists():
        return ""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder)]
    for words in (["--no-deps", TORCHFT[0]], list(TORCHFT[1:])):
        done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    return ""


def load_parts(path: Path, options: dict[str, Any]) -> dict[str, Part]:
    """Return the parts that an earlier run with the same options has finished, by name."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    if kept["options"] != options:
        raise SystemExit(f"error: {path} has parts with {kept['options']}; --fresh begins again")
    parts = {}
    for name, fields in kept["parts"].items():
        tests = {int(step): tuple(each) for step, each in fields.pop("tests").items()}
        parts[name] = Part(**fields, tests=tests)
    return parts


def keep(path: Path, options: dict[str, Any], parts: dict[str, Part]) -> None:
    fields = {name: dataclasses.asdict(part) for name, part in parts.items()}
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"options": options, "parts": fields}))
    new.replace(path)


def row(system: str, calm: list[Part], killed: list[Part]) -> str:
    """Return a system's line of the table, over all rounds."""

    def speed(parts: list[Part]) -> float:
        return sum(part.useful for part in parts) / sum(part.seconds for part in parts)

    pauses = [pause for part in killed for pause in part.pauses]
    kills = sum(part.kills for part in killed)
    repeated = sum(part.repeated for part in killed) / kills if kills else 0.0
    reference = {step: test for part in calm for step, test in part.tests.items()}
    common = [step for part in killed for step in part.tests if step in reference]
    accuracy = "-"
    if common:
        last = max(common)
        here = next(part.tests[last] for part in killed if last in part.tests)
        same = all(
            part.tests[step] == reference[step]
            for part in killed
            for step in part.tests
            if step in reference
        )
        accuracy = f"{here[0]:.4f} / {reference[last][0]:.4f} at {last:,}"
        accuracy += ", same bits" if same else ""
    goodput = f"{speed(killed) / speed(calm):.0%}" if speed(calm) else "-"
    pause = f"{statistics.median(pauses):.2f} s" if pauses else "-"
    cells = [system, f"{speed(calm):.1f}", f"{speed(killed):.1f}", goodput, str(kills)]
    return " | ".join(["", *cells, pause, f"{repeated:.1f}", accuracy, ""]).strip()


def table(parts: list[Part], every: float) -> list[str]:
    head = ["", "steps/s", f"with a kill every {every:g} s", "goodput", "kills"]
    head += ["pause, median", "steps again per kill", "accuracy with / without kills at step"]
    lines = [" | ".join(["", *head, ""]).strip(), "|---" * len(head) + "|"]
    for system in SYSTEMS:
        here = [part for part in parts if part.system == system and not part.fault]
        calm = [part for part in here if not part.every]
        killed = [part for part in here if part.every]
        if calm and killed:
            lines.append(row(system, calm, killed))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure training under kills.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of training under kills, in each part")
    add("--undisturbed", type=float, help="seconds of training without (a third of --seconds)")
    add("--every", type=float, default=5.0, help="seconds between two kills")
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=1, help="how often each system is measured, in turns")
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    add("--folder", type=Path, default=Path("out/goodput"), help="for finished parts")
    add("--fresh", action="store_true", help="forget finished parts")
    args = parser.parse_args()
    calm = args.undisturbed or args.seconds / 3
    folder: Path = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.json"
    if args.fresh:
        results.unlink(missing_ok=True)
    options = {"seconds": args.seconds, "undisturbed": calm, "every": args.every}
    options["ranks"] = args.ranks
    parts = load_parts(results, options)
    missing = install_torchft(folder / "torchft") if "torchft" in args.systems else ""
    began = time.monotonic()
    for number in range(args.rounds):
        for system in args.systems:
            if system == "torchft" and missing:
                continue
            for every, seconds in ((0.0, calm), (args.every, args.seconds)):
                name = f"{number} {system}{' under kills' if every else ''}"
                if name not in parts:
                    place = folder / name.replace(" ", "_")
                    part = measure(system, args.ranks, every, seconds, place)
                    if not part.fault:
                        parts[name] = part
                        keep(results, options, parts)
                    verdict = part.fault or f"{part.useful} steps, {part.kills} kills"
                    at = time.monotonic() - began
                    print(f"{at:7.1f} s  round {name}: {verdict}", file=sys.stderr, flush=True)
                    if part.fault:
                        print(f"warning: its files are in {place}", file=sys.stderr)
    wanted = {f"{number} " for number in range(args.rounds)}
    shown = [part for name, part in parts.items() if name[: name.index(" ") + 1] in wanted]
    print("\n".join(table([part for part in shown if part.system in args.systems], args.every)))
    if missing:
        print(f"\ntorchft could not be installed: {missing}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on with the part that was under way")
