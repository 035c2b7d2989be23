"""`SSHJob`: hosts that are reached by ``ssh``, with a worker on each.

``ssh`` runs a worker (`login_host`) that lives until EOF on its standard input. The first line of
that input is the worker's configuration, above all the job's secret. So the secret is in no
argument list and in no file except one on the remote host that only the user may read. After that
line the input stays open, without data:

* While the job starts, this script holds the input open. If the script dies, the system closes the
  input, and every host that has started ends.
* Once all hosts listen, a process of its own takes over: the `holder`. It ends with the
  script as long as no other script can find the job (`lifeline`). After that the hosts outlive the
  script, and the next one finds them.
* To kill the job is to kill the holder. The workers then end the processes on their hosts, and each
  ``ssh`` exits with its worker. `kill` waits for all ``ssh`` processes to exit.
* If the connection breaks, or ``ssh`` is killed, the SSH server closes the worker's input.

So ending a job needs no second login, and there is no case in which a worker stays behind.

A host that is started in the place of a lost one has a holder of its own. `_changing` orders that
with `kill`, and keeps two lost hosts from the same spare (`_tried`).

Workers listen at all addresses of their host, on the job's port, because a host often resolves its
own name to loopback. A peer that does not know the secret is refused.

Rejected: a worker that runs in the background of its host and is ended by another ``ssh``, by its
process number. Such a worker stays behind whenever the second ``ssh`` cannot connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from monarch._spi import ANY_PYTHON, FROM_ANY_PYTHON, progress, python_command
from monarch.job import lifeline
from monarch.job.folder import last_words, lock_of, log_file, remove_stale, secret_file
from monarch.job.login import Host, LoginJob, ProcessState, check_hosts
from monarch.job.login_host import MARK
from monarch.job.os_process import OsProcess, wait_for, watch
from monarch.job.state import leave

__all__ = ["SSHJob"]

_START_LIMIT = 60.0  # seconds within which a host has to listen
_CONNECT_LIMIT = 15  # seconds for the connection alone
_REPLACE_LIMIT = 60.0  # seconds within which a host has to be there in the place of a lost one
_PAUSE = 1.0  # seconds between two attempts to start one
_GRACE = 10.0  # seconds for workers to end the processes on their hosts
_TRANSPORTS = {"tcp": "tcp", "tls": "tls", "metatls": "tls", "metatls-hostname": "tls"}
# These come after the user's options: ssh uses the first value of an option that is given twice.
_OPTIONS = (
    "-T",
    "-oBatchMode=yes",  # ssh must not ask for a password: its input is a pipe
    f"-oConnectTimeout={_CONNECT_LIMIT}",
    "-oServerAliveInterval=15",
    "-oServerAliveCountMax=4",
)
_HOLDER = "from monarch.job.holder import main; main()"
_BOOTSTRAP = f"""
{FROM_ANY_PYTHON}
import json, sys
try:
    from monarch.job.login_host import main
except ImportError as error:
    said = dict(error="package", text=str(error), python=sys.version_info[:2], path=sys.executable)
    sys.stdout.write({MARK!r} + json.dumps(said))
    sys.exit(1)
