"""The launchers of a host: one for each launch environment, forked from the agent or executed.

The first launcher, for the agent's own environment and interpreter, is forked before there is an
agent (runtime.agent.start). Others are executed when a spawn first needs them (launch.launcher).
One that has loaded a library for a number of threads is for that number only (launch.cores).
Launchers and the orphans that a lost launcher leaves behind are children of the agent, which reaps
them.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from monarch._engine.launch import helper
from monarch._engine.launch.children import Children, adopt_orphans, continue_without_parent
from monarch._engine.launch.cores import THREADS, divided
from monarch._engine.launch.launcher import launch_key
from monarch._engine.runtime.agent.control_links import ControlLinks
from monarch._engine.runtime.io.reactor import Reactor
from monarch._engine.transport.link import Link

__all__ = ["LauncherLink", "Launchers"]


class LauncherLink:
    """A launcher: the control link to it, and its pid."""

    __slots__ = ("link", "pid")

    def __init__(self, link: Link, pid: int) -> None:
        self.link = link
        self.pid = pid


class Launchers:
    """The launchers of this host; see the module. To be made on the main thread.

    Args:
        reactor: watches the agent's children.
        links: makes the control links.
    """

    def __init__(self, reactor: Reactor, links: ControlLinks) -> None:
        self._reactor = reactor
        self._links = links
        self._launchers: dict[Any, LauncherLink] = {}
        adopt_orphans()
        continue_without_parent()
        self._children = Children()  # launchers, and the orphans of killed launchers
        reactor.register(self._children.fileno, self._on_child)

    def adopt(self, sock: socket.socket, pid: int) -> None:
        """Use the launcher `pid`, which was forked for the agent's own environment."""
        environ, _ = divided(os.environ, 1)
        self._launchers[launch_key(environ), sys.executable, ""] = self._linked(sock, pid)

    def find(
        self, environ: Mapping[str, str], python: str | None, threads: Mapping[str, str]
    ) -> LauncherLink:
        """Return the launcher for procs with this environment and interpreter.

        `threads`: the variables that libraries read while the launcher loads them; empty if it
        loads none, or if `environ` has them.
        """
        python = python or sys.executable
        blank = (launch_key(environ), python, "")
        key = (*blank[:2], threads.get(THREADS, ""))
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers.pop(blank, None) or self._execute(environ, python)
            self._launchers[key] = launcher
        return launcher

    def _execute(self, environ: Mapping[str, str], python: str) -> LauncherLink:
        sock, process = helper.start(helper.LAUNCHER, python=python, env=environ)
        process.returncode = 0  # `lost` waits for the process; Popen must not
        return self._linked(sock, process.pid)

    def _linked(self, sock: socket.socket, pid: int) -> LauncherLink:
        self._children.own.add(pid)
        link = self._links.connect(sock, "a launcher")
        launcher = link.owner = LauncherLink(link, pid)
        return launcher

    def lost(self, launcher: LauncherLink, debris: Iterable[str]) -> None:
        """Forget a launcher whose link is lost; `debris` are the directories of its procs."""
        for key, known in list(self._launchers.items()):
            if known is launcher:
                del self._launchers[key]
        self._children.await_end(launcher.pid)  # its socket is closed, so it exits
        self._children.debris += debris

    def end(self) -> None:
        """End the launchers and everything below them."""
        self._children.end(ask=True)

    def _on_child(self, _mask: int = 0) -> None:
        """React to a change of a child: a launcher exited or was stopped, or an orphan exited.

        Processes that a lost launcher leaves behind become children of this process.
        """
        for pid, status in self._children.reap():
            if os.WIFSTOPPED(status):  # a launcher must run, since it reports the exits
                os.kill(pid, signal.SIGCONT)
        self._sweep()

    def _sweep(self) -> None:
        again = self._children.sweep()
        if again < math.inf:
            self._reactor.call_at(again, self._sweep)
