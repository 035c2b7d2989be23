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
        wire/packet protocol/channel protocol/federation protocol/lanes protocol/stream
        protocol/detector runtime/sentinel runtime/neighbour runtime/host_link runtime/tunnel
        runtime/side_stream runtime/stream_tunnel runtime/own_name runtime/gateway runtime/worker
        runtime/entrance mesh/attachment mesh/transport""",
    "authentication and TLS": """
        protocol/handshake protocol/records launch/certificates runtime/audit runtime/authentic
        runtime/greeting runtime/secret runtime/tls runtime/whereabouts""",
    "casts": "protocol/cast protocol/splice runtime/cast_relay runtime/casting runtime/seam",
    "direct connections": "protocol/turns runtime/direct runtime/directs runtime/invitation",
    "restarts": "protocol/restart runtime/fence mesh/supervisor",
    "jobs that outlive their script": """
        protocol/succession runtime/job_claim runtime/job_door runtime/job_keeper
        runtime/socket_file mesh/keepsake mesh/reattachment""",
    "deadlocks and stalls": """
        protocol/deadlock runtime/agent_watch runtime/loop_watch runtime/slow_clock
        runtime/watch""",
    "output": """
        protocol/log_lines runtime/log_files runtime/log_printer runtime/log_relay
        mesh/log_level mesh/log_prefix mesh/logging_option""",
    "code for the hosts": "runtime/file_tree mesh/workspace",
}
"""Modules of the engine that are not part of the core, by capability."""

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
    everything = sum(lines_of_code(path) for path in ENGINE.rglob("*.py"))
    return {"core for one host": everything - sum(further.values()), **further}


if __name__ == "__main__":
    for title, count in counts().items():
        print(f"{count:7,} {title}")
