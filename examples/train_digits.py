"""Train a small network on real handwritten digits, data-parallel across processes.

Every process of a mesh holds one `Trainer` actor with its own copy of the network and its own share
of the 1,797 images that come with scikit-learn. In each step the trainers average their gradients
with `torch.distributed`, *inside* the actors. The script only asks the whole mesh for one more
epoch, in one line, and gets the losses of all trainers back as an array.

    python examples/train_digits.py                       # 4 processes, CUDA if there is one
    python examples/train_digits.py --procs 2 --epochs 30
    python examples/train_digits.py --resume out/digits.pt --epochs 40
    python examples/train_digits.py --kill                # one trainer dies on the way
    python examples/train_digits.py --dashboard           # pages in the browser show what it does
    python examples/train_digits.py --hosts tcp://node1:4444,tcp://node2:4444
    python examples/train_digits.py --hosts tcp://node1:4444 --spares tcp://node2:4444 --kill-host
    python examples/train_digits.py --job local --job-hosts 2

The training survives the loss of a trainer: a `Supervisor` replaces a trainer whose process exits,
for whatever cause. The script then forms the process group anew, resets all trainers to the last
checkpoint, and continues: see `Training.run`. The trainers of a host that is lost come back on a
spare one (`--spares`).

With `--hosts` the trainers run on other machines, where `monarch worker` serves these addresses
(and pymonarch, torch and scikit-learn are installed); examples/demo_hosts.py simulates two such
machines. Messages between the script and the trainers are encrypted if the addresses begin with
tls://. Gradients go from trainer to trainer by gloo or NCCL, unencrypted.

With `--job` the script starts the hosts itself, and ends them: as processes of this machine
(local), by ssh, or by a scheduler. The kinds and their options are in examples/jobs.py.

Needs torch, scikit-learn, matplotlib and rich, and starlette and uvicorn for `--dashboard`:
pip install 'pymonarch[examples]'
"""

import argparse
import fcntl
import io
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

START = time.perf_counter()  # before the heavy imports, whose time is part of the bill
if __name__ == "__main__":
    print("importing torch, scikit-learn ...", flush=True)
try:
    import torch
    import torch._dynamo  # the first optimizer imports it: once here, or in each process again
    import torch.distributed as dist
    from jobs import MESH, add_arguments, describe, positive  # beside this file
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from sklearn.datasets import load_digits
    from torch import Tensor, nn

    from monarch.actor import (
        Actor,
        ActorError,
        SupervisionError,
        Supervisor,
        attach_to_workers,
        current_rank,
        current_size,
        endpoint,
        this_host,
    )
    from monarch.distributed_telemetry.actor import start_telemetry
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples]'")

GLOBAL_BATCH = 128  # images per step of all trainers, so the result hardly depends on --procs
TEST_IMAGES = 360
CHECKPOINT_EVERY = 5  # epochs
GOAL = 0.95
LOOPBACK = "127.0.0.1"


Images = tuple[Tensor, Tensor]
"""Pictures of 8 x 8 grey values between 0 and 1, and which digit each of them shows."""


def load(seed: int) -> tuple[Images, Images]:
    """Return a training and a test part of the digits, in a random order given by `seed`."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    pictures = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)[order]
    labels = torch.tensor(digits.target)[order]
    return (
        (pictures[TEST_IMAGES:], labels[TEST_IMAGES:]),
        (pictures[:TEST_IMAGES], labels[:TEST_IMAGES]),
    )


def way_to(host: str) -> tuple[str, str]:
    """Return this machine's address on the route to `host`, and the interface that has it.

    The name of an interface that was not found is an empty string.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))  # sends no packet: UDP only looks up the route
        address = sock.getsockname()[0]
        for _, name in socket.if_nameindex():
            if address == LOOPBACK and name.startswith("lo"):  # "lo", on macOS "lo0"
                return address, name
            request = struct.pack("256s", name.encode())
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(sock, 0x8915, request)  # SIOCGIFADDR of Linux
                if socket.inet_ntoa(answer[20:24]) == address:
                    return address, name
    return address, ""


