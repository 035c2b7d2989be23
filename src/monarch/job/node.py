"""The worker that a scheduler, or any launcher of one command per node, runs on a node.

The job's secret comes in an environment variable, since arguments of a process are visible to other
users of the node. The worker moves the secret into a file that only this user may read, and removes
the variable, so that no process of the host inherits it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator

from monarch._spi import own_folder

__all__ = ["SECRET_VARIABLE", "kept_secret", "take_secret"]

SECRET_VARIABLE = "MONARCH_JOB_SECRET"  # noqa: S105 - the name of the variable
"""The environment variable in which a launcher passes the job's secret to a node."""

_PREFIX = "monarch-node-"


def take_secret() -> str:
    """Return the secret of the environment, and remove it there. Raises KeyError."""
    return os.environ.pop(SECRET_VARIABLE)


@contextlib.contextmanager
def kept_secret(secret: str) -> Generator[str]:
    """Keep the job's secret in a directory of this process, and point ``serve_host`` to it.

    Yield the directory. Remove it at the end; a directory whose process was killed is removed by
    the next worker of this user.
    """
    parent = tempfile.gettempdir()
    own_folder.remove_stale(_PREFIX, parent)
    try:
        folder, _ = own_folder.make(_PREFIX, parent)  # locked as long as this process lives
    except OSError:  # the file system has no locks
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    try:
        path = os.path.join(folder, "secret")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            file.write(secret + "\n")
        os.environ["MONARCH_JOB_SECRET_FILE"] = path
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
