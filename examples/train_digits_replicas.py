"""Train the digits network with replicas that are killed at random, and watch it go on.

Each process is a replica group of `monarch.training`. A punisher kills processes at random times,
and whole hosts (`--hosts`), whose groups come back on a spare one. The groups that are left go on
with the next step, and a replacement gets the state from the memory of another group. A step is
applied by all or by none, so a kill costs the step that was under way. The terminal shows the loss,
which groups took part, and the lost steps; in the end one screen has the result and its price.

    python examples/train_digits_replicas.py                            # 4 groups, a kill every 5 s
    python examples/train_digits_replicas.py --groups 2 --mtbf 1s --steps 1000
    python examples/train_digits_replicas.py --mtbf 0                   # no kills
    python examples/train_digits_replicas.py --hosts 2 --host-mtbf 15s  # and hosts, with a spare

The network is so small that a step takes a few milliseconds. `--step-time` makes steps longer, so
that the picture shows what happens to a training with a network of a reasonable size.

Needs torch, scikit-learn and rich: pip install 'pymonarch[examples]'
"""

import argparse
import os
import random
import re
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

try:
    import torch
    import torch._dynamo  # the first optimizer imports it: once here, or in each process again
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from monarch.actor import Actor, Channel, HostMesh, Port, endpoint, this_host
    from monarch.job import ProcessJob
    from monarch.training import Coordinator, Event, Manager, Replicas
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples]'")

from train_digits_ddp import (  # beside this file
    GOAL,
    Events,
    Images,
    accuracy_of,
    batch,
    checksum,
    load,
    network,
)
from training_picture import Kill, Picture, lost_steps

CALM = 20  # steps before the speed without kills is measured: the first ones take longer


