"""`require_real_threads`: refuse a process in which greenlets stand in for threads.

gevent and eventlet can replace parts of the standard library so that a thread is a greenlet, and a
wait lets other greenlets run. The threads of the engine would then share one thread of the
operating system with the program, and a wait for another process would never end. Each part that
the engine needs is looked at, rather than whether the library is loaded: a program may use gevent
beside it. A package that wraps these parts, as debuggers and profilers do, is no reason to refuse.
"""

from __future__ import annotations

import sys

__all__ = ["require_real_threads"]

_GREEN = ("gevent", "eventlet")
_NEEDED = (("threading", "Lock"), ("select", "select"), ("subprocess", "Popen"), ("os", "fork"))


def require_real_threads() -> None:
    """Raise RuntimeError if gevent or eventlet has replaced what the engine needs."""
    for library in _GREEN:
        if library not in sys.modules:
            continue
        replaced = [
            module
            for module, name in _NEEDED
            if module in sys.modules and _origin(getattr(sys.modules[module], name)) == library
        ]
        if replaced:
            raise RuntimeError(
                f"{library} has replaced {', '.join(replaced)} in this process (monkey patching), "
                "and monarch needs the real ones: with greenlets in the place of threads no call "
                f"would end. Use monarch in a process that {library} does not patch, or have these "
                "left as they are, with gevent by monkey.patch_all(thread=False, select=False, "
                "subprocess=False, os=False)"
            )


def _origin(function: object) -> str:
    """Return the package that has defined a function or a class."""
    return str(getattr(function, "__module__", None)).partition(".")[0]
