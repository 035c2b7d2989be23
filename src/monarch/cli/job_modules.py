"""Where the commands find the modules that define jobs: in the working directory."""

from __future__ import annotations

import sys

__all__ = ["find_modules_here"]


def find_modules_here() -> None:
    """Have imports look into this directory last, if it can be trusted; again: no effect."""
    from monarch._spi import with_folder, working_directory

    sys.path[:] = with_folder(sys.path, working_directory())
