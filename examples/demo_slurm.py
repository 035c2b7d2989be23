"""Train on a Slurm cluster that this program starts on this machine: `make demo-slurm`.

The cluster is a real one: munge, a controller, and three nodes, each with an address of its own in
127.0.0.0/8 and in a process namespace of its own. Its files are in a temporary directory; nothing
of an installed Slurm is read or changed. `train_digits.py --job slurm` then trains on two of the
nodes, and the cluster is stopped.

    sudo python examples/demo_slurm.py
    sudo python examples/demo_slurm.py --nodes 4 --procs 4 --epochs 30
    sudo python examples/demo_slurm.py --shell      # a shell with this cluster: sinfo, srun, ...

The cluster ends with this program, even if the program is killed.

Needs root, Debian's packages slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins, and what
train_digits.py needs: pip install 'pymonarch[examples]'
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TRAINING = Path(__file__).with_name("train_digits.py")
PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins"
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
SEARCHED = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # where daemons are
LIMIT = 120.0  # seconds for the cluster to start
BOUND = ("setpriv", "--pdeathsig=KILL")  # ends with the process that started it
NAMESPACE = ("unshare", "-p", "-f", "--kill-child", "--mount-proc")
CONFIGURATION = """\
ClusterName=demo
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_min_interval=0
PlugStackConfig={folder}/plugstack.conf
ReturnToService=2
SlurmdTimeout=300
KillWait=5
MinJobAge=300
JobRequeue=1
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=n[0-{last}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
NODE = "NodeName=n{n} NodeHostname={host} NodeAddr={address} Port={port} CPUs=2 RealMemory=1000"


def unavailable() -> str:
    """Return why no Slurm can be started here; an empty string if one can."""
    if sys.platform != "linux":
        return "Slurm needs Linux"
    if missing := [name for name in COMMANDS if shutil.which(name, path=SEARCHED) is None]:
        return f"the commands {', '.join(missing)} are missing (Debian: apt-get install {PACKAGES})"
    if os.geteuid() != 0:
        return "it needs root"
    trial = subprocess.run([*BOUND, *NAMESPACE, "true"], capture_output=True, check=False)
    if trial.returncode:
        return f"no process namespaces here: {trial.stderr.decode(errors='replace').strip()}"
    return ""


class Cluster:
    """A Slurm on this machine: a context manager. `environ` has the variables of its commands."""

    def __init__(self, nodes: int = 3, subnet: str = "127.99.0") -> None:
        self.addresses = {f"n{n}": f"{subnet}.{n + 1}" for n in range(nodes)}
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self.environ = {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": SEARCHED,
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":  # noqa: PYI034 - Self is of Python 3.11
        try:
            self.configure()
            (self.folder / "key").write_bytes(os.urandom(128))
            (self.folder / "key").chmod(0o600)
            names = {"key-file": "key", "socket": "munge.socket", "pid-file": "munged.pid"}
            names |= {"log-file": "munged.log", "seed-file": "seed"}
            self.start(
                "munged",
                *("munged", "-F", "--num-threads=2"),
                *(f"--{option}={self.folder / name}" for option, name in names.items()),
            )
            self.wait_for("munge", (self.folder / "munge.socket").exists)
            self.start("slurmctld", "slurmctld", "-D")
            for node in self.addresses:
                self.start_node(node)
            self.wait_for("the nodes", lambda: self.idle() == len(self.addresses))
        except BaseException:
            self.__exit__()
            raise
        return self

    def configure(self) -> None:
        ports = [free_port() for _ in range(len(self.addresses) + 1)]
        host = socket.gethostname().partition(".")[0]
        nodes = [
            NODE.format(n=n, host=host, address=address, port=ports[n + 1])
            for n, address in enumerate(self.addresses.values())
        ]
        text = CONFIGURATION.format(
            host=host,
            port=ports[0],
            folder=self.folder,
            nodes="\n".join(nodes),
            last=len(nodes) - 1,
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "plugstack.conf").touch()
        for name in ("state", "spool"):
            (self.folder / name).mkdir()

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*BOUND, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environ,
                cwd=self.folder,
            )

    def start_node(self, node: str) -> None:
        self.start(node, *NAMESPACE, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill a node with all processes on it, at once."""
        process = self.processes.pop(node)
        process.kill()
        process.wait()

    def command(self, *command: str) -> str:
        """Run one of Slurm's commands, and return its output; "" if it fails."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False, timeout=LIMIT
        )
        return done.stdout if done.returncode == 0 else ""

    def idle(self) -> int:
        """Return how many nodes wait for a job."""
        states = self.command("sinfo", "-h", "-N", "--format=%T").split()
        return states.count("idle")

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                outputs = [self.folder / f"{name}.out" for name in ended or self.processes]
                said = "\n".join(path.read_text(errors="replace")[-2000:] for path in outputs)
                raise RuntimeError(f"{what} did not start here ({', '.join(ended)}): {said}")
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes.values()):
            process.kill()
        for process in self.processes.values():
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    """Return a port that was free just now."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a small network on a Slurm cluster that is started for it.",
        epilog="Other options are those of train_digits.py.",
    )
    parser.add_argument("--nodes", type=int, default=3, help="of the cluster")
    parser.add_argument("--shell", action="store_true", help="do not train: open a shell")
    args, training = parser.parse_known_args()
    if args.nodes < 2:
        parser.error("--nodes: at least 2")
    if why := unavailable():
        print(f"error: no Slurm can be started here: {why}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Cluster(args.nodes) as cluster:
        print(cluster.command("sinfo").strip(), flush=True)
        python = f"--job-option=python={sys.executable}"
        command = [sys.executable, str(TRAINING), "--job=slurm", python, *training]
        if args.shell:
            command = [os.environ.get("SHELL", "/bin/sh")]
        status = subprocess.run(command, env=cluster.environ, check=False).returncode
        print(cluster.command("squeue", "--states=all", "--format=%i %j %T %N").strip())
        return status


if __name__ == "__main__":
    sys.exit(main())
