"""Where the debugger of this environment listens, as ``monarch debug`` finds it."""

from __future__ import annotations

from monarch.cli.debug import server_host, server_port

__all__ = ["server_host", "server_port"]
