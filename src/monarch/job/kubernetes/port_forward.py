"""A way into the cluster: ``kubectl port-forward`` to the worker of one pod.

The *forwarder* is a process of this machine, one for each allocation. It runs kubectl, and runs it
again when kubectl exits, as it does when the pod is replaced. All scripts that use the job share
the forwarder. It ends when the job is killed. It also ends with the script that started it
(`lifeline`), unless the job was saved by then (`saved`): otherwise no other script could find it.

The port is forwarded to a loopback address that belongs to the pod (`forwarded_host`), so jobs do
not compete for ports. Users of this machine can connect to that address; each has to prove the
job's secret, as everywhere.

`start` is called by scripts. `main` is the forwarder's own part: its first line of output is
``ready``, or the description of a failure.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

from monarch._spi import SAFE_PATH, WITHOUT_CWD, progress
from monarch.job import lifeline
from monarch.job.os_process import OsProcess, descendants, wait_for, watch
from monarch.job.pod import forwarded_host
from monarch.job.scheduler_command import one_line

__all__ = ["end", "is_running", "main", "saved", "start"]

_START_LIMIT = 30.0  # seconds until kubectl forwards
_GRACE = 5.0  # seconds to exit
_SAVED = "saved"  # name of a file
_PAUSE = 1.0  # seconds before kubectl is run again
_READY = b"Forwarding from "
_OK = b"ready"
_MAIN = (
    f"{WITHOUT_CWD}\nimport sys; from monarch.job.kubernetes.port_forward import main; "
    "main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])"
)


def start(folder: str, kubeconfig: Path, namespace: str, pod: str, port: int) -> str:
    """Return the address at which this machine reaches the worker of a pod.

    `folder` is the job's directory: a forwarder that another script started for the same pod is
    used. Blocks until kubectl forwards. Raises RuntimeError with the reason if it does not.
    """
    host = forwarded_host(namespace, pod)
    with _locked(folder):
        found = _read(folder)
        if found is not None and found[1].alive and found[0] == pod:
            return f"tcp://{host}:{port}"
        end(folder)
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise RuntimeError(
                "kubectl is not installed here, and this client reaches the pods through `kubectl "
                "port-forward`: install it, or name a worker that can be reached from here with "
                "attach_to, or say port_forward=False if the addresses of pods can be"
            )
        command = [
            *(kubectl, "--kubeconfig", str(kubeconfig), "--namespace", namespace),
            *("port-forward", "--address", host, f"pod/{pod}", f"{port}:{port}"),
        ]
        with progress(f"waiting for `kubectl port-forward pod/{pod}`"):
            process = _launch(folder, command)
        _write(folder, pod, process)
    return f"tcp://{host}:{port}"


def saved(folder: str) -> None:
    """Note that other scripts can find the job from now on."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the job was killed
        Path(folder, _SAVED).touch(mode=0o600)


def end(folder: str) -> None:
    """End the forwarder of this job, if there is one, and its kubectl."""
    lifeline.cut(folder)
    found = _read(folder)
    if found is None:
        return
    _end(found[1])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_file(folder))


def is_running(folder: str) -> bool:
    """Whether the forwarder of this job runs."""
    found = _read(folder)
    return found is not None and found[1].alive


def _end(process: OsProcess) -> None:
    below = descendants([process]) if process.alive else []
    process.send(signal.SIGTERM)
    for left in wait_for([process, *below], _GRACE):
        left.send(signal.SIGKILL)


def _launch(folder: str, command: Sequence[str]) -> OsProcess:
    """Start a forwarder, and wait until it forwards."""
    _, line = lifeline.add(folder)
    with line, open(os.path.join(folder, "forward.log"), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-c", _MAIN, str(line.fileno()), folder, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=[line.fileno()],
            start_new_session=True,
        )
    started = OsProcess.of(process.pid)
    assert process.stdout is not None
    with process.stdout as output:
        said = _first_line(output.fileno(), _START_LIMIT)
    if said == _OK:
        watch(process)
        return started
    _end(started)
    process.wait()
    if said is None:
        why = f"did not forward within {_START_LIMIT:g} s"
    else:
        why = said.decode(errors="replace") or "ended without a word"
    raise RuntimeError(
        f"`{os.path.basename(command[0])} {' '.join(command[1:])}` {why}; does it work by hand? "
        "Otherwise name a worker that can be reached from here with attach_to"
    )