class Trainer(Actor):
    """One replica.

    Args:
        coordinator: of the training.
        train_set: all images to learn from.
        seed: determines the first weights, and the order of the images.
        step_time: the least duration of a step, in seconds.
        started: receives rank and process of each new replica.
        log: where to append each step, and a test after every `test_every` steps.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        train_set: Images,
        test_set: Images,
        seed: int,
        step_time: float,
        started: Port[tuple[int, int]],
        log: Path | None,
        test_every: int,
    ) -> None:
        self.train_set, self.test_set, self.seed = train_set, test_set, seed
        self.step_time, self.test_every = step_time, test_every
        self.model = network(seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.manager = Manager(coordinator, self.model, self.optimizer)
        self.events = Events(log)
        self.events.note("began", rank=self.manager.rank)
        started.send((self.manager.rank, os.getpid()))

    @endpoint
    def train(self, steps: int) -> tuple[float, int]:
        """Train up to this step; return the test accuracy, and a checksum of the weights."""
        manager, (images, labels) = self.manager, self.train_set
        while manager.quorum(until=steps):
            end = time.perf_counter() + self.step_time
            for share in manager.shares():
                mine = share.of(batch(share.step, len(labels), self.seed))
                loss = torch.nn.functional.cross_entropy(self.model(images[mine]), labels[mine])
                loss.backward()
                share.report(loss.item())
            time.sleep(max(0.0, end - time.perf_counter()))
            first = manager.group == min(manager.participants)
            if manager.should_commit():
                self.optimizer.step()
                if first:
                    self.note(manager.step)
        return accuracy_of(self.model, self.test_set), checksum(self.model)

    def note(self, step: int) -> None:
        self.events.note("step", step=step)
        if self.test_every and step % self.test_every == 0:
            accuracy = accuracy_of(self.model, self.test_set)
            self.events.note("test", step=step, accuracy=accuracy, weights=checksum(self.model))


def kill_host(pid: int) -> None:
    """Kill all processes of the host of a `ProcessJob` on which `pid` runs, as a power cut does."""
    agent = os.getpgid(pid)  # the agent of a host leads the group of all processes below it
    stat = Path(f"/proc/{agent}/stat").read_text()
    worker = int(stat.rpartition(")")[2].split()[1])  # its parent
    os.kill(worker, signal.SIGKILL)
    os.killpg(agent, signal.SIGKILL)


class Punisher(threading.Thread):
    """Kills ranks and hosts at random times until it is stopped.

    Times between kills are exponential, as if each moment were equally dangerous. A kill waits for
    a step that was committed without the victims of the one before, and the last group is never
    killed: the state would be lost with it.

    Args:
        replicas: the training.
        pids: the process of each rank, by rank.
        per_host: the number of ranks of a host.
        means: mean seconds between two kills, of a "rank" and of a "host"; 0: none.
        calm: seconds before the first kill.
        seed: determines times and victims.
    """

    def __init__(
        self,
        replicas: Replicas,
        pids: dict[int, int],
        per_host: int,
        means: dict[str, float],
        calm: float,
        seed: int,
    ) -> None:
        super().__init__(daemon=True)
        self.replicas, self.pids, self.per_host = replicas, pids, per_host
        self.means = {what: mean for what, mean in means.items() if mean}
        self.calm = calm
        self.random = random.Random(seed)
        self.kills: list[Kill] = []
        self.before, self.victims = 0, set[int]()  # events before the last kill, and its groups
        self.ended = threading.Event()

    def run(self) -> None:
        while self.replicas.committed < CALM:
            if self.ended.wait(0.05):
                return
        pauses = {what: self.calm + self.draw(what) for what in self.means}
        while pauses:
            what = min(pauses, key=lambda each: pauses[each])
            pause = pauses[what]
            if self.ended.wait(pause):
                return
            pauses = {each: left - pause for each, left in pauses.items()}
            pauses[what] = self.draw(what)
            healthy = self.wait_for_commit()
            if not healthy:
                return
            self.strike(what, healthy)

    def draw(self, what: str) -> float:
        return self.random.expovariate(1 / self.means[what])

    def wait_for_commit(self) -> tuple[int, ...]:
        """Return the groups that made a step without the last victims; none when stopped."""
        while not self.ended.wait(0.05):
            missing = {str(rank) for rank in self.victims}
            healthy: tuple[int, ...] = ()
            for event in self.replicas.events[self.before :]:
                if event.kind == "lost":
                    missing.discard(event.detail.split()[1].rstrip(":"))  # rank 3: ...
                elif event.kind == "commit" and not missing:
                    healthy = event.groups
            if healthy:
                return healthy
        return ()

    def strike(self, what: str, healthy: tuple[int, ...]) -> None:
        """Kill one of these groups, each of which is a rank, or the host of one."""
        first = self.random.choice(healthy)
        count = self.per_host if what == "host" else 1
        ranks = range(first - first % count, first - first % count + count)
        if set(healthy) <= set(ranks):
            return
        events = self.replicas.events
        try:
            if what == "host":
                kill_host(self.pids[first])
            else:
                os.kill(self.pids[first], signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):  # its replacement is not known yet
            return
        self.before, self.victims = len(events), set(healthy) & set(ranks)
        self.kills.append(Kill(events[-1].seconds, what, tuple(ranks)))

    def stop(self) -> None:
        self.ended.set()
        self.join()


class Show:
    """The terminal: a live picture, or a line now and then where there is no terminal."""

    def __init__(
        self, replicas: Replicas, punisher: Punisher, start: float, groups: int, steps: int
    ) -> None:
        self.replicas, self.punisher, self.start = replicas, punisher, start
        self.groups, self.steps = groups, steps
        self.console = Console(highlight=False)

    def picture(self) -> Picture:
        seconds = time.monotonic() - self.start
        return Picture(self.groups, self.replicas.events, [*self.punisher.kills], seconds)

    def text(self, picture: Picture) -> Group:
        width = max(20, min(100, self.console.width - 14))
        styles = {"█": "green", "▒": "yellow", "x": "bold red"}
        lines = [Text(line, no_wrap=True) for line in picture.lines(width)]
        for line in lines:
            if line.plain.lstrip().startswith("group"):
                for place, sign in enumerate(line.plain):
                    if sign in styles and "|" in line.plain[:place]:
                        line.stylize(styles[sign], place, place + 1)
        return Group(Text(self.status(picture)), Text(), *lines)

    def status(self, picture: Picture) -> str:
        done = picture.commits[-1] if picture.commits else None
        loss = "" if done is None or done.report is None else f"  loss {done.report:.4f}"
        groups = ", ".join(map(str, done.groups)) if done else "none yet"
        return (
            f"{picture.seconds:6.1f} s  step {self.replicas.committed:5}/{self.steps}{loss}"
            f"  groups {groups}  kills {len(picture.kills)}"
            f"  lost steps {sum(map(lost_steps, picture.events))}"
        )

    def watch(self, ended: threading.Event) -> None:
        """Return when `ended` is set."""
        if self.console.is_terminal:
            with Live(console=self.console, auto_refresh=False) as live:
                while not ended.wait(0.25):
                    live.update(self.text(self.picture()), refresh=True)
                live.update(self.text(self.picture()), refresh=True)
            return
        while not ended.wait(5):
            print(self.status(self.picture()), flush=True)
        picture = self.picture()
        print("\n".join([self.status(picture), "", *picture.lines()]))


def speed(commits: list[Event], start: float, end: float) -> float:
    """Return the committed steps per second in a stretch of time; 0 if there is none."""
    count = sum(start <= event.seconds < end for event in commits)
    return count / (end - start) if end > start else 0.0


def bill(picture: Picture, accuracy: float, equal: bool) -> list[str]:
    """Return the last screen: the result, and what the kills have cost."""
    commits, kills = picture.commits, picture.kills
    counts = {what: sum(kill.what == what for kill in kills) for what in ("rank", "host")}
    again = sum(event.kind == "abort" for event in picture.events)
    back = sum(event.rolled_back for event in picture.events)
    end = commits[-1].seconds
    first = kills[0].seconds if kills else end
    before = speed(commits[CALM:], commits[CALM].seconds, first) if len(commits) > CALM else 0.0
    after = speed(commits, first, end)
    goodput = "no kills" if not kills else "the first kill came too soon to compare"
    if kills and before:
        goodput = f"{after / before:.0%}  ({after:.1f} steps/s; before the first kill {before:.1f})"
    return [
        f"test accuracy  {accuracy:.4f}",
        f"replicas       {'equal in each bit' if equal else 'DIFFERENT'}",
        f"steps          {commits[-1].version}, in {picture.seconds:.1f} s",
        f"kills          {len(kills)}: ranks {counts['rank']}, hosts {counts['host']}",
        f"lost steps     {again + back}: {again} under way, {back} later than the last copy",
        f"goodput        {goodput}",
    ]


def duration(text: str) -> float:
    """Return the seconds of a text such as 5, 5s, 20ms or 2m."""
    found = re.fullmatch(r"([\d.]+)(ms|s|m|)", text)
    if found is None:
        raise ValueError
    return float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "": 1}[found[2]]


def arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        if (number := int(text)) < 1:
            raise ValueError
        return number

    parser = argparse.ArgumentParser(
        description="Train a network on handwritten digits; replicas are killed at random.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--groups", type=positive, default=4, help="replica groups, a process each")
    add("--steps", type=positive, default=1300, help="train up to this step")
    add("--mtbf", type=duration, default="5s", help="mean time between kills of a rank; 0: none")
    add("--hosts", type=positive, help="processes that act as hosts; one more is a spare")
    add(
        "--host-mtbf", type=duration, default="0", help="mean time between kills of a host; 0: none"
    )
    add("--calm", type=duration, default="6s", help="time before the first kill")
    add("--step-time", type=duration, default="30ms", help="least duration of a step")
    add("--seed", type=int, default=0, help="of the data, the weights and the kills")
    add("--out", type=Path, default=Path("out"), help="folder for the picture")
    add("--checkpoints", type=Path, metavar="FOLDER", help="for the loss of all groups at once")
    add("--events", type=Path, help="file to which each step is appended, as a line of JSON")
    add("--test-every", type=int, default=0, metavar="STEPS", help="between two tests in --events")
    args = parser.parse_args()
    if args.hosts and args.groups % args.hosts:
        parser.error(f"--groups: {args.hosts} hosts cannot share {args.groups} equally")
    if args.host_mtbf and not args.hosts:
        parser.error("--host-mtbf: say with --hosts how many hosts there are")
    return args


def main() -> int:
    args = arguments()
    train_set, test_set = load(args.seed)
    with ExitStack() as ends:
        spares: list[HostMesh | ProcessJob] = []
        hosts = this_host()
        if args.hosts:
            job = ProcessJob({"trainers": args.hosts, "spare": 1})
            ends.callback(job.kill)
            state = job.state(cached_path=None)
            # A host that is lost later goes to one that the job starts.
            hosts, spares = state.trainers, [state.spare, job]
        start = time.monotonic()
        replicas = Replicas(
            args.groups,
            shares=args.groups,  # so the kills change no bit of the result
            folder=args.checkpoints or "",
            save_every=50 if args.checkpoints else 0,
            max_restarts=1_000_000,
            spares=spares or None,
        )
        per_host = args.groups // (args.hosts or 1)
        procs = hosts.spawn_procs({"replicas": per_host})
        ends.callback(lambda: procs.stop().get())
        started, receiver = Channel[tuple[int, int]].open()
        trainers = replicas.spawn(
            procs,
            "trainers",
            Trainer,
            replicas.coordinator,
            train_set,
            test_set,
            args.seed,
            args.step_time,
            started,
            args.events.absolute() if args.events else None,
            args.test_every,
        )
        pids = dict(receiver.recv().get() for _ in range(args.groups))

        def follow() -> None:
            while True:
                rank, pid = receiver.recv().get()
                pids[rank] = pid

        threading.Thread(target=follow, daemon=True).start()
        means = {"rank": args.mtbf, "host": args.host_mtbf}
        punisher = Punisher(replicas, pids, per_host, means, args.calm, args.seed)
        show = Show(replicas, punisher, start, args.groups, args.steps)
        print(
            f"replica groups: {args.groups}, images: {len(train_set[1])} to learn from, "
            f"{len(test_set[1])} to be tested on",
            flush=True,
        )
        ended = threading.Event()
        watching = threading.Thread(target=show.watch, args=[ended])
        watching.start()
        punisher.start()
        try:
            results = replicas.run(trainers, "train", args.steps)
        finally:
            punisher.stop()
            picture = show.picture()
            ended.set()
            watching.join()
    accuracy = min(each for each, _ in results.values())
    equal = len(set(results.values())) == 1
    print("\n" + "\n".join(bill(picture, accuracy, equal)))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        picture.draw(args.out / "digits_replicas.png")
        print(f"picture        {args.out / 'digits_replicas.png'}")
    except ImportError:
        print("picture        above; with matplotlib also as a file")
    if not equal:
        print(f"error: the replicas differ: {results}", file=sys.stderr)
        return 1
    if accuracy < GOAL:
        print(f"error: the test accuracy is below {GOAL}; more --steps help", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
