"""`python tests/soak/slurm.py [RUNS=10] [PENDING=45]`: how soon `SlurmJob.state()` follows Slurm.

As root: starts a Slurm of its own on this machine, as examples/demo_slurm.py does. Each job is held
by Slurm for PENDING seconds, since pauses between questions grow with the time waited. It is then
released, and two readers wait for it: a loop of ``squeue`` without pauses, and ``state()``. The
figure is the time between them: from the answer RUNNING that the loop gets to the return of
``state()``, with its meshes. Negative: ``state()`` was first.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from monarch.job import SlurmJob

ROOT = Path(__file__).parents[2]


def demo() -> Any:
    spec = importlib.util.spec_from_file_location("demo_slurm", ROOT / "examples/demo_slurm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(cluster: Any, port: int, pending: float, logs: str) -> float:
    """Return the seconds from RUNNING to the return of `state`."""
    python = f"env PYTHONPATH={ROOT / 'src'} {sys.executable}"
    job = SlurmJob(
        {"a": 1}, python_exe=python, monarch_port=port, slurm_args=["--hold"], log_dir=logs
    )
    job.apply()
    ready: list[float] = []

    def wait() -> None:
        job.state(cached_path=None)
        ready.append(time.monotonic())

    waiter = threading.Thread(target=wait)
    waiter.start()
    try:
        time.sleep(pending)
        number = str(job._job_id)
        cluster.command("scontrol", "release", number)
        while "RUNNING" not in cluster.command("squeue", "-h", "-j", number, "-o", "%T"):
            pass
        running = time.monotonic()
        waiter.join()
        return ready[0] - running
    finally:
        job.kill()


def main() -> None:
    runs, pending = (int(one) for one in [*sys.argv[1:], *("10", "45")[len(sys.argv) - 1 :]])
    module = demo()
    if why := module.unavailable():
        sys.exit(why)
    with module.Cluster(2) as cluster, tempfile.TemporaryDirectory() as logs:
        for name in ("SLURM_CONF", "PATH"):
            module.os.environ[name] = cluster.environ[name]
        port = module.free_port()
        found = [measure(cluster, port, pending, logs) for _ in range(runs)]
    print("seconds:", " ".join(f"{one:.2f}" for one in sorted(found)))
    print(f"median {statistics.median(found):.2f}, worst {max(found):.2f}")


if __name__ == "__main__":
    main()