class Trainer(Actor):
    """One replica of the network.

    All replicas start equal and stay equal, because each step applies the same averaged gradient
    everywhere. `hosts` are the names or addresses of the machines, each with as many trainers.
    """

    def __init__(
        self, train_set: Images, test_set: Images, device: str, seed: int, hosts: list[str]
    ) -> None:
        self.rank, self.world = current_rank().rank, current_size()["procs"]
        # The address by which the next machine (or, without others, this one) reaches this one.
        here = self.rank * len(hosts) // self.world
        self.address, self.interface = way_to(hosts[(here + 1) % len(hosts)])
        if device == "cuda":
            device = f"cuda:{self.rank % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        self.train_set = [part.to(device) for part in train_set]
        self.test_set = [part[self.rank :: self.world].to(device) for part in test_set]
        self.device, self.seed, self.epoch = device, seed, 0

        torch.manual_seed(seed)  # the same seed everywhere: replicas start equal
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        ).to(device)  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def open_store(self) -> tuple[str, int]:
        """Open the store through which the process group forms; return its address and port."""
        # Port 0: the system chooses a free port.
        self.store = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False)
        return self.address, self.store.port

    @endpoint
    def join(self, address: str, port: int, backend: str) -> None:
        """Connect to the other trainers and form the process group."""
        self.leave()
        if self.rank != 0:
            self.store = dist.TCPStore(address, port, is_master=False)
        if self.interface:  # by default gloo uses the one that this machine's name resolves to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", self.interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", self.interface)
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=30),  # limits every wait for a trainer that has exited
        )

    def leave(self) -> None:
        """Close the connections to all other trainers."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @endpoint
    def train_epoch(self) -> list[float]:
        """Train once on all training images; return the loss of every step on this share."""
        images, labels = self.train_set
        order = torch.randperm(
            len(labels), generator=torch.Generator().manual_seed(self.seed + self.epoch)
        )
        losses = []
        # Leave out the last, incomplete batch: all trainers must do the same number of steps.
        for start in range(0, len(order) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            batch = order[start : start + GLOBAL_BATCH][self.rank :: self.world].to(images.device)
            loss = nn.functional.cross_entropy(self.model(images[batch]), labels[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.average_gradients()
            self.optimizer.step()
            losses.append(loss.detach())
        self.epoch += 1
        shares: list[float] = torch.stack(losses).tolist()
        return shares

    def average_gradients(self) -> None:
        """Replace every gradient by its mean over all trainers, with a single all-reduce."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        try:
            dist.all_reduce(flat)
        except RuntimeError:
            # A neighbour in the ring has exited. Only its neighbours see that, and trainers that
            # wait for these neighbours would wait until the timeout. So close all connections.
            self.leave()
            raise
        flat /= self.world
        means = flat.split([g.numel() for g in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))

    @endpoint
    def count_correct(self) -> int:
        """Return how many test images of this trainer's share the network recognizes."""
        images, labels = self.test_set
        with torch.inference_mode():
            return int((self.model(images).argmax(1) == labels).sum())

    @endpoint
    def fingerprint(self) -> float:
        """Return a number that differs between replicas with different weights."""
        return sum(float(p.detach().double().abs().sum()) for p in self.model.parameters())

    @endpoint
    def checkpoint(self) -> bytes:
        """Return the state that trainers need in order to continue from this epoch."""
        saved = {
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(saved, file := io.BytesIO())
        return file.getvalue()

    @endpoint
    def restore(self, checkpoint: bytes) -> int:
        """Load a checkpoint, older or newer than the present state; return its epoch."""
        saved = torch.load(io.BytesIO(checkpoint), map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.epoch = saved["epoch"]
        return self.epoch

    def __cleanup__(self, exc: Exception | None) -> None:
        self.leave()


class Killer(Actor):
    """An actor that kills processes of its machine, as the kernel does when memory runs out."""

    @endpoint
    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    @endpoint
    def kill_host(self) -> None:
        """Kill the worker of this machine and all processes below it, as a power cut does."""
        agent = os.getpgrp()  # the agent of a host leads the group of all processes below it
        stat = Path(f"/proc/{agent}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)  # its parent
        os.killpg(agent, signal.SIGKILL)


def connect(trainers: Trainer, backend: str) -> None:
    """Form one process group of all trainers of the mesh; they leave any group they were in."""
    # Rank 0 opens a port that the system chooses, and keeps it, so no other process can take it.
    address, port = trainers.slice(procs=0).open_store.call_one().get()
    trainers.join.call(address, port, backend).get()


class Training:
    """The script's side of the training: the state that has to outlive a trainer."""

    def __init__(self, trainers: Trainer, supervisor: Supervisor, backend: str) -> None:
        self.trainers, self.supervisor, self.backend = trainers, supervisor, backend
        self.losses: dict[int, list[float]] = {}  # by epoch: mean over all trainers, per step
        self.checkpoint, self.saved = b"", 0.0  # the last checkpoint, and its time
        self.victim = trainers.slice(procs=trainers.size() // 2)
        self.killer: Killer | None = None  # on the victim's machine
        self.plan: dict[int, str] = {}  # by epoch: kill a "trainer" or a "host" in it
        # For each kill, the times of it and of each step of the recovery.
        self.kills: list[tuple[str, dict[str, float]]] = []
        self.moments: dict[str, float] = {}  # of the last kill

    def run(self, checkpoint: bytes | None, epochs: int, console: Console) -> None:
        """Train up to epoch number `epochs`. Replace trainers that exit during the training."""
        self.save(checkpoint)
        columns = [BarColumn(), MofNCompleteColumn(), TextColumn("epochs  {task.description}")]
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            progress.add_task("training ...", total=epochs)
            while True:
                before = len(self.supervisor.restarts)
                try:
                    return self.attempt(epochs, progress)
                except (SupervisionError, ActorError):
                    # A trainer has exited. The first error may come from another trainer, which
                    # has lost its connection to the first.
                    self.moments.setdefault("noticed", time.perf_counter())
                    self.supervisor.healthy.get()  # waits for all; raises if one cannot be replaced
                    events = [
                        event
                        for event in self.supervisor.restarts[before:]
                        if event.mesh_name == "trainers"
                    ]
                    if not events:
                        raise  # all trainers run: the error is a mistake in the program
                    self.moments.setdefault("replaced", time.perf_counter())
                    ranks = sorted(event.rank for event in events)
                    place = ""
                    if self.kills and self.kills[-1][0] == "host":
                        place = f", on {', '.join(sorted({event.host for event in events}))}"
                    console.print(f"replaced: trainer {str(ranks)[1:-1]}{place}")

    def attempt(self, epochs: int, progress: Progress) -> None:
        """Connect the trainers and train from the last checkpoint."""
        connect(self.trainers, self.backend)
        epoch = self.trainers.restore.call(self.checkpoint).get().values()[0]
        self.moments.setdefault("connected", time.perf_counter())
        if self.losses:
            progress.console.print(f"all go on after epoch {epoch}")
        seconds = 0.04  # duration of the last epoch; at first an estimate
        while epoch < epochs:
            what = self.plan.pop(epoch, "")
            pid = self.victim.pid.call_one().get() if what else 0
            start = time.perf_counter()
            training = self.trainers.train_epoch.call()
            if what:
                self.kill(what, pid, after=seconds / 2)
            losses = training.get().values()  # one list per trainer
            seconds = time.perf_counter() - start
            self.losses[epoch] = [sum(step) / len(step) for step in zip(*losses, strict=True)]
            epoch += 1
            if epoch % CHECKPOINT_EVERY == 0:
                self.save()
            rate = len(losses[0]) * GLOBAL_BATCH / seconds
            status = f"loss {self.losses[epoch - 1][-1]:.4f}  {rate:,.0f} images/s"
            progress.update(progress.task_ids[0], completed=epoch, description=status)
            if not progress.console.is_terminal and (epoch % 5 == 0 or epoch == epochs):
                print(f"epoch {epoch:3}/{epochs}  {status}", flush=True)

    def save(self, checkpoint: bytes | None = None) -> None:
        """Keep a checkpoint: the given one, or the present state."""
        rank0 = self.trainers.slice(procs=0)  # all replicas are equal
        self.checkpoint = checkpoint or rank0.checkpoint.call_one().get()
        self.saved = time.perf_counter()

    def kill(self, what: str, pid: int, after: float) -> None:
        """Kill a trainer or its host after so many seconds."""
        assert self.killer is not None
        time.sleep(after)
        self.moments = {"saved": self.saved, "killed": time.perf_counter()}
        self.kills.append((what, self.moments))
        if what == "host":
            self.killer.kill_host.broadcast()  # the killer is killed as well
        else:
            self.killer.kill.call_one(pid).get()


def price(moments: dict[str, float]) -> "Bill":
    """Return the cost of a kill, from the last checkpoint before it to its restoration."""
    phases = ("steps to do again", "until noticed", "until replaced", "process group, restore")
    bill = Bill()
    for phase, (start, end) in zip(phases, pairwise(moments.values()), strict=True):
        bill.seconds[phase] = end - start
    return bill


def draw(curve: list[float], title: str, path: Path) -> None:
    """Write a picture of the loss curve."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws to a file and needs no display
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.semilogy(range(1, len(curve) + 1), curve, linewidth=1)
    axes.set(title=title, xlabel="step", ylabel="training loss (mean over the trainers)")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


class Bill:
    """The time used: seconds by phase, in the order in which the phases began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def table(self, title: str, total: float, digits: int = 2) -> Table:
        table = Table(box=box.SIMPLE)
        table.add_column(title)
        table.add_column("seconds", justify="right")
        table.add_column("share", justify="right")
        for name, seconds in self.seconds.items():
            table.add_row(name, f"{seconds:.{digits}f}", f"{seconds / total:.0%}")
        table.add_section()
        table.add_row("total", f"{total:.{digits}f}", "100%")
        return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits, data-parallel across processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--procs", type=positive, default=4, help="number of trainer processes")
    parser.add_argument(
        "--hosts",
        type=lambda text: text.split(","),
        metavar="ADDRESS,...",
        help="machines to share the trainers among: addresses that `monarch worker` serves",
    )
    parser.add_argument(
        "--spares",
        type=lambda text: text.split(","),
        metavar="ADDRESS,...",
        help="with --hosts: machines that take the place of one that is lost",
    )
    add_arguments(parser)
    parser.add_argument("--epochs", type=positive, default=20, help="train up to this epoch")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the picture and the checkpoint"
    )
    parser.add_argument("--seed", type=int, default=0, help="order of the data, first weights")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="checkpoint to go on from")
    parser.add_argument(
        "--kill", action="store_true", help="kill one of the trainers in the middle of an epoch"
    )
    parser.add_argument(
        "--kill-host",
        action="store_true",
        help="kill the host of one of the trainers, too; --spares takes its place",
    )
    parser.add_argument(
        "--policy",
        choices=["one_for_one", "one_for_all"],
        help="whom to replace when a trainer ends: it, or all (the only way with NCCL)",
    )
    parser.add_argument(
        "--dashboard",
        action="store_true",
        help="serve the dashboard; in a terminal the program then waits for Ctrl-C at its end",
    )
    args = parser.parse_args()
    if args.procs > GLOBAL_BATCH:
        parser.error(f"--procs: at most {GLOBAL_BATCH}, one image per trainer and step")
    if args.job and args.hosts:
        parser.error("--job starts hosts, --hosts names hosts that run: use one of them")
    if (args.kill_host or args.spares) and not (args.hosts and args.spares):
        parser.error("--kill-host and --spares: give the addresses of both, --hosts and --spares")
    count = len(args.hosts) if args.hosts else args.job_hosts if args.job else 1
    if args.procs % count:
        parser.error(f"--procs: {count} hosts cannot share {args.procs} equally")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; use --device cpu")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.resume and not args.resume.is_file():
        parser.error(f"--resume: no such file: {args.resume}")
    return args


def main() -> int:
    bill = Bill()
    bill.seconds["import"] = time.perf_counter() - START
    args = arguments()
    console = Console(highlight=False)
    args.out.mkdir(parents=True, exist_ok=True)

    train_set, test_set = load(args.seed)
    checkpoint, first_epoch = None, 0
    if args.resume:
        checkpoint = args.resume.read_bytes()
        first_epoch = torch.load(args.resume, map_location="cpu", weights_only=True)["epoch"]
        if first_epoch >= args.epochs:
            print(
                f"error: {args.resume} has already seen {first_epoch} epochs; "
                "ask for more with --epochs",
                file=sys.stderr,
            )
            return 2
    if args.hosts:
        print(f"hosts: {', '.join(args.hosts)}")
    print(
        f"trainers: {args.procs}, device: {args.device}, "
        f"images: {len(train_set[1])} to learn from, {len(test_set[1])} to be tested on",
        flush=True,
    )
    if args.dashboard:
        with bill.phase("dashboard"):
            start_telemetry()  # before the processes start that it shall show
        if "MONARCH_DASHBOARD_URL" not in os.environ:
            sys.exit("error: --dashboard needs pip install 'pymonarch[admin]'")
        print(f"dashboard: {os.environ['MONARCH_DASHBOARD_URL']}", flush=True)
    job = spares = None
    with bill.phase("hosts"):
        if args.job:
            described = describe(args.job, args.job_hosts, args.job_option)
            job = described.job
            try:
                hosts = getattr(job.state(cached_path=None), MESH)
                names = described.names()
                hosts.initialized.get()
            except RuntimeError as error:
                sys.exit(f"error: {error}")
        elif args.hosts:
            hosts = attach_to_workers(ca="trust_all_connections", workers=args.hosts)
            if args.spares:
                spares = attach_to_workers(ca="trust_all_connections", workers=args.spares)
            try:
                for attached in (hosts, spares):
                    if attached:
                        attached.initialized.get()
            except RuntimeError as error:
                sys.exit(f"error: {error}")
            names = [urlsplit(address).hostname or LOOPBACK for address in args.hosts]
        else:
            hosts, names = this_host(), [LOOPBACK]
    # NCCL requires a GPU of its own for each process.
    per_host = args.procs // len(names)
    own_gpu = args.device == "cuda" and per_host <= torch.cuda.device_count()
    # Trainers that wait in NCCL for an exited one cannot be interrupted, so all are replaced.
    policy = args.policy or ("one_for_all" if own_gpu else "one_for_one")
    with bill.phase("spawn"), console.status("starting the trainers ..."):
        procs = hosts.spawn_procs({"procs": per_host})
        supervisor = Supervisor(
            policy,
            max_restarts=args.procs + 3,  # all trainers of a host may be lost at once
            fresh_process=policy == "one_for_all",
            spares=spares,
        )
        trainers = supervisor.spawn(
            procs.flatten("procs"),
            "trainers",
            Trainer,
            train_set,
            test_set,
            args.device,
            args.seed,
            names,
        )
        supervisor.healthy.get()
    training = Training(trainers, supervisor, "nccl" if own_gpu else "gloo")
    if args.kill or args.kill_host:
        place = {"hosts": len(names) // 2} if args.hosts or job else {}
        # Supervised: it is lost with its host, and comes back on the spare one.
        killers = hosts.slice(**place).spawn_procs()
        training.killer = supervisor.spawn(killers, "killer", Killer)
    if args.kill:
        training.plan[(first_epoch + 2 * args.epochs) // 3] = "trainer"
    if args.kill_host:
        training.plan[(first_epoch + 5 * args.epochs) // 6] = "host"
    with bill.phase("training"):
        training.run(checkpoint, args.epochs, console)
    with bill.phase("evaluation"):
        accuracy = sum(trainers.count_correct.call().get().values()) / len(test_set[1])
        replicas = trainers.fingerprint.call().get().values()
        checkpoint = trainers.slice(procs=0).checkpoint.call_one().get()
    with bill.phase("stop"):
        procs.stop().get()
        if job:
            job.kill()
        elif args.hosts:
            hosts.stop().get()  # ends all processes there; the workers then serve other clients
            if spares and not args.kill_host:
                spares.stop().get()
    with bill.phase("files"):
        (args.out / "digits.pt").write_bytes(checkpoint)
        picture = args.out / "digits_loss.png"
        draw(
            [loss for epoch in sorted(training.losses) for loss in training.losses[epoch]],
            f"Handwritten digits (trainers: {args.procs}, test accuracy: {accuracy:.3f})",
            picture,
        )

    console.print(bill.table("where the time went", time.perf_counter() - START))
    for what, moments in training.kills:
        cost = price(moments)
        title = "what the kill cost" if what == "trainer" else "what the killed host cost"
        console.print(cost.table(title, sum(cost.seconds.values()), digits=3))
    print(f"loss curve: {picture}")
    print(f"checkpoint: {args.out / 'digits.pt'}")
    print(f"test accuracy: {accuracy:.4f}")
    if max(replicas) > (1 + 1e-6) * min(replicas):  # different GPUs may differ in the last bits
        print(f"error: the replicas have drifted apart: {replicas}", file=sys.stderr)
        return 1
    if accuracy < GOAL:
        print(
            f"error: the test accuracy of {accuracy:.4f} is below {GOAL}; more --epochs help, "
            f"for example: --epochs {args.epochs + 20} --resume {args.out / 'digits.pt'}",
            file=sys.stderr,
        )
        return 1
    if args.dashboard and sys.stdout.isatty():
        print("the dashboard is served until Ctrl-C")
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
