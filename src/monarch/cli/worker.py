"""``monarch worker``: serve this machine as a host."""

from __future__ import annotations

import argparse
import logging
import os
import sys

__all__ = ["add_worker"]

_EXAMPLES = """\
examples:
  monarch worker tcp://node1:4444
  monarch worker 'tcp://*:0' --secret-file ~/job.secret     at all addresses, any port
  monarch worker ipc:///tmp/host0

A client attaches with
  attach_to_workers(ca="trust_all_connections", workers=["tcp://node1:4444"])
and has to know the same secret: that of --secret-file (a file of at least 16 characters and mode
0600, for example from `head -c 32 /dev/urandom | base64`), or by default one of this user's.
"""


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch worker``."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "address",
        help="where to listen: tcp://HOST:PORT (*: all, 0: any), tls:// alike, or ipc://PATH",
    )
    parser.add_argument("--secret-file", metavar="FILE", help="the secret that clients must know")
    parser.add_argument(
        "--name",
        metavar="ADDRESS",
        action="append",
        default=[],
        help="an address at which clients reach this worker beside its own: a forwarded port, NAT",
    )
    parser.add_argument(
        "--until-eof",
        action="store_true",
        help="exit at EOF of stdin, so with the process that holds the other end open",
    )
    parser.set_defaults(run=_worker)


def _worker(options: argparse.Namespace) -> int:
    from monarch.job.host import serve_host

    if options.secret_file:
        os.environ["MONARCH_SECRET_FILE"] = os.path.abspath(options.secret_file)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")

    def listening(url: str) -> None:
        print(f"serving {url} (pid {os.getpid()})", flush=True)

    try:
        lifeline = sys.stdin.fileno() if options.until_eof else None
        serve_host(options.address, listening, lifeline, options.name)
    except OSError as error:
        print(
            f"monarch worker: cannot listen at {options.address}: {error.strerror or error}",
            file=sys.stderr,
        )
        return 1
    return 0
