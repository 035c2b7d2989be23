"""``monarch dashboard``: the address of the dashboard of a running script."""

from __future__ import annotations

import argparse
import contextlib
import sys

from monarch.cli.script_pid import add_pid

__all__ = ["add_dashboard"]

_EXAMPLES = """\
examples:
  monarch dashboard --open         the one script of this user on this machine, in a browser
  monarch dashboard 4242           the address for the script with this pid
  monarch dashboard --demo --open  an invented cluster, to look at the pages
  ssh -L 8265:127.0.0.1:8265 node1 here, if the script is on node1 and its port 8265

A job serves the dashboard if it calls enable_telemetry(include_dashboard=True). The address has a
key in it, so treat it as a secret; the browser keeps the key and shows the address without it.
"""


def add_dashboard(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch dashboard``."""
    parser.epilog = _EXAMPLES
    parser.add_argument("--open", action="store_true", help="open it in a browser")
    add_pid(parser, "the script, if several run here")
    parser.add_argument("--demo", action="store_true", help="serve an invented cluster instead")
    parser.add_argument(
        "--ranks", type=_ranks, default=64, help="of the invented cluster: 64 to 100000 (64)"
    )
    parser.set_defaults(run=_run)


def _ranks(text: str) -> int:
    ranks = int(text)
    if not 64 <= ranks <= 100_000:
        raise ValueError
    return ranks


def _run(options: argparse.Namespace) -> int:
    if options.demo:
        return _demo(options.ranks, options.open)
    from monarch.cli.observed import observed

    place = observed(options.pid)
    if not place.dashboard_url:
        raise LookupError(
            f"script {place.pid} ({place.script}) serves no dashboard; call "
            "job.enable_telemetry(include_dashboard=True) in it (needs pip install "
            "'pymonarch[admin]')"
        )
    _show(f"{place.dashboard_url.rstrip('/')}/?token={place.token}", options.open)
    return 0


def _demo(ranks: int, opened: bool) -> int:
    from monarch._dashboard.cluster import Cluster
    from monarch._dashboard.demo import Demo

    demo = Demo(Cluster(ranks))
    try:
        _show(demo.url, opened)
        print("Ctrl-C ends it.", file=sys.stderr)
        with contextlib.suppress(KeyboardInterrupt):
            demo.closing.wait()
    finally:
        demo.close()
    return 0


def _show(url: str, opened: bool) -> None:
    print(url, flush=True)
    if opened:
        import webbrowser

        if not webbrowser.open(url):
            print("No browser could be started here; open the address by hand.", file=sys.stderr)
