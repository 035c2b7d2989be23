"""Run a command of a scheduler, such as ``sbatch``, ``kubectl`` or ``mpirun --version``.

Each way to fail (a missing command, a hang, an exit status, an output that makes no sense) ends in
a `SchedulerError` of one line: the command, its message, and a remedy. A command
gets no terminal, so it cannot wait for an answer to a question.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["SchedulerError", "one_line", "run_command"]

_LIMIT = 60.0  # seconds
_MOST = 600  # characters of a command's message that an error shows


class SchedulerError(RuntimeError):
    """A command of a scheduler failed; the text has the command, its message and a remedy."""


def run_command(
    command: Sequence[str],
    *,
    input: str = "",
    environ: Mapping[str, str] | None = None,
    limit: float = _LIMIT,
    missing: str = "",
    remedy: str = "",
    wrapped: str = "{}",
) -> str:
    """Run a command to its end, and return its output.

    Args:
        input: text for its standard input.
        environ: variables in addition to this process's. An error never shows them.
        limit: seconds until the command is killed.
        missing: what to do if the command is not installed.
        remedy: what to do if the command fails.
        wrapped: the text of an error, with ``{}`` for the description of the failure.

    Raises SchedulerError.
    """

    def failed(what: str, advice: str) -> SchedulerError:
        text = f"`{shlex.join(command)}` {what}"
        return SchedulerError(wrapped.format(f"{text}; {advice}" if advice else text))

    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        raise failed("cannot be run: it is not installed here", missing) from None
    except OSError as error:
        raise failed(f"cannot be run: {error.strerror}", missing) from None
    with process:
        try:
            output, errors = process.communicate(input, timeout=limit)
        except subprocess.TimeoutExpired:
            raise failed(f"did not end within {limit:g} s", remedy) from None
        finally:
            if process.poll() is None:  # with its children, which may hold the pipes open
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()  # after an interrupt, leaving the block does not
    if process.returncode:
        said = one_line(errors) or one_line(output) or "nothing"
        raise failed(f"ended with status {process.returncode} and said: {said}", remedy)
    return output


def one_line(text: str) -> str:
    """Return the end of a command's output on one line."""
    joined = " | ".join(line.strip() for line in text.splitlines() if line.strip())
    return joined if len(joined) <= _MOST else "..." + joined[-_MOST:]
