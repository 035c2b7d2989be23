"""Files of the working directory that are named like modules: no process of monarch runs them.

The directory of these tests has one file for each module of the standard library. The scripts are
in another directory.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from monarch._spi import python_command
from monarch.job import ssh

CALLED = """
import os, sys
open(os.path.join(os.path.dirname(__file__), "ran"), "a").write(f"{__name__}: {sys.argv}\\n")
raise SystemExit("this is not the module that was meant")
"""
COMMAND = "import sys; from monarch.cli import main; sys.exit(main())"
WAIT = 120.0


@pytest.fixture
def scripts(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in sys.stdlib_module_names:
        # Some modules exist only on other systems.
        if not name.startswith("_") and importlib.util.find_spec(name):
            (directory / f"{name}.py").write_text(CALLED)
    return tmp_path_factory.mktemp("scripts")


def run(scripts: Path, source: str, *arguments: str, given: str = "") -> str:
    """Return the output of a script; check that it ran no file of the current directory."""
    script = scripts / "script.py"
    script.write_text(textwrap.dedent(source))
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    ran = Path("ran").read_text() if Path("ran").exists() else ""
    assert (ran, done.returncode) == ("", 0), done.stdout + done.stderr
    return done.stdout


def test_not_agents_launchers_and_procs_of_a_script(scripts: Path) -> None:
    """Procs get the path of the script, and the working directory last."""
    printed = run(
        scripts,
        """
        import os, sys
        from monarch.actor import *

        class Looks(Actor):
            @endpoint
            def path(self):
                import json, queue, socket, sqlite3
                return sys.path

        def paths(**options):
            return this_host().spawn_procs(**options).spawn("looks", Looks).path.call_one().get()

        assert paths() == [*map(os.path.abspath, sys.path), os.getcwd()], paths()
        assert paths(bootstrap_command=default_bootstrap_cmd())[-1] == os.getcwd()
        os.environ["OMP_NUM_THREADS"] = "1"  # has a launcher of its own
        assert paths()[0] == os.path.dirname(__file__)
        os.chmod(".", 0o777)
        assert paths() == [*map(os.path.abspath, sys.path)], "any user may write there"
        print("done")
        """,
    )
    assert printed == "done\n"


def test_not_hosts_of_a_job(scripts: Path) -> None:
    printed = run(
        scripts,
        """
        from monarch.actor import *
        from monarch.job import ProcessJob

        class Looks(Actor):
            @endpoint
            def look(self):
                import json, queue, socket, sqlite3
                return "here"

        job = ProcessJob({"hosts": 2})
        try:
            hosts = job.state(cached_path=None).hosts
            print(hosts.spawn_procs().spawn("looks", Looks).look.call().get().values())
        finally:
            job.kill()
        """,
    )
    assert printed == "['here', 'here']\n"


def test_not_workers_nor_their_gateways(scripts: Path) -> None:
    command = scripts / "command.py"
    command.write_text(COMMAND)
    printed = run(
        scripts,
        """
        import subprocess, sys
        from monarch.actor import *

        class Looks(Actor):
            @endpoint
            def look(self):
                import json, queue, socket, sqlite3
                return "here"

        command = [sys.executable, sys.argv[1], "worker"]
        workers = [
            subprocess.Popen([*command, "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        try:
            urls = [worker.stdout.readline().split()[1] for worker in workers]
            attach(urls[0])
            hosts = attach_to_workers(ca="trust_all_connections", workers=urls)
            print(hosts.spawn_procs().spawn("looks", Looks).look.call().get().values())
            hosts.shutdown().get()
        finally:
            for worker in workers:
                worker.terminate()
                worker.communicate()
        """,
        str(command),
    )
    assert printed == "['here', 'here']\n"


def test_not_the_command(scripts: Path, directory: Path) -> None:
    (directory / "of_this_directory.py").write_text(
        "from monarch.job import ProcessJob\njob = ProcessJob({'hosts': 1})\n"
    )
    try:
        run(scripts, COMMAND, "apply", "of_this_directory.job")
        assert run(scripts, COMMAND, "exec", "--", "echo", "hello") == "hello\n"
        assert run(scripts, COMMAND, "shell", given="echo hello\n").count("hello") >= 1
    finally:
        run(scripts, COMMAND, "kill")
    directory.chmod(0o777)
    command = [sys.executable, str(scripts / "script.py"), "apply", "of_this_directory.job"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    assert refused.returncode == 1
    assert f"modules of {directory} are not imported, since other users may write" in refused.stderr


def test_not_what_an_ssh_job_starts(scripts: Path, directory: Path) -> None:
    gone = directory / "folder"
    gone.mkdir()
    bootstrap = ["sh", "-c", ssh.login_command(sys.executable)]
    holder = [*python_command(sys.executable, ssh._HOLDER), "0", "s", str(gone)]
    for command in (bootstrap, holder):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            timeout=WAIT,
            check=True,
        )
    assert not gone.exists()
    assert not os.path.exists("ran")
