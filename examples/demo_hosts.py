"""Train across simulated machines, and lose one: the program of `make demo-hosts`.

Each machine is a network namespace with an address, an interface and a loopback device of its own,
and a virtual cable to a switch. A worker serves each machine (`monarch worker`), with a certificate
and a secret that are created for this run. Then `train_digits.py --hosts` trains on two of them, as
it would on real machines, over TLS. It kills a trainer during the training, and later a whole
machine, whose trainers come back on a spare one.

    sudo python examples/demo_hosts.py
    sudo python examples/demo_hosts.py --machines 3 --spares 2 --procs 6 --epochs 40
    sudo python examples/demo_hosts.py --spares 0   # only a trainer is killed
    python examples/demo_hosts.py --loopback        # no root: worker loops on 127.0.0.1

The program leaves no processes and no namespaces behind, however it ends. The switch and the client
live in a namespace without a name, and so does each machine. Such a namespace ends with its last
process. The workers end at EOF on their input, which the system closes even if the program is
killed. Ctrl-C removes the files, too.

Needs what train_digits.py needs, and cryptography: pip install 'pymonarch[examples,tls]'
For network namespaces: Linux, the commands ip and unshare, and root (or user namespaces).
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

try:
    import cryptography  # noqa: F401 - fails here, and not when half of the set-up is done

    from monarch.security import Certificate, make_certificates
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[examples,tls]'")

TRAINING = Path(__file__).with_name("train_digits.py")
WORKER = (sys.executable, "-m", "monarch.cli", "worker")
SUBNET = "10.213.0"  # the switch and the client have .1, the machines .2, .3, ...
PORT = 26600
INSIDE = "MONARCH_DEMO_INSIDE"  # set in the environment once the program runs in a namespace
SWITCH = f"""
ip link set lo up &&
ip link add switch type bridge && ip address add {SUBNET}.1/24 dev switch && ip link set switch up
"""
PLUG = """
ip link add {cable} type veth peer name eth0 netns {pid} && ip link set {cable} master switch up
"""
# A machine waits for its cable, then sets its address, and then runs the worker.
MACHINE = """
echo unplugged; read plugged &&
ip link set lo up && ip address add "$1/24" dev eth0 && ip link set eth0 up && shift && exec "$@"
"""


def namespace(*command: str) -> list[str]:
    """Return a command line that runs `command` in a network namespace of its own."""
    own = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-r", "-n"]
    return [*own, "--", *command]


def unavailable() -> str:
    """Return why network namespaces cannot be used here; an empty string if they can."""
    if sys.platform != "linux":
        return "they are a feature of Linux"
    for command in ("unshare", "ip"):
        if shutil.which(command) is None:
            return f"the command {command} is missing (Debian: apt-get install util-linux iproute2)"
    trial = namespace("sh", "-c", f'{SWITCH.strip()} && exec "$0" -c pass', sys.executable)
    tried = subprocess.run(trial, capture_output=True, text=True, check=False)
    if tried.returncode:
        why = tried.stderr.strip().partition("\n")[0]
        return why if os.geteuid() == 0 else f"they need root ({why})"
    return ""


class Machine:
    """A simulated machine with a worker. `ready` returns its address, `end` ends both.

    Args:
        number: 0 for the first.
        folder: the directory for the worker's output.
        environ: the environment of the worker.
        loopback: whether the worker listens on this machine's loopback device instead.
    """

    def __init__(self, number: int, folder: Path, environ: dict[str, str], loopback: bool) -> None:
        self.name = f"machine{number}"
        self.log = folder / f"{self.name}.log"
        self.cable = "" if loopback else f"cable{number}"
        address = "127.0.0.1" if loopback else f"{SUBNET}.{number + 2}"
        worker = [*WORKER, f"tls://{address}:{0 if loopback else PORT}", "--until-eof"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                worker if loopback else namespace("sh", "-c", MACHINE, "sh", address, *worker),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
                start_new_session=True,  # Ctrl-C reaches the client only: the machines end later
            )

    def ready(self) -> str:
        """Connect the cable, wait until the worker listens, and return its address."""
        assert self.process.stdin is not None
        if self.cable and self.said() == "unplugged":
            subprocess.run(
                PLUG.format(cable=self.cable, pid=self.process.pid), shell=True, check=True
            )
            print("plugged", file=self.process.stdin, flush=True)
        words = self.said().split()
        if words[:1] != ["serving"]:
            sys.exit(f"error: {self.name} did not start:\n{self.log.read_text().strip()}")
        return words[1]

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """End the worker, and all other processes of the machine."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def with_identity(certificate: Certificate, folder: Path) -> dict[str, str]:
    """Return the environment of a worker or of the client: its certificate, and the secret."""
    secret = {"MONARCH_SECRET_FILE": str(folder / "secret")}
    return {**os.environ, **certificate.environment, **secret}


