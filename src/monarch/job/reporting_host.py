"""The worker that a launcher starts on each host; it reports to the driver's rendezvous.

Its configuration is in environment variables, since the arguments of a process are visible to other
users of a host: the job's secret (`node.SECRET_VARIABLE`), the addresses of the rendezvous and of
the worker, and the launcher's variables with its rank (`rank`). None of the first kind is inherited
by processes of the host.

The worker ends when its connection to the driver closes; with MONARCH_WORKER_UNTIL_EOF also at EOF
on its standard input, for launchers whose own end it could miss otherwise.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping

from monarch._spi import HandshakeError, SecretError, find_secret, start_thread
from monarch.job.host import serve_host
from monarch.job.node import SECRET_VARIABLE, kept_secret, take_secret
from monarch.job.rank import COUNT_VARIABLE, RANK_VARIABLE, RENDEZVOUS_VARIABLE, Rank, find_rank
from monarch.job.rendezvous import Report, report

__all__ = ["ADDRESS_VARIABLE", "UNTIL_EOF_VARIABLE", "VARIABLES", "main", "serve"]

ADDRESS_VARIABLE = "MONARCH_WORKER_ADDRESS"
"""The environment variable with the address where the worker listens."""
UNTIL_EOF_VARIABLE = "MONARCH_WORKER_UNTIL_EOF"
"""The environment variable that ends the worker at EOF of its input, if it is set."""
VARIABLES = (SECRET_VARIABLE, RENDEZVOUS_VARIABLE, ADDRESS_VARIABLE)
"""The environment variables that a launcher has to pass on."""

_REPORT_LIMIT = 10.0  # seconds: the driver listens before it starts a launcher


def main() -> None:
    """Run a host until the driver's end of its connection closes."""
    try:
        rank = find_rank(os.environ)
        told = take_configuration(os.environ)
        for name in (RANK_VARIABLE, COUNT_VARIABLE):
            os.environ.pop(name, None)
        if rank is None:
            raise ValueError(
                "the launcher has set no rank: it is none of srun, mpirun and torchrun, or does "
                "not pass on its variables"
            )
        with kept_secret(told[SECRET_VARIABLE]):
            until_eof = bool(os.environ.pop(UNTIL_EOF_VARIABLE, ""))
            serve(told[RENDEZVOUS_VARIABLE], told[ADDRESS_VARIABLE], rank, until_eof=until_eof)
    except (ValueError, SecretError) as error:
        sys.exit(f"monarch worker on {socket.gethostname()}: {error}")


def take_configuration(environ: MutableMapping[str, str]) -> Mapping[str, str]:
    """Return the variables of `VARIABLES`, and remove them. Raises ValueError."""
    if lacking := [name for name in VARIABLES if not environ.get(name)]:
        raise ValueError(
            f"the launcher does not pass on {' and '.join(lacking)}: it must pass on the "
            "environment variables of the job"
        )
    secret = take_secret()
    return {SECRET_VARIABLE: secret, **{name: environ.pop(name) for name in VARIABLES[1:]}}


def serve(
    rendezvous: str,
    address: str,
    rank: Rank,
    *,
    limit: float = _REPORT_LIMIT,
    until_eof: bool = False,
) -> None:
    """Serve this host at `address`, and report it; return when the driver has ended it.

    The secret is found as usual (`find_secret`). To be called on the main thread. Raises ValueError
    with one line if the worker cannot listen, or its report is not accepted.
    """
    here = socket.gethostname()

    def listening(url: str) -> None:
        said = Report(rank.number, rank.size, here, os.getpid(), url)
        try:
            line = report(rendezvous, find_secret(), said, limit)
        except HandshakeError as error:
            raise ValueError(
                f"the driver at {rendezvous} refused rank {rank.number}: {error}"
            ) from error
        except OSError as error:
            why = error.strerror or error
            raise ValueError(
                f"rank {rank.number} cannot reach the driver at {rendezvous} ({why}): has it "
                "ended, or does a firewall keep the hosts apart?"
            ) from error
        end_with(lambda: bool(line.recv(1)))
        if until_eof:
            end_with(lambda: bool(os.read(0, 4096)))

    try:
        serve_host(address, listening)
    except OSError as error:
        raise ValueError(f"cannot listen at {address}: {error.strerror or error}") from error


def end_with(goes_on: Callable[[], bool]) -> None:
    """End this worker once `goes_on`, which blocks, returns False or fails."""

    def wait() -> None:
        try:
            while goes_on():
                pass
        except OSError:  # the connection broke, which is an end as well
            pass
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    start_thread("monarch-lifeline", wait)


if __name__ == "__main__":
    main()
