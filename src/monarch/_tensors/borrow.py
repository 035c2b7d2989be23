"""`Borrow`: the use of a tensor on another stream, without a copy.

A borrow has four points, two on each stream. The stream that lends comes to the *loan*; the other
one waits for it at the *first use* of the borrowed tensor. The other one comes to the *return*,
when the borrow is dropped; the first one waits for it at its next step.

In between the rights are divided: of a mutable borrow only the borrower may use the data, otherwise
both may read and neither may write.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import TYPE_CHECKING

from monarch._tensors.active import recording
from monarch._tensors.core.aliases import Aliases
from monarch._tensors.core.special import BORROW, LEND, RECLAIM, RETURN, new_number
from monarch._tensors.misplaced import explain
from monarch._tensors.tensor import Tensor, new_tensor
from monarch._tensors.where import here, text_of

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from monarch._tensors.stream import Stream

__all__ = ["Borrow", "borrow"]


class Borrow:
    """The borrow of one tensor by one stream; leaving its ``with`` block drops it.

    A borrow that is collected without having been dropped warns, and is dropped then.
    """

    def __init__(self, tensor: Tensor, stream: Stream, mutable: bool) -> None:
        self._number = new_number()
        self._where = here()
        self._dropped = True  # until it has begun
        origin = tensor._aliases
        origin.may_read()
        origin.borrow(self._number, mutable, self._where)
        self._dropped = False
        self._source = tensor
        self._mutable = mutable
        self._used = False
        place = tensor._place
        engine = place.engine
        aliases = Aliases(owned=mutable)
        aliases.usable = False
        # The engine knows the storage of each tensor, and must not keep the borrow.
        aliases.arriving = functools.partial(_arrive, weakref.ref(self))
        there = engine.place(place.mesh, stream)
        engine.emit(place, (LEND, self._number, tensor._ref), self._where)
        self.tensor = new_tensor(tensor._meta, there, engine.new_ref(), aliases)
        session = recording()
        if session is not None:
            session.borrows.append(self)

    @property
    def traceback_string(self) -> str:
        """Where the borrow began."""
        return text_of(self._where)

    @property
    def is_dropped(self) -> bool:
        """Whether the borrow has ended."""
        return self._dropped

    def drop(self) -> None:
        """End the borrow: the borrowed tensor and its views become unusable, the rights return.

        Later work of the first stream on the tensor waits for what the borrower has issued until
        now. A second call has no effect.

        Raises ValueError in a compiled function that did not begin the borrow.
        """
        if self._dropped:
            return
        session = recording()
        if session is not None and self not in session.borrows:
            raise ValueError(
                "a compiled function cannot drop a borrow that began outside of it: drop it after "
                f"the call. It began here:\n{text_of(self._where)}"
            )
        self._end()

    def abandon(self) -> None:
        """End the borrow without commands, as those that began it are not sent."""
        self._dropped = True
        self.tensor._aliases.arriving = None
        self._source._aliases.give_back(self._number)

    def _end(self) -> None:
        self._dropped = True
        where = here()
        source, borrowed = self._source, self.tensor
        engine = borrowed._place.engine
        number = self._number
        with engine.lock:
            if self._used:
                engine.emit(borrowed._place, (RETURN, number, borrowed._ref), where)
            origin = source._aliases
            is_written = self._mutable and self._used and origin.dropped is None
            ref = borrowed._ref if is_written else 0
            others = tuple(origin.refs - {source._ref})
            command = (RECLAIM, number, self._used, ref, source._ref, others)
            engine.emit(source._place, command, where)
            borrowed._aliases.arriving = None
            engine.drop(borrowed, where)
            origin.give_back(number)
        engine.catch_up()

    def __repr__(self) -> str:
        kind = "mutable borrow" if self._mutable else "borrow"
        state = ", dropped" if self._dropped else ""
        return f"<{kind} of {self._source!r} for {self.tensor.stream}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.drop()

    def __del__(self) -> None:
        if not self._dropped and self.tensor._place.engine.ended is None:
            warnings.warn(
                f"a borrow was not dropped before it was collected; it began here:\n"
                f"{text_of(self._where)}",
                UserWarning,
                stacklevel=2,
            )
            self._end()


def _arrive(reference: weakref.ref[Borrow]) -> None:
    """Let the stream wait for the tensor, at its first use."""
    made = reference()
    if made is not None:
        made._used = True
        borrowed = made.tensor
        command = (BORROW, borrowed._ref, made._number, made._source._ref)
        borrowed._place.engine.emit(borrowed._place, command, here())


def borrow(tensor: Tensor, stream: Stream, mutable: bool) -> tuple[Tensor, Borrow]:
    """Return `tensor` for use on `stream`, and the borrow; see `Stream.borrow`."""
    if type(tensor) is not Tensor or tensor.dropped:
        raise explain("borrow", (tensor,), {}, None, getattr(tensor, "_place", None))
    made = Borrow(tensor, stream, mutable)
    return made.tensor, made
