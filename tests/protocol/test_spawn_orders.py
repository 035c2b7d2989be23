"""Spawn orders are carried out once, at their place among direct messages, by whatever path."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.protocol.spawn_orders import Arrivals, Orders, Place


class Pair:
    """A session: direct messages arrive in order, orders in the tree at any time, or never."""

    def __init__(self) -> None:
        self.orders: Orders[str] = Orders()
        self.arrivals: Arrivals[str] = Arrivals()
        self.sent: list[str] = []
        self.got: list[str] = []
        self.direct: list[tuple[int, str]] = []  # (number of the order it is a copy of, or 0)
        self.tree: list[tuple[Place, str]] = []
        self.confirmations: list[int] = []
        self.copies = 0

    def say(self) -> None:
        text = f"message {len(self.sent)}"
        self.sent.append(text)
        self._copy(self.orders.say())
        self.direct.append((0, text))

    def say_aside(self) -> None:
        """Send a message that has nothing to do with orders, and takes none with it."""
        self._copy(self.orders.say(ordered=False))
        self.direct.append((0, ""))

    def insist(self) -> None:
        self._copy(self.orders.copies())

    def _copy(self, copies: list[tuple[int, str]]) -> None:
        self.copies += len(copies)
        self.direct += copies

    def order(self) -> None:
        text = f"order {len(self.sent)}"
        self.sent.append(text)
        self.tree.append((self.orders.send(text), text))

    def arrive(self) -> None:
        number, text = self.direct.pop(0)
        if number:
            self.got += self.arrivals.by_copy(number, text)
        elif text:
            self.got.append(text)
        self.got += self.arrivals.heard()

    def arrive_by_tree(self, index: int, *, again: bool = False) -> None:
        place, text = self.tree[index] if again else self.tree.pop(index)
        self.got += self.arrivals.by_tree(place, text)
        self.confirmations.append(place.number)


acts = st.lists(
    st.one_of(
        st.sampled_from(["say", "order", "say aside", "insist", "arrive"]),
        st.tuples(st.sampled_from(["tree", "again", "lose", "confirm"]), st.integers(0, 20)),
    ),
    max_size=60,
)


def play(pair: Pair, program: list[str | tuple[str, int]]) -> None:
    for act in program:
        if act == "say":
            pair.say()
        elif act == "order":
            pair.order()
        elif act == "insist":
            pair.insist()
        elif act == "say aside":
            copies = pair.copies
            pair.say_aside()
            assert pair.copies == copies
        elif act == "arrive":
            if pair.direct:
                pair.arrive()
        else:
            what, number = act
            if what == "confirm" and pair.confirmations:
                pair.orders.confirm(pair.confirmations.pop(number % len(pair.confirmations)))
            elif what == "lose" and pair.tree:
                pair.tree.pop(number % len(pair.tree))
            elif what in ("tree", "again") and pair.tree:
                pair.arrive_by_tree(number % len(pair.tree), again=what == "again")
        # What the receiver has is always the beginning of what was sent.
        assert pair.got == pair.sent[: len(pair.got)]


@given(acts)
def test_everything_happens_once_and_in_the_order_of_sending(program) -> None:
    """Orders in the tree are lost, late or arrive twice; copies go before direct messages."""
    pair = Pair()
    play(pair, program)
    pair.insist()
    while pair.direct:
        pair.arrive()
        assert pair.got == pair.sent[: len(pair.got)]
    assert pair.got == pair.sent
    for index in range(len(pair.tree)):  # late ones change nothing
        pair.arrive_by_tree(index, again=True)
    assert pair.got == pair.sent


@given(acts)
def test_without_losses_the_tree_alone_brings_all_orders(program) -> None:
    pair = Pair()
    play(pair, [act for act in program if act != "insist" and act[0] not in ("lose", "confirm")])
    while pair.direct or pair.tree:
        if pair.direct:
            pair.arrive()
        else:
            pair.arrive_by_tree(len(pair.tree) - 1)
    assert pair.got == pair.sent


def test_confirmed_orders_are_not_copied() -> None:
    pair = Pair()
    for _ in range(10):
        pair.order()
        pair.arrive_by_tree(0)
        pair.orders.confirm(pair.confirmations.pop())
        pair.say()
        pair.arrive()
    assert pair.copies == 0
    assert pair.got == pair.sent


def test_a_direct_message_takes_open_orders_with_it_once() -> None:
    pair = Pair()
    pair.order()
    pair.order()
    pair.say()
    pair.say()
    assert [number for number, _ in pair.direct] == [1, 2, 0, 0]
    pair.insist()
    assert pair.copies == 2
