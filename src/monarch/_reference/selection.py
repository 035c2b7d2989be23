"""`Selection`: which actors of a mesh get a message, as an object."""

from __future__ import annotations

__all__ = ["Selection"]


class Selection(str):
    """A value for the ``selection`` of `monarch.actor.send`; make it with `all` or `any`.

    >>> Selection.all(), Selection.from_string("?")
    ('all', 'choose')
    """

    __slots__ = ()

    @classmethod
    def all(cls) -> Selection:
        """Return the selection of all actors."""
        return cls("all")

    @classmethod
    def any(cls) -> Selection:
        """Return the selection of one actor, picked at random."""
        return cls("choose")

    @classmethod
    def from_string(cls, text: str) -> Selection:
        """Return the selection of a text: ``*`` for all, ``?`` for any; ValueError for others."""
        if text in ("*", "all"):
            return cls.all()
        if text in ("?", "any", "choose"):
            return cls.any()
        raise ValueError(f"{text!r} is no selection: use '*' for all actors, or '?' for any")
