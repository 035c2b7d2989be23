"""Print how many lines of code the engine has: the core for one host, and each further capability.

A line of code is one that holds more than comments and docstrings. docs/design.md states the sum of
the core, and tests/docs/test_size.py compares.
"""

import ast
import io
import tokenize
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[1] / "src" / "monarch" / "_engine"

FURTHER = {
    "several hosts": """
        base/address base/worker_address wire/packet protocol/session/channel
        protocol/session/lanes protocol/session/stream protocol/session/detector protocol/directory
        protocol/agent_messages protocol/agent_choice
        runtime/io/heartbeats runtime/io/listener
        runtime/hosts/peer_host runtime/hosts/host_link runtime/hosts/tunnel
        runtime/hosts/stream_tunnel runtime/proc/side_stream runtime/admission/public_name
        runtime/admission/gateway runtime/agent/hosts runtime/agent/worker
        mesh/meshes/attachment mesh/script/attach""",
    "authentication and TLS": """
        protocol/session/handshake protocol/session/records launch/certificates
        runtime/admission/audit runtime/admission/authenticated runtime/admission/handshake_io
        runtime/admission/secret runtime/admission/tls runtime/admission/host_identity
        runtime/admission/socket_file""",
    "casts": """
        protocol/cast protocol/order_merge protocol/spawn_orders runtime/cast/relay
        runtime/cast/sender runtime/cast/tunnel_end""",
    "direct connections": """
        protocol/path_switch runtime/direct/link runtime/direct/manager
        runtime/direct/ticket""",
    "silent agents and stalls": """
        runtime/proc/agent_watch runtime/proc/wait_watch runtime/actor/loop_watch
        runtime/io/slow_clock""",
}
"""Modules of the engine that are not part of the core, by capability."""

BESIDE = {
    "code for the hosts": "_sync",
    "deadlocks": "_deadlock",
    "diagnosis": "_diagnosis",
    "jobs that outlive their script": "_failover",
    "output": "_output",
    "parts for compatibility only": "_reference",
    "restarts": "_restarts",
}
"""Packages beside the engine that it calls by a hook (`base/features`), by capability."""

_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def lines_of_code(path: Path) -> int:
    """Return the number of lines that hold code."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def counts() -> dict[str, int]:
    """Return the lines of code of the core and of each further capability, by name."""
    further = {
        name: sum(lines_of_code(ENGINE / f"{module}.py") for module in modules.split())
        for name, modules in FURTHER.items()
    }
    beside = {
        name: sum(lines_of_code(path) for path in (ENGINE.parent / package).rglob("*.py"))
        for name, package in BESIDE.items()
    }
    everything = sum(lines_of_code(path) for path in ENGINE.rglob("*.py"))
    return {"core for one host": everything - sum(further.values()), **further, **beside}


if __name__ == "__main__":
    for title, count in counts().items():
        print(f"{count:7,} {title}")
