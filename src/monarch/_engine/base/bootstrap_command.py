"""The command that starts a proc that is not forked from a warm launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["BootstrapCommand"]


class BootstrapCommand:
    """The command that is executed to start a proc. Picklable.

    Args:
        program: path of the program.
        arg0: the name that the program sees as its own; None for ``program``.
        args: arguments, without the name.
        env: environment variables to set; None as a value removes an inherited variable.
        inherit_env: start from the environment of the host agent; else from an empty one. The
            variables by which a proc finds its host are set in any case.

    The attributes have the names of the arguments and can be assigned. ``args`` and ``env`` return
    copies: changing a copy does not change the command.

    >>> BootstrapCommand("py", None, ["-c"], {"A": "1"}).with_env({"B": None})
    BootstrapCommand(program='py', args=["-c"], env={"A": Some("1"), "B": None}, inherit_env=True)
    """

    __slots__ = ("_arg0", "_args", "_env", "_inherit_env", "_program")

    def __init__(
        self,
        program: str,
        arg0: str | None,
        args: Sequence[str],
        env: Mapping[str, str | None],
        inherit_env: bool = True,
    ) -> None:
        self.program = program
        self.arg0 = arg0
        self.args = args
        self.env = env
        self.inherit_env = inherit_env

    @property
    def program(self) -> str:
        """Path of the program."""
        return self._program

    @program.setter
    def program(self, value: str) -> None:
        self._program = _text("program", value)

    @property
    def arg0(self) -> str | None:
        """The name that the program sees as its own; None for ``program``."""
        return self._arg0

    @arg0.setter
    def arg0(self, value: str | None) -> None:
        self._arg0 = None if value is None else _text("arg0", value)

    @property
    def args(self) -> list[str]:
        """A copy of the arguments."""
        return list(self._args)

    @args.setter
    def args(self, value: Sequence[str]) -> None:
        if isinstance(value, str):
            raise TypeError("argument 'args': expected a sequence of strings, not one string")
        self._args = [_text("args", item) for item in value]

    @property
    def env(self) -> dict[str, str | None]:
        """A copy of the environment variables to set, or to remove (None)."""
        return dict(self._env)

    @env.setter
    def env(self, value: Mapping[str, str | None]) -> None:
        if not hasattr(value, "items"):
            raise TypeError(
                f"argument 'env': {type(value).__name__!r} object cannot be cast as 'Mapping'"
            )
        self._env = {
            _text("env", name): None if setting is None else _text("env", setting)
            for name, setting in value.items()
        }

    @property
    def inherit_env(self) -> bool:
        """Whether the proc starts from the environment of the host agent."""
        return self._inherit_env

    @inherit_env.setter
    def inherit_env(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(
                f"argument 'inherit_env': {type(value).__name__!r} object cannot be cast as 'bool'"
            )
        self._inherit_env = value

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """Return a copy whose environment has ``env`` on top."""
        return BootstrapCommand(
            self._program, self._arg0, self._args, {**self._env, **env}, self._inherit_env
        )

    def __repr__(self) -> str:
        args = ", ".join(map(_quote, self._args))
        env = ", ".join(
            f"{_quote(name)}: {'None' if value is None else f'Some({_quote(value)})'}"
            for name, value in self._env.items()
        )
        inherit_env = self._inherit_env
        return (
            f"BootstrapCommand(program='{self._program}', args=[{args}], env={{{env}}}, "
            f"{inherit_env=})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self._program, self._arg0, self._args, self._env, self._inherit_env)
        return BootstrapCommand, fields


def _text(argument: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(
            f"argument {argument!r}: {type(value).__name__!r} object cannot be cast as 'str'"
        )
    return value


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}


def _quote(text: str) -> str:
    """Quote text as the reference's native code does, since its users compare reprs."""
    escaped = (
        _ESCAPES.get(char) or (char if char.isprintable() else f"\\u{{{ord(char):x}}}")
        for char in text
    )
    return f'"{"".join(escaped)}"'


# Pickles contain the path under which programs import the class; `__test__` points doctest to it.
BootstrapCommand.__module__ = "monarch._rust_bindings.monarch_hyperactor.host_mesh"
__test__ = {"BootstrapCommand": BootstrapCommand.__doc__}
