"""Error texts for mistakes at a call: which endpoint, which argument, and what to do instead.

The texts are only made after something was refused. Inside the engine a mistake is a `Misused`,
which holds what was wrong. The public method that the program called converts it to the error to
raise (`Misused.told`), so the traceback ends at the program's line.
`configure(full_tracebacks=True)` shows the engine's lines as well.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from monarch._engine.base.errors import is_engine_frame
from monarch._engine.base.settings import settings
from monarch._engine.wire.codec import encode

if TYPE_CHECKING:
    import inspect


__all__ = ["Misused", "constructor_signature", "no_such_endpoint", "signature_text"]

_THRESHOLD = 1 << 16  # bytes from which a buffer is not copied when pickling is tried
_TRIES = 2000
_DEPTH = 16
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
            return TypeError(f"{call}{signature_text(signature)}: {error}")
        if type(error) not in _REWORDED:  # raised by the program's own pickling code
            return error.with_traceback(trace)
        named = [*_named(*self.arguments, signature), *([("", cls)] if cls else ())]
        return type(error)(_unsendable(named, call) or f"{call} cannot be sent: {error}")

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

    close = difflib.get_close_matches(name, [*endpoints, *_MEMBERS], 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    known = f"endpoints: {', '.join(endpoints)}" if endpoints else "it has no endpoints"
    return AttributeError(f"{actor.__qualname__} has no endpoint {name}{hint} ({known})")


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


def _unsendable(named: list[tuple[str, Any]], call: str) -> str:
    """Return which part of which argument cannot be pickled, and why.

    Empty if each argument can be pickled by itself.
    """
    search = _Search()
    for name, value in named:
        if (problem := search.problem(value)) is not None:
            path, part, problem = search.innermost(name, value, problem)
            kind = type(part).__name__
            article = "an" if kind[:1].lower() in "aeiou" else "a"
            what = f"argument {path} of {call}" if name else f"{call}{path}"
            return f"{what}, {article} {kind}, cannot be sent: {problem}"
    return ""


class _Search:
    """Searches for an object that cannot be pickled, in a limited number of tries."""

    def __init__(self) -> None:
        self._left = _TRIES

    def problem(self, value: Any) -> Exception | None:
        self._left -= 1
        try:
            encode(value, _THRESHOLD)
        except Exception as error:
            return error
        return None

    def innermost(
        self, path: str, value: Any, problem: Exception, depth: int = _DEPTH
    ) -> tuple[str, Any, Exception]:
        for step, part in _parts(value):
            if self._left <= 0 or depth <= 0:
                break
            if (found := self.problem(part)) is not None:
                return self.innermost(path + step, part, found, depth - 1)
        return path, value, problem


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that are pickled as parts of `value`, each with its expression in code."""
    whole: Any = value  # as Any, since type checkers would narrow `value` to unknown types
    if isinstance(value, dict):
        for key, part in whole.items():
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(whole):
            yield f"[{index}]", part
    elif isinstance(value, types.FunctionType):
        import inspect

        used = inspect.getclosurevars(value)
        for name, part in {**used.globals, **used.nonlocals}.items():
            yield f" (its variable {name})", part
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, type) or hasattr(value, "__dict__"):
        for name, part in list(vars(value).items()):
            if not (isinstance(value, type) and name.startswith("__")):
                yield f".{name}", part
