"""`diagnose`: ask all processes of a job for their accounts."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, cast

from monarch._diagnosis.account import Account, account
from monarch._diagnosis.causes import Search
from monarch._diagnosis.census import Member, take
from monarch._diagnosis.diagnosis import Diagnosis, crowds
from monarch._diagnosis.kernel import state_of
from monarch._spi import HOME, Refused, Unreachable, ask, client_proc, current_proc, is_simulated

if TYPE_CHECKING:
    from monarch._spi import Proc

__all__ = ["collect", "diagnose"]

# A crowd of threads, or an idle actor that owes an answer, is reported if each of several looks
# finds one. No look sees all processes at the same moment, so an answer may be on its way in one.
_PAUSE = 0.3  # seconds between two looks for a crowd
_MOMENTS = (0.01, 0.03, 0.07)  # seconds between two for an answer: different, as calls are regular


def diagnose(timeout: float = 1.0) -> Diagnosis:
    """Return what the processes of this job do at this moment: ``print(monarch.diagnose())``.

    The text names the actors that are busy, in which line and since when, which actor waits for
    which, the processes and hosts that do not answer, full mailboxes and the last failures. The
    same from another terminal: ``monarch why``.

    Args:
        timeout: how many seconds to wait for processes that do not answer.

    Blocks for that long at most, three times. Works while all actors are busy, and from any thread
    of the script. Raises RuntimeError in the process of an actor and in the simulator.

    >>> import monarch
    >>> print(monarch.diagnose())
    The script runs no mesh of processes.
    """
    proc = current_proc()
    if is_simulated():
        raise RuntimeError("monarch.diagnose() looks at real processes; a simulation has none")
    if proc is None:
        return Diagnosis([], [], set(), os.getpid())
    if not proc.client:
        raise RuntimeError(
            "monarch.diagnose() is called in the script, which knows all processes of the job; "
            "or run `monarch why` in a terminal of the script's machine"
        )
    return collect(timeout)


def collect(timeout: float) -> Diagnosis:
    """As `diagnose`, in the script's process."""
    proc = client_proc()
    members, missing = take(timeout)
    state, rss, cpu = state_of(os.getpid())
    script = Member(proc.uid, 0, os.getpid(), HOME, proc.hostname, state, rss, cpu)
    others = [member for member in members if member.uid != proc.uid]
    accounts = _accounts(proc, others, timeout)
    for moment in _MOMENTS:
        crowded = crowds(accounts)
        all_answered = len(accounts) > len(others)  # a silent process costs each look a time limit
        if not crowded and not (all_answered and _owe(accounts)):
            break
        pause = _PAUSE if crowded else moment
        time.sleep(pause)  # noqa: TID251 - no event makes a second look worth it
        accounts = _accounts(proc, others, timeout)
    found = others
    if len(accounts) <= len(found):  # those that have exited meanwhile are not silent
        left = {member.uid for member in take(timeout)[0]}
        found = [member for member in found if member.uid in left]
    return Diagnosis(accounts, [script, *found], missing, os.getpid())


def _owe(accounts: list[Account]) -> bool:
    """Whether the script waits for an actor that does nothing, or for an answer that is here."""
    search = Search(accounts)
    waits = any(each["wait"] and each["wait"]["asked"] for each in search.scripts.values())
    kinds = {cause.kind for cause in search.causes(*search.scripts)}
    return waits and (not kinds or "idle" in kinds)


def _accounts(proc: Proc, members: list[Member], timeout: float) -> list[Account]:
    answers = [ask(member.uid, "account", timeout=timeout) for member in members]
    found: list[Account] = [account(proc)]
    until = time.monotonic() + timeout
    for answer in answers:
        try:
            body = answer.get(timeout=max(0.0, until - time.monotonic()))
        except (TimeoutError, Unreachable, Refused):
            continue  # an exit is no riddle, and silence is found in the census
        found.append(cast("Account", _tuples(json.loads(body))))
    return found


def _tuples(found: dict[str, Any]) -> dict[str, Any]:
    """Make the pairs of JSON hashable again."""
    activities = [activity for actor in found["actors"] for activity in actor["doing"]]
    for activity in activities:
        if activity["wait"] is not None:
            activity["wait"]["on"] = [tuple(pair) for pair in activity["wait"]["on"]]
    return found