def _first_line(fd: int, limit: float) -> bytes | None:
    """Return the first line that is written to a pipe, or all until EOF; None: too late."""
    said = b""
    while b"\n" not in said:
        if not select.select([fd], [], [], limit)[0]:
            return None
        data = os.read(fd, 4096)
        if not data:
            break
        said += data
    return said.partition(b"\n")[0].strip()


# -- the record of the forwarder in the job's directory --------------------------------------------


def _file(folder: str) -> str:
    return os.path.join(folder, "forward.json")


def _read(folder: str) -> tuple[str, OsProcess] | None:
    try:
        with open(_file(folder)) as file:
            found = json.load(file)
        return str(found["pod"]), OsProcess(int(found["pid"]), int(found["started"]))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write(folder: str, pod: str, process: OsProcess) -> None:
    draft = _file(folder) + ".new"
    with open(draft, "w") as file:
        json.dump({"pod": pod, "pid": process.pid, "started": process.started}, file)
    os.replace(draft, _file(folder))


@contextlib.contextmanager
def _locked(folder: str) -> Generator[None]:
    """Keep other scripts from starting a forwarder at the same time."""
    with open(os.path.join(folder, "forward.lock"), "w") as file:
        with contextlib.suppress(OSError):  # no locks here: at worst the second kubectl fails
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- the forwarder ---------------------------------------------------------------------------------


def main(fd: int, folder: str, command: Sequence[str]) -> None:
    """Run kubectl, again and again, until SIGTERM comes or the script is lost."""
    line = socket.socket(fileno=fd)
    line.set_inheritable(False)

    def stop(_number: int, _frame: object) -> None:
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)

    def hold_on() -> None:
        if lifeline.outlived(line) and not os.path.exists(os.path.join(folder, _SAVED)):
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=hold_on, name="monarch-lifeline", daemon=True).start()
    answers = os.dup(1)
    os.dup2(2, 1)
    if not _forward(command, answers):
        sys.exit(1)
    while True:
        threading.Event().wait(_PAUSE)
        _forward(command, None)


def _forward(command: Sequence[str], answers: int | None) -> bool:
    """Run kubectl once. Write to `answers` whether it forwards; return whether it did."""
    ready = False
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if answers is not None else None,
        )
    except OSError as error:
        if answers is not None:
            os.write(answers, f"cannot be run: {error.strerror}\n".encode())
        return False
    with process as kubectl:
        try:
            assert kubectl.stdout is not None
            said: list[bytes] = []
            for text in kubectl.stdout:
                if answers is not None and not ready:
                    said.append(text)
                    if text.startswith(_READY):
                        ready = True
                        os.write(answers, _OK + b"\n")
                        os.close(answers)
                        _drain(kubectl)
            if answers is not None and not ready:
                status = kubectl.wait()
                if kubectl.stderr is not None:
                    said.append(kubectl.stderr.read())
                text_said = one_line(b"".join(said).decode(errors="replace")) or "nothing"
                answer = f"ended with status {status} and said: {text_said}\n"
                os.write(answers, answer.encode())
        finally:
            if kubectl.poll() is None:
                kubectl.terminate()
    return ready


def _drain(kubectl: subprocess.Popen[bytes]) -> None:
    """Copy what kubectl says from now on to the log, so that kubectl is never blocked."""
    errors = kubectl.stderr
    if errors is None:
        return

    def copy() -> None:
        for text in errors:
            sys.stderr.buffer.write(text)
            sys.stderr.buffer.flush()

    threading.Thread(target=copy, name="monarch-kubectl", daemon=True).start()
