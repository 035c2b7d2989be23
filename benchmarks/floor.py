"""The least time of a round trip between processes in Python: pickles over a socket pair.

Two processes exchange one small tuple each way, with blocking reads and writes: no threads, no
dispatch, no futures. The time that an engine's round trip takes beyond this is the cost of its
features. Run this program alone, or let run.py put its figure into the report.
"""

import os
import pickle
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "programs"))

from timing import emit, samples

CALL: tuple[str, tuple[int], dict[str, int]] = ("echo", (7,), {})


def serve(peer: socket.socket) -> None:
    """Answer each message with its first argument until EOF."""
    while message := peer.recv(4096):
        _name, args, _kwargs = pickle.loads(message)
        peer.send(pickle.dumps(args[0]))


def main() -> None:
    """Print the seconds of one round trip."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        serve(theirs)
        os._exit(0)
    theirs.close()

    def round_trip() -> None:
        ours.send(pickle.dumps(CALL))
        assert pickle.loads(ours.recv(4096)) == 7

    emit(round_trip=samples(round_trip))
    ours.close()
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