main()
"""
_NO_PYTHON = (126, 127)  # exit statuses of shells for a program that cannot be run
_SSH_FAILED = 255
_REMEDIES = (
    ("Permission denied", "it refuses the key: add yours with ssh-copy-id, or name one (-i)"),
    ("Host key verification failed", "its key is not known here, or is another one: log in once"),
    ("Could not resolve hostname", "no such name: is it spelled right, is it in ~/.ssh/config?"),
    ("Connection refused", "no SSH server listens there: start sshd, or name its port (-p)"),
    ("timed out", "it is unreachable: down, or behind a firewall"),
    ("No route to host", "it is unreachable: down, or behind a firewall"),
    ("unreachable", "it is unreachable: this machine has no route to it"),
)

_changing = threading.RLock()  # held while a job gets or loses hosts
_tried: set[tuple[str, str]] = set()  # directory of a job, and a host where a start is under way


class SSHJob(LoginJob):
    """Hosts that are reached by ``ssh``, without a password.

    Args:
        python_exe: the Python command of the hosts, in shell syntax: ``"env X=1 python3"`` is
            possible. That Python needs pymonarch, and the same minor version as this one.
        ssh_args: more arguments of ``ssh``, such as ``("-i", "key", "-p", "2222")``.
        monarch_port: the port where the workers listen; 0: any free port.
        transport: ``"tcp"``, or ``"tls"`` (also ``"metatls"``, ``"metatls-hostname"``) if the
            ``HYPERACTOR_TLS_*`` variables of each host name its certificates.

    Starting blocks until every host listens, with messages on stderr about slow hosts. If a host
    cannot be started, RuntimeError names each such host, the cause and a remedy, and no host is
    left running. The hosts outlive the script. They end with `kill`, when this machine shuts down,
    and when it loses the connection to them.

        job = SSHJob()
        job.add_mesh("trainers", ["node1", "node2"])
        procs = job.state().trainers.spawn_procs({"gpus": 8})

    Raises ValueError for an unknown transport or an impossible port.
    """

    _prefix = "monarch-ssh-job-"
    _spares: tuple[str, ...] = ()

    def __init__(
        self,
        python_exe: str = "python",
        ssh_args: Sequence[str] = (),
        monarch_port: int = 22222,
        transport: str = "tcp",
    ) -> None:
        super().__init__()
        if transport not in _TRANSPORTS:
            raise ValueError(f"transport must be one of {sorted(_TRANSPORTS)}, not {transport!r}")
        if not 0 <= monarch_port < 65536:
            raise ValueError(f"monarch_port must be between 0 and 65535, not {monarch_port}")
        if isinstance(ssh_args, str):
            raise TypeError(f"ssh_args must be a list of arguments, not {ssh_args!r}")
        self._python_exe = python_exe
        self._ssh_args = tuple(map(str, ssh_args))
        self._port = monarch_port
        self._scheme = _TRANSPORTS[transport]
        self._python = sys.version_info[:2]
        self._holders: list[OsProcess] = []
        self._replaced: dict[
            str, int
        ] = {}  # former address -> position; meshes know hosts by the first

    def add_spares(self, hosts: Sequence[str]) -> None:
        """Add hosts where nothing runs until one of them takes the place of a lost host.

        `replace_host` starts a worker on the first of them that is not in use, and on the lost host
        if there is none; so does a `Supervisor` with ``spares=job``. Raises ValueError for an
        invalid host name, and TypeError for a string instead of a list.
        """
        check_hosts(hosts)
        self._spares = (*self._spares, *hosts)

    def _description(self) -> tuple[Any, ...]:
        own = (
            self._python_exe,
            self._ssh_args,
            self._port,
            self._scheme,
            self._python,
            self._spares,
        )
        return *super()._description(), *own

    # -- starting --------------------------------------------------------------------------------

    def _start_hosts(self, hosts: Sequence[str]) -> list[ProcessState]:
        ssh = _ssh()
        remove_stale(self._prefix)
        starting: list[_Starting] = []
        try:
            for number, host in enumerate(hosts):
                starting.append(_Starting(self, number, host, ssh))
            self._await(starting, _START_LIMIT)
            errors = [f"  - {one.host}: {one.error}" for one in starting if one.error]
            if errors:
                raise RuntimeError(
                    f"{len(errors)} of {len(hosts)} hosts cannot be started:\n" + "\n".join(errors)
                )
            self._hold(starting, [log_file(self._folder, n) for n in range(len(hosts))])
        except BaseException:
            _abandon(starting)
            raise
        for one in starting:
            one.close()
            watch(one.process)
        return [ProcessState(one.process.pid, one.address) for one in starting]

    def _replace_host(self, address: str) -> str:
        """Start a worker on a host that is not in use, in the place of a lost one.

        The lost host itself is tried last. Each round gives every candidate its share of the time
        that is left.
        """
        ssh = _ssh()
        with _changing:  # `kill` waits for each ssh, which ends with its worker
            folder = self._folder
            if not folder:
                raise RuntimeError("the job was killed")
            number, lost = self._find(address)
            lost.process.send(signal.SIGKILL)  # its worker ends, if it can be reached at all
        deadline = time.monotonic() + _REPLACE_LIMIT
        said: dict[str, str] = {}
        while True:
            names = self._candidates(lost.name)
            for place, name in enumerate(names):
                with _changing:
                    if (folder, name) in _tried:
                        continue
                    _tried.add((folder, name))
                try:
                    share = max(0.1, deadline - time.monotonic()) / (len(names) - place)
                    one = _Starting(self, number, name, ssh)
                    try:
                        self._await([one], share)
                        if not one.error:
                            return self._put(one, lost, folder)
                    except BaseException:
                        _abandon([one])
                        raise
                    said[name] = one.error
                    _abandon([one])
                finally:
                    _tried.discard((folder, name))
            if time.monotonic() + _PAUSE >= deadline:
                why = "; ".join(
                    f"ssh {name}: {' '.join(text.split())}" for name, text in said.items()
                )
                raise RuntimeError(
                    f"no host in the place of {lost.name} within {_REPLACE_LIMIT:g} s: "
                    f"{why or 'each is being started for another lost host'}"
                )
            threading.Event().wait(_PAUSE)

    def _find(self, address: str) -> tuple[int, Host]:
        """Return the number of the host that is or was at this address, and the host."""
        hosts = [host for hosts in self._hosts.values() for host in hosts]
        known = [host.address for host in hosts]
        if address not in known and address not in self._replaced:
            raise ValueError(f"the job has no host at {address}; its hosts are {', '.join(known)}")
        number = known.index(address) if address in known else self._replaced[address]
        return number, hosts[number]

    def _candidates(self, lost: str) -> list[str]:
        """Return the hosts that may take the place of `lost`: that one last."""
        used = {host.name for hosts in self._hosts.values() for host in hosts} - {lost}
        known = [*self._spares, *(name for names in self._meshes.values() for name in names)]
        return [*dict.fromkeys(n for n in known if n not in used and n != lost), lost]

    def _put(self, one: _Starting, lost: Host, folder: str) -> str:
        """Put a host that was started in the place of a lost one; return its address."""
        host = Host(one.host, one.address, OsProcess.of(one.process.pid))
        with _changing:
            if self._folder != folder:
                raise RuntimeError("the job was killed while a lost host was replaced")
            stays = not lifeline.is_held(folder)  # the hosts outlive this script
            self._hold([one], [])
            self._replaced[lost.address] = one.number
            for hosts in self._hosts.values():
                hosts[:] = [host if old == lost else old for old in hosts]
            if stays:
                lifeline.release(folder)
        one.close()
        watch(one.process)
        return host.address

    def _await(self, starting: Sequence[_Starting], limit: float) -> None:
        """Wait until each host listens or has failed. A failure goes to the host's `error`."""
        waiting = list(starting)

        def text() -> str:
            return f"waiting for {', '.join(one.host for one in waiting)} to answer by ssh"

        deadline = time.monotonic() + limit
        with selectors.DefaultSelector() as selector, progress(text):
            for one in starting:
                selector.register(one.output, selectors.EVENT_READ, one)
            while waiting:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    one = key.data
                    if one.read():
                        selector.unregister(key.fileobj)
                        waiting.remove(one)
                if not ready:
                    for one in waiting:
                        one.error = f"it did not answer within {limit:.3g} s"
                    return

    def _hold(self, starting: Sequence[_Starting], logs: Sequence[str]) -> None:
        """Start a holder: a process that holds the inputs of these hosts open instead of us.

        It also keeps these logs small.
        """
        fds = [fd for one in starting for fd in (one.input, one.output)]
        fds += lock_of(self._folder)
        _, line = lifeline.add(self._folder)
        with line:
            told = [str(line.fileno()), lifeline.STAY.decode(), self._folder, *logs]
            holder = subprocess.Popen(
                [*python_command(sys.executable, _HOLDER), *told],
                pass_fds=[*fds, line.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._holders.append(OsProcess.of(holder.pid))
        watch(holder)

    # -- ending ----------------------------------------------------------------------------------

    def _kill(self) -> None:
        with _changing:
            leave([*self._replaced])
            super()._kill()
            self._replaced = {}

    def _end_hosts(self, processes: list[OsProcess]) -> None:
        for holder in self._holders:
            holder.send(signal.SIGTERM)
        self._holders = []
        lifeline.cut(self._folder)
        for process in wait_for(processes, _GRACE):  # ssh exits once its remote worker has
            process.send(signal.SIGKILL)


SSHJob.__module__ = "monarch.job"


def login_command(python: str) -> str:
    """Return the command that starts a host, for the shell there. `python` is in shell syntax."""
    return f"exec {' '.join(ANY_PYTHON)} {python} -c {shlex.quote(_BOOTSTRAP)}"


def _ssh() -> str:
    ssh = shutil.which("ssh")
    if ssh is None:
        raise RuntimeError("ssh is not installed here (Debian: apt-get install openssh-client)")
    return ssh


def _abandon(starting: Sequence[_Starting]) -> None:
    """End hosts that are being started. Blocks until their ``ssh`` processes have exited.

    At EOF on its input a worker exits, and its ``ssh`` with it. An ``ssh`` whose worker has not
    answered may have no connection, so it is terminated at once.
    """
    processes = [OsProcess.of(one.process.pid) for one in starting]
    for one in starting:
        one.close()
        if not one.said:
            one.process.terminate()
    for process in wait_for(processes, _GRACE):
        process.send(signal.SIGKILL)
    for one in starting:
        one.process.wait()


class _Starting:
    """A host that is being started: its ``ssh`` process, and the host's answer.

    `error` is a description of the failure, or empty; `said` is the answer of the host.
    """

    def __init__(self, job: SSHJob, number: int, host: str, ssh: str) -> None:
        self.host = host
        self.error = ""
        self.said: dict[str, Any] = {}
        self._job = job
        self._ssh = ssh
        self.number = number
        self._heard = b""
        read, self.input = os.pipe()
        self.output, write = os.pipe()
        try:
            with open(log_file(job._folder, number), "ab") as log:  # see `host_log`
                self.process = subprocess.Popen(
                    [ssh, *job._ssh_args, *_OPTIONS, host, login_command(job._python_exe)],
                    stdin=read,
                    stdout=write,
                    stderr=log,
                    start_new_session=True,
                )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(read)
            os.close(write)
        with open(secret_file(job._folder)) as file:
            secret = file.read().strip()
        told = {"secret": secret, "address": f"{job._scheme}://*:{job._port}"}
        # A line fits into any pipe, so this does not block. If ssh has exited already, `read` sees
        # the end of its output.
        with contextlib.suppress(BrokenPipeError):
            os.write(self.input, json.dumps(told).encode() + b"\n")

    def read(self) -> bool:
        """Read output of the host. Return True once the host has answered or failed."""
        data = os.read(self.output, 1 << 16)
        self._heard += data
        start = self._heard.find(MARK.encode())  # a login shell may print text before the mark
        if start >= 0 and (not data or b"\n" in self._heard[start:]):
            line = self._heard[start + len(MARK) :].partition(b"\n")[0]
            self.said = json.loads(line)
            self.error = self._objection()
            return True
        if data:
            return False
        self.error = self._failure()
        return True

    def close(self) -> None:
        """Close this script's ends of the input and the output of ``ssh``."""
        for fd in (self.input, self.output):
            os.close(fd)

    @property
    def address(self) -> str:
        """The address where the worker is dialed."""
        host = self._job_host()
        return f"{self._job._scheme}://{f'[{host}]' if ':' in host else host}:{self.said['port']}"

    def _job_host(self) -> str:
        """Return the name that ssh resolves the host's name to, see ``~/.ssh/config``."""
        done = subprocess.run(
            [self._ssh, "-G", *self._job._ssh_args, self.host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            word, _, value = line.partition(" ")
            if word == "hostname":
                return value
        return self.host.rpartition("@")[2]

    def _objection(self) -> str:
        """Return why a host that answered cannot be used; an empty string if it can."""
        theirs, mine = tuple(self.said["python"]), sys.version_info[:2]
        python = f"{self.said['path']} there is Python {theirs[0]}.{theirs[1]}"
        if theirs != mine:
            return (
                f"{python}, this side {mine[0]}.{mine[1]}: code travels by value, so both must be "
                "the same; name another with python_exe"
            )
        error = self.said.get("error")
        if error == "package":
            return (
                f"{python} without pymonarch ({self.said['text']}): install it there, or name "
                "another with python_exe"
            )
        if error == "address":
            return (
                f"its worker cannot listen at port {self._job._port} ({self.said['text']}): is "
                "another job there? Name another monarch_port, or 0 for any"
            )
        if error:
            return str(self.said["text"])
        return ""

    def _failure(self) -> str:
        """Wait for ``ssh`` to exit, and return why there was no answer."""
        status = self.process.wait()
        text = last_words(self._job._folder, self.number)
        if status in _NO_PYTHON:
            return (
                f"there is no {self._job._python_exe!r} there that could be run; name another with "
                f"python_exe; it said: {text}"
            )
        if status == _SSH_FAILED:
            for fragment, remedy in _REMEDIES:
                if fragment in text:
                    return f"{remedy}; ssh said: {text}"
            return f"ssh failed: {text}"
        return f"its worker ended with status {status} before it listened; it said: {text}"
