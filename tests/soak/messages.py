"""`python tests/soak/messages.py [N=1000000]`: N messages from 8 procs to 8 procs.

Each proc of one mesh sends to each proc of another. Every message arrives once, and in order.
"""

from __future__ import annotations

import time
from typing import Any

from report import count, end

from monarch.actor import Actor, endpoint, this_host

WAIT = 600
PROCS = 8


class Receiver(Actor):
    def __init__(self) -> None:
        self.received = [0] * PROCS
        self.next = [0] * PROCS
        self.out_of_order = [0] * PROCS

    @endpoint
    def take(self, sender: int, number: int) -> None:
        self.out_of_order[sender] += number != self.next[sender]
        self.next[sender] = number + 1
        self.received[sender] += 1

    @endpoint
    def mark(self, sender: int) -> tuple[int, int]:
        """Return the counts of messages from `sender`, whose last message is this call."""
        return self.received[sender], self.out_of_order[sender]


class Sender(Actor):
    @endpoint
    def send(self, receivers: Any, me: int, messages: int) -> list[tuple[int, int]]:
        for number in range(messages):
            receivers.take.broadcast(me, number)
        return list(receivers.mark.call(me).get(timeout=WAIT).values())


def main() -> None:
    each = -(-count(1_000_000) // PROCS**2)
    receivers = this_host().spawn_procs(per_host={"gpus": PROCS}).spawn("receivers", Receiver)
    senders = this_host().spawn_procs(per_host={"gpus": PROCS}).spawn("senders", Sender)
    senders.initialized.get(timeout=WAIT)
    receivers.initialized.get(timeout=WAIT)
    start = time.perf_counter()
    sends = [senders.slice(gpus=me).send.call_one(receivers, me, each) for me in range(PROCS)]
    answers = [send.get(timeout=WAIT) for send in sends]
    seconds = time.perf_counter() - start
    faults = [
        f"sender {sender}, receiver {receiver}: {received} of {each} received, "
        f"{out_of_order} out of order"
        for sender, receivers_say in enumerate(answers)
        for receiver, (received, out_of_order) in enumerate(receivers_say)
        if received != each or out_of_order
    ]
    end(f"{each * PROCS**2:,} messages from {PROCS} procs to {PROCS}", seconds, faults)


if __name__ == "__main__":
    main()
