"""``python -m monarch.spmd``: torchrun's command line on this machine; see ``monarch run``."""

from __future__ import annotations

import argparse
import sys

from monarch.spmd.command import add_arguments, execute

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m monarch.spmd", allow_abbrev=False)
    add_arguments(parser)
    sys.exit(execute(parser.parse_args()))
