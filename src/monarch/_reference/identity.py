"""Names of procs and actors that are unique without any coordination.

A ``Uid`` is either an instance or a singleton. An *instance* is a random 64-bit number, written in
base 58 inside angle brackets. It may carry a label for people (``trainer<2MuAHeDjLCEd>``), but the
number alone decides whether two are equal. A *singleton* is just a label (``service``): there is
one such thing wherever the name is used, and the label decides.

An ``ActorAddr`` names an actor, its proc, and the location through which it is reached::

    trainer<4ER>.worker<21>@ipc://@b1946ac9
    ------------ ---------- ---------------
    actor        proc       location: a URL, or <uid>.<url> for a proc behind a host's front door

The engine itself knows processes and actors by their numbers. Randomness is passed in
(``entropy``), so that a simulated cluster can number its actors from its own seed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from monarch._spi import LABEL_LIMIT, AddressError, ChannelAddr, normalize_label, to_base58

__all__ = ["ActorAddr", "Entropy", "ProcId", "Uid", "actor_address", "check_proc_id"]

Entropy: TypeAlias = Callable[[int], bytes]
"""Returns the given number of random bytes."""

_urandom = os.urandom  # noqa: TID251 - the default; a driver passes in its own

_DIGIT = {to_base58(value): value for value in range(58)}
# Compiled at first use: most programs parse no names.
_UID = r"([^<>@.\s]*)(?:<([^<>]*)>)?"
_ACTOR = r"(?s)([^.@]*)\.([^.@]*)@(?:([^.:/@]+)\.)?([a-z]+://.*)"


def _label_fault(label: str) -> str | None:
    """Return the flaw of ``label``, or None."""
    if not label:
        return "label must not be empty"
    if len(label) > LABEL_LIMIT:
        return f"label exceeds {LABEL_LIMIT} characters"
    if not ("a" <= label[0] <= "z"):
        return "label must start with a lowercase letter"
    stray = re.search("[^a-z0-9_-]", label)
    if stray:
        return f"label contains invalid character {stray.group()!r}"
    if label[-1] in "_-":
        return "label must end with a lowercase letter or digit"
    return None


def _from_base58(digits: str) -> int:
    value = 0
    for symbol in digits:
        if symbol not in _DIGIT:
            raise ValueError(f"invalid uid: invalid uid syntax: invalid base58 uid: {digits}")
        value = value * 58 + _DIGIT[symbol]
    if value >= 2**64 or not digits:
        raise ValueError(f"invalid uid: invalid uid syntax: invalid base58 uid: {digits}")
    return value


class Uid:
    """An identity: a random number with an optional label, or a bare label.

    Made by the static methods. Immutable, hashable, picklable.

    >>> a = Uid.instance_from_value(12345, "trainer")
    >>> str(a), a.label, a == Uid.from_string("<4ER>")
    ('trainer<4ER>', 'trainer', True)
    >>> Uid.from_string("service").is_singleton
    True
    """

    __slots__ = ("_label", "_value")

    def __init__(self, label: str | None, value: int | None) -> None:
        """Accept the parts unchecked; ``value`` None makes a singleton. Use the static methods."""
        self._label = label
        self._value = value

    @staticmethod
    def anonymous(*, entropy: Entropy = _urandom) -> Uid:
        """Return a fresh instance without a label."""
        return Uid(None, int.from_bytes(entropy(8), "little"))

    @staticmethod
    def instance(label: str | None = None, *, entropy: Entropy = _urandom) -> Uid:
        """Return a fresh instance. Raises ``ValueError`` if ``label`` is not a valid label."""
        return Uid.instance_from_value(int.from_bytes(entropy(8), "little"), label)

    @staticmethod
    def instance_from_value(value: int, label: str | None = None) -> Uid:
        """Return the instance with that number; raises ``OverflowError`` beyond 64 bits."""
        if not isinstance(value, int):
            raise TypeError(
                f"argument 'value': {type(value).__name__!r} object cannot be interpreted as an "
                "integer"
            )
        if value < 0:
            raise OverflowError("can't convert negative int to unsigned")
        if value >= 2**64:
            raise OverflowError("int too big to convert")
        return Uid(_checked_label(label), value)

    @staticmethod
    def singleton(label: str) -> Uid:
        """Return the singleton of that name. Raises ``ValueError`` if the label is not valid."""
        return Uid(_checked_label(label), None)

    @staticmethod
    def from_string(text: str) -> Uid:
        """Return the inverse of ``str``. Raises ``ValueError`` beginning ``invalid uid: ``."""
        found = re.fullmatch(_UID, text)
        if found is None or not text:
            raise ValueError(
                f"invalid uid: invalid uid syntax: expected 'label', 'label<base58>' or "
                f"'<base58>', found {text!r}"
            )
        label, digits = found.groups()
        fault = _label_fault(label) if label else None
        if fault:
            raise ValueError(f"invalid uid: invalid uid syntax: invalid label: {fault}")
        return Uid(label or None, None if digits is None else _from_base58(digits))

    @property
    def label(self) -> str | None:
        """The label, or None."""
        return self._label

    @property
    def is_instance(self) -> bool:
        """Whether a number identifies the object."""
        return self._value is not None

    @property
    def is_singleton(self) -> bool:
        """Whether the label alone identifies the object."""
        return self._value is None

    @property
    def instance_value(self) -> int | None:
        """The number of an instance; None for a singleton."""
        return self._value

    def __str__(self) -> str:
        label = self._label or ""
        return label if self._value is None else f"{label}<{to_base58(self._value)}>"

    def __repr__(self) -> str:
        return f"Uid({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Uid):
            return NotImplemented
        if self._value is None:
            return other._value is None and self._label == other._label
        return self._value == other._value

    def __hash__(self) -> int:
        return hash(self._label if self._value is None else self._value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Uid.from_string, (str(self),)


def _checked_label(label: str | None) -> str | None:
    if label is None:
        return None
    if not isinstance(label, str):
        raise TypeError(
            f"argument 'label': {type(label).__name__!r} object cannot be cast as 'str'"
        )
    fault = _label_fault(label)
    if fault:
        raise ValueError(f"invalid uid label: {fault}")
    return label


class ProcId:
    """The identity of a proc: its ``uid``. Immutable, hashable, picklable.

    >>> str(ProcId.from_string("worker<21>")), ProcId(Uid.from_string("service")).label
    ('worker<21>', 'service')
    """

    __slots__ = ("_uid",)

    def __init__(self, uid: Uid) -> None:
        if not isinstance(uid, Uid):
            raise TypeError(f"{type(uid).__name__!r} object cannot be cast as 'Uid'")
        self._uid = uid

    @staticmethod
    def from_string(text: str) -> ProcId:
        """Return the inverse of ``str``. Raises ``ValueError`` beginning ``invalid proc id: ``."""
        try:
            return ProcId(Uid.from_string(text))
        except ValueError as error:
            raise ValueError(f"invalid proc id: {error}") from None

    @property
    def uid(self) -> Uid:
        """The identity of the proc."""
        return self._uid

    @property
    def label(self) -> str | None:
        """The label of the uid, or None."""
        return self._uid.label

    def __str__(self) -> str:
        return str(self._uid)

    def __repr__(self) -> str:
        return f"ProcId({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return self._uid == other._uid if isinstance(other, ProcId) else NotImplemented

    def __hash__(self) -> int:
        return hash((ProcId, self._uid))

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcId, (self._uid,)


class ActorAddr:
    """The address of an actor: its uid, its proc, its location. Immutable, hashable, picklable.

    The constructor accepts plain names and makes singletons of them (labels are normalised); the
    runtime makes addresses of instances with ``ActorAddr.of``.

    >>> a = ActorAddr.from_string("trainer<4ER>.worker<21>@ipc://@b1")
    >>> a.actor_name, a.proc_name, a.addr, a.proc_id
    ('trainer', 'worker', 'unix:@b1', 'worker<21>@ipc://@b1')
    >>> str(ActorAddr(addr="local:3", proc_name="P q", actor_name="A"))
    'a.pq@inproc://3'
    """

    __slots__ = ("_actor", "_location", "_proc")

    def __init__(self, *, addr: str, proc_name: str, actor_name: str) -> None:
        try:
            location = ChannelAddr.parse(addr).url
        except AddressError as error:
            raise ValueError(f"Failed to parse channel address '{addr}': {error}") from None
        self._actor = Uid.singleton(normalize_label(actor_name))
        self._proc = Uid.singleton(normalize_label(proc_name))
        self._location = location

    @staticmethod
    def of(actor: Uid, proc: Uid, location: str) -> ActorAddr:
        """Return the address of ``actor`` in ``proc``.

        ``location`` is ``<url>`` or ``<uid>.<url>``.

        It is trusted, not parsed: this is the path on which the runtime names actors.
        """
        self = object.__new__(ActorAddr)
        self._actor, self._proc, self._location = actor, proc, location
        return self

    @staticmethod
    def from_string(text: str) -> ActorAddr:
        """Return the inverse of ``str``.

        Raises ``ValueError`` beginning ``Failed to extract actor id from ``.
        """
        found = re.fullmatch(_ACTOR, text)
        if found is None:
            raise ValueError(
                f"Failed to extract actor id from {text}: expected <actor>.<proc>@<location> with "
                "a URL for the location, such as ipc://@name"
            )
        actor, proc, front, url = found.groups()
        try:
            location = ChannelAddr.parse(url).url
            if front is not None:
                location = f"{Uid.from_string(front)}.{location}"
            return ActorAddr.of(Uid.from_string(actor), Uid.from_string(proc), location)
        except ValueError as error:
            raise ValueError(f"Failed to extract actor id from {text}: {error}") from None

    @property
    def addr(self) -> str:
        """The channel address in its internal spelling, such as ``unix:@x``."""
        front, scheme, rest = self._location.partition("://")
        return str(ChannelAddr.parse(front.rpartition(".")[2] + scheme + rest))

    @property
    def actor_name(self) -> str:
        """The label of the actor, or its uid if it has none."""
        return self._actor.label or str(self._actor)

    @property
    def proc_name(self) -> str:
        """The label of the proc, or its uid if it has none."""
        return self._proc.label or str(self._proc)

    @property
    def label(self) -> str | None:
        """The label of the actor, or None."""
        return self._actor.label

    @property
    def proc_label(self) -> str | None:
        """The label of the proc, or None."""
        return self._proc.label

    @property
    def uid(self) -> str:
        """The actor's uid as text."""
        return str(self._actor)

    pid = uid

    @property
    def proc_id(self) -> str:
        """The proc and its location, as text."""
        return f"{self._proc}@{self._location}"

    @property
    def is_root(self) -> bool:
        """Whether the actor is a singleton of its proc (not one of many instances)."""
        return self._actor.is_singleton

    def __str__(self) -> str:
        return f"{self._actor}.{self._proc}@{self._location}"

    def __repr__(self) -> str:
        return f"ActorAddr({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorAddr):
            return NotImplemented
        return (
            self._actor == other._actor
            and self._proc == other._proc
            and self._location == other._location
        )

    def __hash__(self) -> int:
        return hash((self._actor, self._proc, self._location))

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorAddr.of, (self._actor, self._proc, self._location)


def actor_address(actor: int, label: str, proc: int, proc_label: str) -> ActorAddr:
    """Return the address of an actor, from the numbers and labels by which the engine knows it."""
    own = Uid.instance_from_value(actor & (1 << 63) - 1, label)
    place = Uid.instance_from_value(proc & (1 << 63) - 1, normalize_label(proc_label))
    return ActorAddr.of(own, place, f"ipc://@monarch-{proc:x}")


def check_proc_id(text: str) -> None:
    """Raise ValueError if a text does not name a proc."""
    ProcId.from_string(text)


# Pickles contain the path under which programs import these classes. Doctest only examines classes
# that claim its module, so `__test__` points it to the examples.
for _public in (ActorAddr, ProcId, Uid):
    _public.__module__ = "monarch._rust_bindings.monarch_hyperactor.proc"
__test__ = {public.__name__: public.__doc__ for public in (ActorAddr, ProcId, Uid)}
