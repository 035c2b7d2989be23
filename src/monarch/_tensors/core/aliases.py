"""`Aliases`: the tensors of a client that share one storage on every process.

They have one access right together: a borrow of one of them is a borrow of all, a write to one of
them changes all, and if the storage is dropped all are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["PATIENCE", "Aliases", "Stack"]

PATIENCE = 16
"""Operations for which the script keeps a value that nothing reads."""

Stack = object
"""Where the program was, see `monarch._tensors.where`; false if that is not known."""


class Aliases:
    """One storage: the reference numbers of its tensors, and the rights to read and write them."""

    __slots__ = (
        "arriving",
        "borrows",
        "dropped",
        "is_small",
        "known",
        "owned",
        "patience",
        "readable",
        "refs",
        "usable",
        "writable",
    )

    def __init__(self, owned: bool = True) -> None:
        self.refs: set[int] = set()
        self.is_small = False  # whether a few such storages may wait for their deletion
        self.known: Any = None  # its data, if the script has them: see `script_value`
        self.patience = 0  # operations for which they are kept without being read
        self.owned = owned  # writable while it is not borrowed
        self.readable = True
        self.writable = owned
        self.usable = owned  # readable, writable, not known: what the fast path reads
        self.dropped: Stack | None = None  # where it was dropped
        self.borrows: dict[object, Stack] = {}  # the live borrows of it, and where each began
        self.arriving: Callable[[], None] | None = None  # to be called before the first use

    def may_read(self) -> bool:
        """Whether its tensors may be read; a borrowed storage arrives at its first use."""
        arriving = self.arriving
        if arriving is not None:
            self.arriving = None
            self.usable = self.readable and self.writable
            arriving()
        return self.readable

    def know(self, storage: Any, patience: int = PATIENCE) -> None:
        """Take note of the data, a storage of torch, which each process has alike."""
        self.known = storage
        self.patience = patience
        self.usable = False

    def forget(self) -> None:
        """Take note that the script does not know the data any longer."""
        if self.known is not None:
            self.known = None
            self.usable = self.readable and self.writable

    def drop(self, where: Stack) -> None:
        """Take all rights: the data are deleted."""
        self.dropped = where
        self.known = None
        self.usable = self.readable = self.writable = False

    def borrow(self, borrow: object, mutable: bool, where: Stack) -> None:
        """Note a borrow, which takes the right to write, and if mutable the right to read.

        Raises RuntimeError if the storage is borrowed in a way that excludes it.
        """
        if self.dropped is not None:
            raise RuntimeError("Cannot borrow this tensor: it was dropped")
        if not self.readable:
            raise RuntimeError(
                "Cannot borrow this tensor mutably because it is borrowed mutably already"
                if mutable
                else "Cannot borrow this tensor because it is borrowed mutably; drop that borrow"
            )
        if mutable and not self.writable:
            raise RuntimeError(
                "Cannot borrow this tensor mutably because it is borrowed already, or is itself a "
                "borrow that is not mutable; drop that borrow first"
            )
        self.borrows[borrow] = where
        self.usable = self.writable = False
        if mutable:
            self.known = None
            self.readable = False

    def give_back(self, borrow: object) -> None:
        """End a borrow."""
        del self.borrows[borrow]
        if self.dropped is None and not self.borrows:
            self.readable = True
            self.writable = self.owned
            self.usable = self.owned and self.known is None
