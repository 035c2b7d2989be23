"""``monarch tui``: a job in the terminal, kept up to date."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from monarch._tui.words import LANGUAGES
from monarch.cli.script_pid import add_pid

if TYPE_CHECKING:
    from monarch._tui.client import Address

__all__ = ["add_tui", "show"]

_TOKEN = "MONARCH_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
_EXAMPLES = f"""\
examples:
  monarch tui                        the one script of this user on this machine
  monarch tui 4242                   the script with this pid
  monarch tui --addr node1:1729 --token-file ~/token   a script on another machine
  monarch tui --diagnose             which part answers, as JSON; exit code 1 if one does not
  ssh node1 monarch tui              nothing but a terminal is needed there

Keys: j/k or arrows move, Tab expands, d diagnosis, p stacks, C settings, s system actors,
h stopped actors, ? explains the fields, q quits.

The script serves the admin API if it is started with MONARCH_TELEMETRY=1, or calls enable_admin()
of its job. The token is found by itself for a script of this machine; else it is in {_TOKEN},
in a file, or in the address that the script has printed.
"""


def add_tui(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch tui``."""
    parser.epilog = _EXAMPLES
    parser.add_argument("-a", "--addr", metavar="HOST:PORT", help="of the admin API, or its URL")
    add_pid(parser, "the script, if several run here")
    parser.add_argument("--token-file", help="a file that contains the token")
    parser.add_argument("--refresh-ms", type=_milliseconds, default=2000, help="between two looks")
    parser.add_argument("--theme", choices=("nord", "doom-nord-light"), default="nord")
    parser.add_argument("--lang", choices=tuple(LANGUAGES), default="en")
    parser.add_argument("--tls-ca", help="the certificate authority of the server")
    parser.add_argument("--tls-cert", help="the certificate of this client")
    parser.add_argument("--tls-key", help="its key")
    parser.add_argument("--plaintext", action="store_true", help="do not try TLS")
    parser.add_argument("--diagnose", action="store_true", help="print a report and exit")
    parser.set_defaults(run=_run)


def _milliseconds(text: str) -> int:
    value = int(text)
    if not 100 <= value <= 3_600_000:
        raise ValueError
    return value


def _run(options: argparse.Namespace) -> int:
    return show(
        options.addr,
        pid=options.pid,
        token_file=options.token_file,
        refresh_ms=options.refresh_ms,
        theme=options.theme,
        lang=options.lang,
        tls=(options.tls_ca, options.tls_cert, options.tls_key),
        plaintext=options.plaintext,
        diagnoses=options.diagnose,
    )


def show(
    addr: str | None,
    *,
    pid: int | None = None,
    port: int | None = None,
    token_file: str | None = None,
    refresh_ms: int = 2000,
    theme: str = "nord",
    lang: str = "en",
    tls: tuple[str | None, str | None, str | None] = (None, None, None),
    plaintext: bool = False,
    diagnoses: bool = False,
) -> int:
    """Show a job until the user quits; with `diagnoses`, print a report. Return the exit code.

    Raises RuntimeError if textual is missing or this is no terminal, LookupError if no script is
    found, and ValueError for an address that is none.
    """
    from monarch._tui.client import Client, Tls

    address = _address(addr, pid, port, token_file)
    client = Client(address, Tls(*tls), plaintext=plaintext)
    if diagnoses:
        from monarch._tui.checks import diagnose

        report = diagnose(client.get)
        print(json.dumps(report, indent=2))
        return 0 if report["summary"]["healthy"] else 1
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RuntimeError(
            "monarch tui needs a terminal; `monarch tui --diagnose` and `monarch why` print text"
        )
    try:
        from monarch._tui.app import Tui
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"monarch tui needs {error.name}: pip install 'pymonarch[tui]'; `monarch top` needs "
            "nothing"
        ) from None
    from monarch._tui.words import Words

    Tui(client, refresh=refresh_ms / 1000, theme=theme, words=Words(lang)).run()
    return 0


def _address(
    addr: str | None, pid: int | None, port: int | None, token_file: str | None
) -> Address:
    from monarch._observer.places import running
    from monarch._tui.client import address_of, read_token
    from monarch.cli.observed import observed

    token = read_token(token_file) if token_file else os.environ.get(_TOKEN, "")
    if addr is not None:
        address = address_of(addr, token, port)
        if not address.token:  # perhaps it is that of a script of this machine
            where = urlsplit(address.url).netloc
            tokens = [p.token for p in running() if urlsplit(p.admin_url).netloc == where]
            address = address._replace(token=tokens[0] if tokens else "")
        return address
    place = observed(pid)
    if not place.admin_url:
        raise LookupError(
            f"script {place.pid} ({place.script}) serves no admin API; call job.enable_admin() in "
            "it (needs pip install 'pymonarch[admin]')"
        )
    return address_of(place.admin_url, place.token)
