"""The web of an observer: the admin API and the dashboard, where the extra ``[admin]`` is there."""

from __future__ import annotations

import getpass
import importlib.util
import os
import socket
from typing import Any

from monarch._store.store import Store

__all__ = ["Web", "WebError", "available", "user_name"]

_MISSING = "it needs starlette and uvicorn: pip install 'pymonarch[admin]'"


class WebError(Exception):
    """The admin API or the dashboard cannot be served; the text says why."""


def available() -> bool:
    """Whether the packages of the extra are installed."""
    return all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn"))


class Web:
    """One server of the admin API and the dashboard. Raises WebError.

    Args:
        address: host and port; the next free port if that one is taken.
        options: what the script asked for, see `main`.
        token: the key.
        store: the rows; None without telemetry.
        again: the port of an earlier observer of the script, which is tried first; 0: none.
    """

    def __init__(
        self,
        address: str,
        options: dict[str, Any],
        token: str,
        store: Store | None,
        again: int = 0,
    ) -> None:
        if not available():
            raise WebError(_MISSING)
        from monarch._admin.app import make_app
        from monarch._admin.options import LOOPBACK, Options
        from monarch._admin.server import bind, parse_address, serve
        from monarch._admin.source import ScriptSource
        from monarch._admin.tls import certificate

        try:
            host, wanted = parse_address(address)
            wanted = again or wanted
            sock = bind(f"[{host}]:{wanted}" if ":" in host else f"{host}:{wanted}")
        except (OSError, ValueError) as error:
            raise WebError(f"it cannot be served at {address}: {error}") from None
        bound, port = sock.getsockname()[:2]
        names, tls, own = LOOPBACK, None, socket.gethostname()
        if bound not in LOOPBACK:
            names = names | {bound, host.lower(), own.lower(), socket.getfqdn().lower()}
            try:
                names |= {str(each[4][0]) for each in socket.getaddrinfo(own, None)}
                tls = certificate(os.environ)
            except OSError as error:
                sock.close()
                raise WebError(f"it cannot be served at {address}: {error}") from None
        self.address = address
        self.warning = ""
        """A text for the user; empty: there is none."""
        if wanted and port != wanted:
            self.warning = f"port {wanted} is taken, so it is served at port {port}"
        if bound not in LOOPBACK and tls is None:
            self.warning += (
                f"{'; ' if self.warning else ''}{address} can be reached from other machines, "
                "without TLS: whoever can read the network can read the token (set "
                "HYPERACTOR_TLS_CERT and HYPERACTOR_TLS_KEY)"
            )
        shown = own if bound in ("0.0.0.0", "::") else bound  # noqa: S104 - compared, not bound
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"{'https' if tls else 'http'}://{shown}:{port}"
        files = _dashboard()
        self.has_dashboard = files is not None
        """Whether it serves the dashboard as well."""
        made = Options(
            token,
            options["script"],
            options["pid"],
            options["started"],
            user_name(),
            self.url,
            frozenset(names),
            files,
            None if store is None else store.replace,
            options.get("pyspy", ""),
            options.get("pyspy_timeout", 10.0),
            options.get("longest_profile", 300.0),
            options.get("retained", 100),
        )
        app = make_app(ScriptSource(options["pid"]), store, made)
        self._server = serve(app, sock, tls)

    def close(self) -> None:
        """Serve no more."""
        self._server.close()


def user_name() -> str:
    """Return the name of this user; the number, if there is none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return str(os.getuid())


def _dashboard() -> str | None:
    """Return the folder with the dashboard's files, without importing what uses this package."""
    spec = importlib.util.find_spec("monarch._dashboard")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        files = os.path.join(folder, "static")
        if os.path.isfile(os.path.join(files, "index.html")):
            return files
    return None
