"""The mutants of a module: its code with one change each, which breaks a promise or has no effect.

A mutant is of one kind:

    condition   a condition is negated, constant, or has another comparison
    number      a number is one more, a sum is a difference
    deletion    a statement is left out
    cleanup     left out: a statement that releases something, a ``finally``, or what an ``except``
                does before it raises again
    lock        a block runs without the lock that it takes
    await       a statement does not wait

Texts of errors, annotations and asserts are not changed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["KINDS", "Mutant", "mutants"]

KINDS = ("condition", "number", "deletion", "cleanup", "lock", "await")

_SHIFTED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_LEFT_OUT = (ast.Expr, ast.Raise, ast.Assign, ast.AugAssign, ast.Delete, ast.Return)
_FOR_OTHERS = ("__slots__", "__all__")
"""Without these names nothing that is promised changes."""
_RELEASES = frozenset(
    "cancel clear close close_port closerange detach discard forget kill kill_procs killpg pop "
    "popitem popleft quiet release remove rmdir rmtree shutdown stop terminate unlink unregister "
    "unregister_data_link".split()
)
"""Functions whose call, as a statement, releases something."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CALLED = (ast.Name, ast.Attribute)


class Mutant(NamedTuple):
    line: int
    kind: str
    text: str
    apply: Callable[[], None]
    """Changes the tree."""


def mutants(tree: ast.Module) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    for node in _code(tree):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            if not isinstance(node.test, ast.Constant):
                for value in (True, False):
                    yield _change("condition", node, "test", ast.Constant(value), node.test)
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SHIFTED:
            shifted = [_SHIFTED[type(node.ops[0])](), *node.ops[1:]]
            yield _change("condition", node, "ops", shifted, node)
        elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in _SHIFTED:
            kind = "condition" if isinstance(node, ast.BoolOp) else "number"
            yield _change(kind, node, "op", _SHIFTED[type(node.op)](), node)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield _change("number", node, "value", node.value + 1, node)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield _change("condition", node, "value", not node.value, node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and isinstance(node, ast.stmt | ast.ExceptHandler):
                for index, statement in enumerate(block):
                    is_end = isinstance(node, _FUNCTIONS) and index == len(block) - 1
                    yield from _of_statement(block, index, statement, name, is_end=is_end)


def _of_statement(
    block: list[ast.stmt], index: int, statement: ast.stmt, name: str, *, is_end: bool
) -> Iterator[Mutant]:
    first = ast.unparse(statement).partition("\n")[0]
    if isinstance(statement, ast.With | ast.AsyncWith):
        if all(_is_lock(item) for item in statement.items):
            yield _replace("lock", block, index, first, "(without)", statement.body)
    elif isinstance(statement, ast.Try):
        if statement.finalbody:
            left = ast.unparse(statement.finalbody[0]).partition("\n")[0]
            yield _without_finally(block, index, statement, left)
        for handler in statement.handlers:
            *before, last = handler.body
            if before and isinstance(last, ast.Raise) and last.exc is None:
                left = ast.unparse(handler).partition("\n")[0]
                yield _replace("cleanup", handler.body, slice(None), left, "raise", [last])
    elif isinstance(statement, _LEFT_OUT) and not _says_nothing(statement, is_end=is_end):
        if name == "finalbody" and len(block) == 1:
            return  # the same as without the `finally`
        kind = "cleanup" if name == "finalbody" else _kind_of(statement)
        empty = ast.copy_location(ast.Pass(), statement)
        yield _replace(kind, block, index, first, "(nothing)", [empty])


def _kind_of(statement: ast.stmt) -> str:
    """Return the kind of a mutant without this statement."""
    if isinstance(statement, ast.Delete):
        return "cleanup"
    if not isinstance(statement, ast.Expr):
        return "deletion"
    value = statement.value
    if isinstance(value, ast.Await):
        return "await"
    if isinstance(value, ast.Call) and isinstance(value.func, _CALLED):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else value.func.id
        if name.strip("_") in _RELEASES:
            return "cleanup"
    return "deletion"


def _is_lock(item: ast.withitem) -> bool:
    """Whether a ``with`` takes a lock: an object that exists already, and gets no name."""
    return item.optional_vars is None and isinstance(item.context_expr, _CALLED)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are changed: no annotations, asserts, error texts, `TYPE_CHECKING`."""
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.AnnAssign) and not (
        isinstance(node, ast.AnnAssign) and node.value is not None
    ):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def _says_nothing(statement: ast.stmt, *, is_end: bool) -> bool:
    """Whether leaving the statement out changes nothing that is promised.

    That is a string, one of the names above, and the last ``return None`` of a function.
    """
    if isinstance(statement, ast.Assign):
        return any(getattr(target, "id", "") in _FOR_OTHERS for target in statement.targets)
    if isinstance(statement, ast.Return):
        return is_end and getattr(statement.value, "value", statement.value) is None
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _change(kind: str, node: Any, name: str, value: Any, shown: Any) -> Mutant:
    before, old = ast.unparse(shown), getattr(node, name)
    setattr(node, name, value)
    ast.fix_missing_locations(node)
    after = ast.unparse(value if name == "test" else shown)
    setattr(node, name, old)
    return Mutant(shown.lineno, kind, f"{before} -> {after}", lambda: setattr(node, name, value))


def _replace(
    kind: str, block: list[ast.stmt], where: int | slice, before: str, after: str, by: list[Any]
) -> Mutant:
    first = block[where][0] if isinstance(where, slice) else block[where]
    span = where if isinstance(where, slice) else slice(where, where + 1)
    text = f"{before} -> {after}"
    return Mutant(first.lineno, kind, text, lambda: block.__setitem__(span, by))


def _without_finally(block: list[ast.stmt], index: int, statement: Any, left: str) -> Mutant:
    def apply() -> None:
        if statement.handlers:
            statement.finalbody = []
        else:
            block[index : index + 1] = statement.body

    text = f"finally: {left} -> (nothing)"
    return Mutant(statement.finalbody[0].lineno, "cleanup", text, apply)
