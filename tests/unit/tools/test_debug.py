"""`monarch debug`: stdin and stdout on the connection of a debugger."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from monarch.cli.debug import server_host, server_port
from monarch.tools import cli, commands

WAIT = 60.0


@pytest.fixture
def server() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Yield a function that serves one connection by a function, and returns the port."""
    threads: list[threading.Thread] = []

    def serve(act: Callable[[socket.socket], None]) -> int:
        listener = socket.create_server(("localhost", 0))

        def accept() -> None:
            with listener:
                sock, _ = listener.accept()
            with sock:
                sock.settimeout(WAIT)
                act(sock)

        threads.append(threading.Thread(target=accept))
        threads[-1].start()
        port: int = listener.getsockname()[1]
        return port

    yield serve
    for thread in threads:
        thread.join(WAIT)


def debug(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch.cli", "debug", *words]
    return subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, timeout=2 * WAIT
    )


def answer(sock: socket.socket) -> None:
    sock.sendall(b"monarch_dbg> ")
    with sock.makefile("rb") as lines:
        for line in lines:
            sock.sendall(b"you said " + line)
    sock.sendall(b"bye\n")


def test_lines_go_both_ways_until_the_end_of_the_input(server: Callable[..., int]) -> None:
    done = debug("--host", "localhost", "--port", str(server(answer)), given="list\nquit\n")
    assert done.stdout == "monarch_dbg> you said list\nyou said quit\nbye\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_it_ends_with_the_connection(server: Callable[..., int]) -> None:
    port = server(lambda sock: sock.sendall(b"displaced\n"))
    command = [sys.executable, "-m", "monarch.cli", "debug", "--port", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:  # its input stays open
        assert process.wait(WAIT) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b"displaced\n"


def test_no_debugger_is_an_error_of_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        done = debug("--host", "127.0.0.1", "--port", str(port))
        with pytest.raises(ConnectionError, match=r"no debugger listens at 127.0.0.1 port"):
            commands.debug("127.0.0.1", port)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"monarch debug: no debugger listens at 127.0.0.1 port {port} (Connection refused): it"
    )
    assert done.stderr.count("\n") == 1


def test_where_the_debugger_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT"):
        monkeypatch.delenv(f"MONARCH_DEBUG_SERVER_{name}", raising=False)
    assert (server_host(), server_port()) == ("localhost", 27000)
    monkeypatch.setenv("MONARCH_DEBUG_SERVER_HOST", "::1")
    monkeypatch.setenv("MONARCH_DEBUG_SERVER_PORT", "27001")
    assert (server_host(), server_port()) == ("::1", 27001)
    monkeypatch.setenv("MONARCH_DEBUG_SERVER_PORT", "0")
    with pytest.raises(ValueError, match="give the port that the script has printed"):
        server_port()


def test_commands_of_another_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser("tool")
    command = cli.ContextCmd()
    command.add_arguments(parser)
    command.run(parser.parse_args(["ls"]))
    assert capsys.readouterr().out == "No contexts.\n"
    status = cli.ExecCmd()
    parser = argparse.ArgumentParser("tool")
    status.add_arguments(parser)
    with pytest.raises(FileNotFoundError, match="No spec found"):
        status.run(parser.parse_args(["true"]))


@pytest.mark.parametrize("kind", [cli.DashboardCmd, cli.QueryCmd, cli.TuiCmd])
def test_commands_of_other_programs_have_their_options(kind: type[cli._Command]) -> None:
    parser = argparse.ArgumentParser("tool")
    kind().add_arguments(parser)
    assert parser.parse_args(["--pid", "4242"]).pid == 4242


def test_functions_that_this_release_lacks() -> None:
    with pytest.raises(NotImplementedError, match="traces are not uploaded"):
        cli.export_profile("http://localhost", 0, 1, upload=True)


def test_the_terminal_interface_needs_a_terminal() -> None:
    with pytest.raises(RuntimeError, match="monarch tui needs a terminal"):
        cli.run_mesh_admin_tui("localhost")
