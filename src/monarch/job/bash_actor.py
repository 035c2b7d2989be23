"""`BashActor`: scripts on the processes of a mesh, whose output is returned or sent by lines.

`exec_command` is the same for programs that only want to see the output and the exit status.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import IO, Any

from monarch.actor import Actor, Port, current_rank, endpoint
from monarch.job.command import environment_at, outputs_at

__all__ = ["BashActor"]

_NOT_FOUND = 127  # the exit status of shells for a missing program


class BashActor(Actor):
    """Runs scripts of bash and programs of Python, each in a child of its process.

    Each finds ``MONARCH_RANK_<dim>`` and ``MONARCH_SIZE_<dim>`` in its environment. Its input is
    empty. The status 128 + n means that signal n ended it, 127 that there is no such program.

        bash = hosts.spawn_procs().spawn("bash", BashActor)
        [(_, answer), *_] = bash.run.call("nvidia-smi -L").get()
        print(answer["stdout"])
    """

    @endpoint
    def run(
        self,
        script: str,
        target_ranks: Sequence[int] | None = None,
        output_dir: str | None = None,
    ) -> dict[str, Any]:
        """Run a script of bash; return a dict of "returncode", "stdout" and "stderr".

        Args:
            script: the text of the script.
            target_ranks: the ranks of the mesh that run it; None: all. The others return at once,
                with the status 0 and ``"skipped": True``.
            output_dir: write the output to ``stdout.txt`` and ``stderr.txt`` in a directory there,
                as `exec_command` does, and return none.
        """
        if _skips(target_ranks):
            return {"returncode": 0, "stdout": "", "stderr": "", "skipped": True}
        with _file(script) as path:
            return _collected(["bash", path], environment_at(current_rank()), None, output_dir)

    @endpoint
    def run_python(
        self,
        cmd: Sequence[str],
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        client_cwd: str | None = None,
        output_dir: str | None = None,
    ) -> dict[str, Any]:
        """Run ``file.py`` or ``-m module``, with arguments, by the Python of this process.

        Args:
            cmd: the words of the command line after ``python``.
            env: additional environment variables.
            workdir: the working directory.
            client_cwd: the working directory without a `workdir`, if it exists here.
            output_dir: see `run`.

        Returns what `run` returns. Raises ValueError for an empty `cmd`.
        """
        if not cmd:
            raise ValueError("there is no program to run")
        if workdir is None and client_cwd is not None and os.path.isdir(client_cwd):
            workdir = client_cwd
        environ = {**environment_at(current_rank()), **(env or {})}
        return _collected([sys.executable, *cmd], environ, workdir, output_dir)

    @endpoint
    def run_streaming(
        self,
        script: str,
        output_port: Port[str],
        target_ranks: Sequence[int] | None = None,
    ) -> None:
        """Run a script of bash, and send each line of its output as it is printed.

        The messages of rank 3 are ``"3:out:<line>"``, ``"3:err:<line>"``, and at last
        ``"3:rc:<status>"``; of a rank that is not in `target_ranks`, only ``"skip:3"``.
        """
        rank = current_rank().rank
        if _skips(target_ranks):
            output_port.send(f"skip:{rank}")
            return
        with _file(script) as path:
            child = subprocess.Popen(
                ["bash", path],  # noqa: S607 - the one of the host
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment_at(current_rank()),
            )
            readers = [
                threading.Thread(
                    target=_send_lines,
                    args=(pipe, f"{rank}:{kind}:", output_port),
                    name=f"monarch-bash-{kind}",
                )
                for pipe, kind in ((child.stdout, "out"), (child.stderr, "err"))
                if pipe is not None
            ]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            output_port.send(f"{rank}:rc:{_status(child.wait())}")


BashActor.__module__ = "monarch._src.job.job"


def _skips(ranks: Sequence[int] | None) -> bool:
    return ranks is not None and current_rank().rank not in ranks


@contextlib.contextmanager
def _file(script: str) -> Generator[str]:
    """Keep a script in a file: arguments are limited, and visible to other users."""
    with tempfile.NamedTemporaryFile("w", prefix="monarch-script-", suffix=".sh") as file:
        file.write(script)
        file.flush()
        yield file.name


def _collected(
    words: Sequence[str], environ: Mapping[str, str], workdir: str | None, output_dir: str | None
) -> dict[str, Any]:
    out, err = outputs_at(output_dir, current_rank())
    try:
        child = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out or subprocess.PIPE,
            stderr=err or subprocess.PIPE,
            env=environ,
            cwd=workdir,
            check=False,
        )
    except OSError as error:
        text = f"{error.filename or words[0]}: {error.strerror}\n"
        return {"returncode": _NOT_FOUND, "stdout": "", "stderr": text}
    finally:
        for file in filter(None, (out, err)):
            file.close()
    return {
        "returncode": _status(child.returncode),
        "stdout": (child.stdout or b"").decode(errors="replace"),
        "stderr": (child.stderr or b"").decode(errors="replace"),
    }


def _send_lines(pipe: IO[bytes], head: str, port: Port[str]) -> None:
    with pipe:
        for line in pipe:
            port.send(head + line.decode(errors="replace").rstrip("\n"))


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
