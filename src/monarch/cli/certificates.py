"""``monarch certificates``: make the certificates of a job's hosts for ``tls://`` addresses."""

from __future__ import annotations

import argparse

__all__ = ["add_certificates"]

_EXAMPLES = """\
examples:
  monarch certificates tls node1 node2          node2.crt, node2.key, ca.crt, ... in tls/
  monarch certificates tls node1,10.0.0.7 --days 7   a host that is dialed by two names

One for the client is made as well. The CA's key is not kept: for more hosts make all anew.
"""


def add_certificates(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch certificates``."""
    parser.epilog = _EXAMPLES
    parser.add_argument("folder", help="where to write them; made if need be")
    parser.add_argument("hosts", nargs="+", metavar="HOST", help="NAME[,NAME...]: as it is dialed")
    parser.add_argument("--days", type=float, default=30.0, help="how long they are valid (30)")
    parser.set_defaults(run=_certificates)


def _certificates(options: argparse.Namespace) -> int:
    import datetime as dt
    import os

    from monarch.security import make_certificates

    hosts = [host.split(",") for host in options.hosts]
    folder = os.path.abspath(options.folder)
    valid = dt.timedelta(days=options.days)
    made = make_certificates(folder, [["client"], *hosts], valid=valid)
    for names, certificate in zip([["client"], *hosts], made, strict=True):
        print(f"# {names[0]}")
        for variable, path in certificate.environment.items():
            print(f"export {variable}={path}")
    return 0
