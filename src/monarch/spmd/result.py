"""The outcome of a launch: which failures it had, and what each of them cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["HOST", "STORE", "Failure", "Result"]

HOST = -1
STORE = -2


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt.

    Args:
        attempt: the number of the attempt, from 0.
        rank: the rank that failed; `HOST` for the loss of a host, `STORE` for that of the store.
        host: the name of its host.
        text: how it ended.
        stderr: the last lines of its stderr.
        at: when the driver learned of it, in seconds since the launch began.
        cost: seconds from then until all ranks of the next attempt had started; None: they did not.
            It does not include the work since the last checkpoint, which the program repeats.
        kept: how many ranks went on in their processes; see `monarch.spmd.restarts`.
    """

    attempt: int
    rank: int
    host: str
    text: str
    stderr: tuple[str, ...] = ()
    at: float = 0.0
    cost: float | None = None
    kept: int = 0

    def __str__(self) -> str:
        if self.rank == HOST:
            return f"host {self.host} was lost: {self.text}"
        what = "the store of the ranks" if self.rank == STORE else f"rank {self.rank}"
        return f"{what} on {self.host}: {self.text}"


@dataclass
class Result:
    """The outcome of a launch: its failures by attempt, and whether the last attempt succeeded.

    `grown` attempts were ended since a host had joined. They are no failures.
    """

    succeeded: bool = False
    attempts: int = 0
    failures: list[Failure] = field(default_factory=list["Failure"])
    seconds: float = 0.0
    max_restarts: int = 0
    grown: int = 0

    @property
    def restarts_left(self) -> int:
        """How many failures may still be followed by another attempt."""
        return self.max_restarts - max(self.attempts - 1 - self.grown, 0)

    def costs(self) -> list[str]:
        r"""Return the lines that say what failed, when, and how long ranks did not run.

        >>> died = Failure(0, 1, "node1", "killed by SIGKILL", at=12.31, cost=0.42)
        >>> print(*Result(True, 2, [died], 60.04, 3).costs(), sep="\n")
        1 failure in 60.0 s; restarting took 0.42 s; 2 restarts left
          at 12.3 s, attempt 1: rank 1 on node1: killed by SIGKILL; started again after 0.42 s

        A failure that no attempt has followed counts nothing.
        """
        if not self.failures:
            return []
        count = _counted(len(self.failures), "failure")
        cost = sum(failure.cost or 0.0 for failure in self.failures)
        left = _counted(self.restarts_left, "restart")
        first = f"{count} in {self.seconds:.1f} s; restarting took {cost:.2f} s; {left} left"
        if self.grown:
            first += f"; hosts joined {_counted(self.grown, 'time')}"
        return [first, *map(_line, self.failures)]


def _line(failure: Failure) -> str:
    then = "not started again"
    if failure.cost is not None:
        then = f"started again after {failure.cost:.2f} s"
        if failure.kept:
            then += f", {_counted(failure.kept, 'rank')} in place"
    return f"  at {failure.at:.1f} s, attempt {failure.attempt + 1}: {failure}; {then}"


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'s' * (count != 1)}"
