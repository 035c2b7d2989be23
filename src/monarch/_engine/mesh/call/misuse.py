"""Error texts for mistakes at a call: which endpoint, which argument, and what to do instead.

The texts are only made after something was refused. Inside the engine a mistake is a `Misused`,
which holds what was wrong. The public method that the program called converts it to the error to
raise (`Misused.told`), so the traceback ends at the program's line.
`configure(full_tracebacks=True)` shows the engine's lines as well.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import is_engine_frame
from monarch._engine.base.settings import settings
from monarch._engine.wire.unsendable import first_unsendable

if TYPE_CHECKING:
    import inspect

    from monarch._engine.shapes import MeshTrait

__all__ = ["Misused", "NoSubscript", "constructor_signature", "no_such_endpoint", "signature_text"]

_MEMBERS = ("extent", "flatten", "initialized", "rename", "size", "sizes", "slice", "split", "stop")
_REWORDED = (TypeError, AttributeError, pickle.PicklingError)


class Misused(Exception):
    """A mistake in a call.

    Args:
        error: the original error.
        arguments: the positional and keyword arguments, if pickling them raised the error; None if
            they do not fit the signature.
    """

    def __init__(
        self, error: Exception, arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    ) -> None:
        super().__init__(error)
        self.error = error
        self.arguments = arguments

    def told(self, call: str, signature: inspect.Signature, cls: type | None = None) -> Exception:
        """Return the error to raise to the program.

        `call` names what was called: ``mesh.endpoint``, or the class `cls` that was to be spawned.
        """
        error = self.error
        trace = error.__traceback__
        while trace is not None and is_engine_frame(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        if self.arguments is None:
            return TypeError(
                f"{call}{signature_text(signature)}: {error}{see_page('wrong-arguments')}"
            )
        if type(error) not in _REWORDED:  # raised by the program's own pickling code
            return error.with_traceback(trace)
        named = [*_named(*self.arguments, signature), *([("", cls)] if cls else ())]
        found = first_unsendable(named)
        page = see_page("argument-cannot-be-sent")
        if found is None:
            return type(error)(f"{call} cannot be sent: {error}{page}")
        path, reason = found
        culprit = f"{call}{path}" if path[:1] in ("", ".") else f"argument {path} of {call}"
        return type(error)(f"{culprit}, {reason}{page}")

    @property
    def cause(self) -> BaseException | None:
        """The error from which that of `told` is raised."""
        if type(self.error) not in _REWORDED:
            return self.error.__cause__
        return self.error if settings.full_tracebacks else None


def constructor_signature(cls: type) -> inspect.Signature:
    """Return the signature of the class's constructor, without ``self``."""
    import inspect

    signature = inspect.signature(cls.__init__)  # type: ignore[misc]  # it is what will be called
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def signature_text(signature: inspect.Signature) -> str:
    """Return the parameters as text, without their types."""
    shown: list[str] = []
    for name, parameter in signature.parameters.items():
        kind = parameter.kind
        star = "*" if kind is kind.VAR_POSITIONAL else "**" if kind is kind.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else "=..."
        shown.append(f"{star}{name}{default}")
    return f"({', '.join(shown)})"


def no_such_endpoint(actor: type, name: str, endpoints: list[str]) -> AttributeError:
    """Return the error for ``mesh.name``: actors of this class have only these `endpoints`."""
    import difflib

    close = difflib.get_close_matches(name, endpoints, 1)
    close = close or difflib.get_close_matches(name, _MEMBERS, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    known = f"endpoints: {', '.join(endpoints)}" if endpoints else "it has no endpoints"
    page = see_page("no-such-endpoint")
    return AttributeError(f"{actor.__qualname__} has no endpoint {name}{hint} ({known}){page}")


class _NotSubscriptable(TypeError, AttributeError, KeyError):
    """A TypeError for ``mesh[2]``, an AttributeError for ``hasattr(mesh, "__getitem__")``.

    Python asks for the method in both cases in the same way. For numpy, which takes what has this
    method for a sequence, a KeyError means that it is none.
    """

    __str__ = Exception.__str__

    def __reduce__(self) -> tuple[Any, ...]:
        return TypeError, self.args


_NotSubscriptable.__name__ = _NotSubscriptable.__qualname__ = "TypeError"  # for tracebacks
_NotSubscriptable.__module__ = "builtins"


class NoSubscript:
    """A descriptor in the place of the ``__getitem__`` that meshes do not have."""

    def __get__(self, mesh: MeshTrait | None, owner: type | None = None) -> NoReturn:
        if mesh is None:
            raise AttributeError("__getitem__")
        sizes = ", ".join(f"{label}=..." for label in mesh._labels)
        remedy = f"select by dimension, with slice({sizes})" if sizes else "it has one element"
        raise _NotSubscriptable(
            f"'{type(mesh).__name__}' object is not subscriptable: {remedy}"
            f"{see_page('mesh-subscript')}"
        )


def _named(
    args: tuple[Any, ...], kwargs: dict[str, Any], signature: inspect.Signature
) -> Iterator[tuple[str, Any]]:
    """Yield the arguments, each with the name of its parameter."""
    parameters = [
        p for p in signature.parameters.values() if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
    ]
    for index, value in enumerate(args):
        last = parameters[min(index, len(parameters) - 1)] if parameters else None
        if last is None:
            yield str(index + 1), value
        elif last.kind is last.VAR_POSITIONAL:
            yield f"{last.name}[{index - len(parameters) + 1}]", value
        else:
            yield last.name, value
    yield from kwargs.items()
