"""Actors that stop in `breakpoint()`, and a debugger that finds the one with the wrong number.

Sixteen ranks compute a loss; one of them divides by a size that is wrong there. All stop before the
division. With `--wait` a person debugs them: type the printed command in another terminal, and then
`list`, `attach trainers 11`, `p size`, `detach`, `continue`. Without it the program does the same
by itself, as a connection to the debug server, and shows the dialogue.

    python examples/debugging.py
    python examples/debugging.py --wait

The rank fails after the breakpoint, so the debugger stops there once more, at the error.
"""

import argparse
import os
import socket
import sys

from monarch.actor import Actor, ActorError, current_rank, debug_controller, endpoint, this_host

CONSOLE, PDB = "monarch_dbg> ", "(Pdb) "


class Trainer(Actor):
    """Computes a loss."""

    @endpoint
    def step(self, culprit: int) -> float:
        rank = current_rank().rank
        size = 0 if rank == culprit else 4
        breakpoint()  # noqa: T100 - what this program shows
        return rank / size


class Debugger:
    """A person at `monarch debug`, who types what the program says."""

    def __init__(self) -> None:
        address = debug_controller().address.call_one().get()
        self._socket = socket.create_connection(address, timeout=60)
        self._until(CONSOLE)

    def type(self, line: str, prompt: str = CONSOLE) -> str:
        """Type a line and return the answer, up to the next prompt."""
        self._socket.sendall(f"{line}\n".encode())
        answer = self._until(prompt)
        shown = answer.removesuffix(prompt).rstrip()
        print(f"{CONSOLE}{line}", *([shown] if shown else []), sep="\n")
        return shown

    def _until(self, prompt: str) -> str:
        text = ""
        while not text.endswith(prompt):
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError(f"the debugger has closed the connection after: {text}")
            text += data.decode()
        return text


def stopped() -> int:
    """Return how many ranks wait for a debugger."""
    return len(debug_controller().list.call_one(print_output=False).get())


def debug(ranks: int, culprit: int) -> None:
    """Find the culprit, look at its numbers, and let all ranks go on."""
    while stopped() < ranks:  # each call is answered when the controller has nothing else to do
        pass
    person = Debugger()
    person.type("list")
    person.type(f"cast trainers ranks(0:{ranks}) p size")
    person.type(f"attach trainers {culprit}", PDB)
    assert person.type("p size", PDB).endswith("0")
    assert "ZeroDivisionError" in person.type("p rank / size", PDB)
    person.type("detach")
    person.type("continue")
    debug_controller().wait_pending_session.call_one().get()  # the culprit, at its error
    person.type(f"attach trainers {culprit}", PDB)
    person.type("continue")


def main() -> int:
    parser = argparse.ArgumentParser(description="Find a wrong number with the debugger.")
    parser.add_argument("--rows", type=int, default=4, help="of the mesh (default: 4)")
    parser.add_argument("--columns", type=int, default=4, help="of the mesh (default: 4)")
    parser.add_argument("--wait", action="store_true", help="for a person at `monarch debug`")
    args = parser.parse_args()
    if args.rows < 1 or args.columns < 1:
        parser.error("--rows and --columns must be at least 1")
    if not args.wait:
        os.environ["MONARCH_DEBUG_SERVER_PORT"] = "0"  # any, beside a debugger that runs already

    ranks = args.rows * args.columns
    culprit = ranks * 2 // 3 + 1 if ranks > 3 else ranks - 1
    procs = this_host().spawn_procs({"rows": args.rows, "columns": args.columns})
    call = procs.spawn("trainers", Trainer).step.call(culprit)
    if not args.wait:
        debug(ranks, culprit)
    try:
        call.get()
    except ActorError as error:
        print(f"Rank {culprit} has failed, as the debugger showed: {error.exception}")
        return 0
    finally:
        procs.stop().get()
    print("No rank has failed: did the debugger change the size?")
    return 0


if __name__ == "__main__":
    sys.exit(main())
