"""An SSH server of the tests: a real sshd on this machine, with its own keys."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

WAIT = 60.0
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")

CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
"""


class Server:
    """An SSH server, and the files needed to log in."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.arguments = (
            *("-F", "none", "-i", str(folder / "user_key"), "-p", str(port)),
            *(f"-oUserKnownHostsFile={folder}/known_hosts", "-oStrictHostKeyChecking=yes"),
            *("-l", getpass.getuser(), "-oIdentitiesOnly=yes"),
        )
        key = (folder / "host_key.pub").read_text()
        names = ",".join(f"[{name}]:{port}" for name in ("127.0.0.1", "localhost"))
        (folder / "known_hosts").write_text(f"{names} {key}")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server whose files are in `folder`; skip the test where none can run."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("needs ssh and sshd (Debian: openssh-client, openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd requires it
    for name in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    port = free_port()
    (folder / "config").write_text(CONFIG.format(port=port, folder=folder))
    log = (folder / "log").open("w")
    with log, subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "config"], stderr=log) as sshd:
        try:
            deadline = time.monotonic() + WAIT
            while not can_connect(port):
                if sshd.poll() is not None or time.monotonic() > deadline:
                    pytest.skip(f"sshd does not run here: {(folder / 'log').read_text()}")
            yield Server(folder, port)
        finally:
            sshd.terminate()


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