def train(arguments: list[str], environ: dict[str, str]) -> int:
    """Run the training; return its exit status. A Ctrl-C is forwarded to it once."""
    command = [sys.executable, str(TRAINING), *arguments]
    if shutil.which("setpriv"):  # the kernel then kills the training if this program is killed
        command = [*"setpriv --pdeathsig KILL".split(), *command]
    with subprocess.Popen(command, env=environ, start_new_session=True) as client:
        try:
            return client.wait()
        except KeyboardInterrupt:
            client.send_signal(signal.SIGINT)
            client.wait()
            raise


def demonstrate(machines: int, spares: int, loopback: bool, arguments: list[str]) -> int:
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="monarch_demo_")))
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex())
        total = machines + spares
        addresses = [f"{SUBNET}.{number + 2}" for number in range(total)]
        loops = [[f"machine{number + 1}", "127.0.0.1"] for number in range(total)]
        names = loops if loopback else addresses
        client, *hosts = make_certificates(folder, ["client", *names])
        if not loopback:
            subprocess.run(SWITCH, shell=True, check=True)
        started = []
        for number, certificate in enumerate(hosts):
            environ = with_identity(certificate, folder)
            # The simulated machines share the cores of this one.
            # torch warns that a namespace has no name service.
            environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // machines))
            started.append(Machine(number, folder, environ, loopback))
            ends.callback(started[-1].end)
        served = [machine.ready() for machine in started]
        where = "on the loopback device" if loopback else "in network namespaces"
        spare = f" and {spares} in reserve" if spares else ""
        text = f"{machines} machines{spare} {where}, TLS with certificates made for this run"
        print(text, flush=True)
        words = ["--hosts", ",".join(served[:machines]), "--kill"]
        if spares:
            words += ["--spares", ",".join(served[machines:]), "--kill-host"]
        return train([*words, *arguments], with_identity(client, folder))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train across machines made out of this one, over TLS.",
        epilog="Other options go to train_digits.py, after its --hosts, --spares and --kill.",
    )
    parser.add_argument("--machines", type=int, default=2, metavar="N", help="how many (2)")
    parser.add_argument(
        "--spares",
        type=int,
        default=1,
        metavar="N",
        help="how many in reserve; 0: none is lost (1)",
    )
    parser.add_argument(
        "--loopback", action="store_true", help="no namespaces: worker loops on 127.0.0.1"
    )
    args, arguments = parser.parse_known_args()
    if not 1 <= args.machines <= 200:
        parser.error(f"--machines: between 1 and 200, not {args.machines}")
    if not 0 <= args.spares <= 40:
        parser.error(f"--spares: between 0 and 40, not {args.spares}")
    if not args.loopback and INSIDE not in os.environ:
        if why := unavailable():
            again = " ".join(["--loopback", *sys.argv[1:]])
            print(
                f"error: no network namespaces for the machines: {why}.\n"
                "With worker loops on the loopback device of this machine instead:\n"
                f"  make demo-hosts DEMO='{again}'\n"
                f"  python {sys.argv[0]} {again}",
                file=sys.stderr,
            )
            return 1
        # Start again inside a namespace, which has no name and ends with its last process.
        sys.stdout.flush()
        command = namespace(sys.executable, *sys.argv)
        os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    start = time.perf_counter()
    try:
        status = demonstrate(args.machines, args.spares, args.loopback, arguments)
    except KeyboardInterrupt:
        print("interrupted; the machines are gone", file=sys.stderr)
        return 130
    machines = args.machines + args.spares
    print(f"{machines} machines came and went in {time.perf_counter() - start:.1f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
